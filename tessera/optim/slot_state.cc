// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/flat_state.h>
#include <tessera/optim/slot_state.h>

namespace tessera {
namespace {

// Of a slot: where this rank's share lies in its local tensor, and in the
// bucket's part.
struct SlotShare {
  ShareOf place;
  FlatRange in_part;
};

SlotShare share_of(const FlatBucket& bucket, const BucketSlot& slot) {
  FlatRange mine = intersect(slot.range, bucket.part());
  if (mine.size() == 0) {
    mine = {slot.range.begin, slot.range.begin};
  }
  const int64_t first = mine.size() == 0 ? mine.begin : bucket.part().begin;
  return {
      {spec_of(slot.parameter),
       local_of(slot.parameter),
       {mine.begin - slot.range.begin, mine.end - slot.range.begin}},
      {mine.begin - first, mine.end - first}};
}

at::Tensor in_part(const at::Tensor& flat, const FlatRange& range) {
  return flat.narrow(0, range.begin, range.size());
}

} // namespace

ParameterState whole_state(
    const FlatBucket& bucket,
    const BucketSlot& slot,
    const BucketState& kept,
    const std::vector<StateField>& fields) {
  const SlotShare share = share_of(bucket, slot);
  Placements summed = placements_of(slot.parameter);
  for (const FlatCutAxis& cut : bucket.kind().cuts) {
    summed[static_cast<size_t>(cut.axis)] = Partial();
  }
  ParameterState state{slot.steps, {}};
  // A rank without elements of the bucket's parameters has no flat states.
  const at::Tensor nothing = bucket.parameters({0, 0}).to(kept.dtype());
  size_t i = 0;
  for (const StateField& field : fields) {
    const at::Tensor mine = i < kept.states().size()
        ? in_part(kept.states()[i++], share.in_part)
        : nothing;
    state.tensors[field.name] = whole_of(share.place, mine, summed);
  }
  if (kept.masters().defined()) {
    state.tensors[kMasterWeight] =
        whole_of(share.place, in_part(kept.masters(), share.in_part), summed);
  }
  return state;
}

void place_state(
    const ParameterState& loaded,
    const FlatBucket& bucket,
    BucketSlot& slot,
    BucketState& kept,
    const std::vector<StateField>& fields) {
  const SlotShare share = share_of(bucket, slot);
  const auto flat = kept.states(fields.size());
  for (size_t i = 0; i < fields.size(); ++i) {
    copy_share(
        share.place,
        loaded.tensors.at(fields[i].name),
        in_part(flat[i], share.in_part));
  }
  const auto master = loaded.tensors.find(kMasterWeight);
  if (kept.masters().defined() && master != loaded.tensors.end()) {
    copy_share(
        share.place, master->second, in_part(kept.masters(), share.in_part));
    kept.note_masters();
  }
  slot.steps = loaded.steps;
}

} // namespace tessera
