// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/optim/one_pass_update.h>

#include <cstddef>
#include <utility>

namespace tessera {
namespace {

// The pass of one rank.
class Pass {
 public:
  Pass(
      UpdateRule rule,
      const at::Tensor& gradients,
      const at::Tensor& parameters,
      bool average,
      int64_t rank)
      : rule_(rule),
        gradient_type_(gradients.scalar_type()),
        parameter_type_(parameters.scalar_type()),
        average_(average),
        rank_(static_cast<std::size_t>(rank)) {}

  void update(const ShardRun& run, PeerBuffers buffers) const {
    std::vector<const void*> sources;
    for (const std::byte* gradient : buffers[0]) {
      sources.push_back(gradient + bytes(run.begin, gradient_type_));
    }
    std::vector<void*> copies;
    for (std::size_t peer = 0; peer < buffers[1].size(); ++peer) {
      if (peer != rank_) {
        copies.push_back(parameter(run, buffers, peer));
      }
    }
    UpdateRange range;
    range.parameter = parameter(run, buffers, rank_);
    range.parameter_type = parameter_type_;
    range.master = run.master;
    range.gradients = sources;
    range.gradient_type = gradient_type_;
    range.average = average_;
    range.states = run.states;
    range.state_type = run.state_type;
    range.copies = copies;
    range.numel = run.numel;
    range.first_element = run.first_element;
    run_update(rule_, *run.options, run.step, range);
  }

 private:
  static int64_t bytes(int64_t elements, c10::ScalarType dtype) {
    return elements * static_cast<int64_t>(c10::elementSize(dtype));
  }

  void* parameter(
      const ShardRun& run, PeerBuffers buffers, std::size_t rank) const {
    return buffers[1][rank] + bytes(run.begin, parameter_type_);
  }

  UpdateRule rule_;
  c10::ScalarType gradient_type_;
  c10::ScalarType parameter_type_;
  bool average_;
  std::size_t rank_;
};

void require_inside(const ShardRun& run, int64_t numel) {
  if (run.begin < 0 || run.numel < 0 || run.begin > numel - run.numel) {
    throw UsageError(fmt::format(
        "update_in_one_pass: got a run of {} elements from {}, expected one "
        "inside of the {} of the buffer",
        run.numel,
        run.begin,
        numel));
  }
}

} // namespace

WorkPtr update_in_one_pass(
    const Group& group,
    UpdateRule rule,
    const at::Tensor& gradients,
    const at::Tensor& parameters,
    bool average,
    std::vector<ShardRun> runs) {
  if (gradients.numel() != parameters.numel()) {
    throw UsageError(fmt::format(
        "update_in_one_pass: got {} gradients for {} parameters, expected one "
        "each",
        gradients.numel(),
        parameters.numel()));
  }
  for (const ShardRun& run : runs) {
    require_inside(run, parameters.numel());
  }
  const at::Tensor lent[] = {gradients, parameters};
  return group.with_peers(
      lent,
      [pass = Pass(rule, gradients, parameters, average, group.rank()),
       runs = std::move(runs)](PeerBuffers buffers) {
        for (const ShardRun& run : runs) {
          if (run.numel > 0) {
            pass.update(run, buffers);
          }
        }
      });
}

} // namespace tessera
