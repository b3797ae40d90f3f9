// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/global_norm.h>
#include <tessera/optim/implicit_clip.h>
#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera {
namespace {

struct OnMesh {
  DeviceMesh mesh;
  std::vector<at::Tensor> params;
};

// In order of appearance, alike on all ranks of a mesh.
std::vector<OnMesh> by_mesh(const std::vector<at::Tensor>& params) {
  std::vector<OnMesh> result;
  for (const at::Tensor& param : params) {
    const DeviceMesh& mesh = spec_of(param)->mesh;
    auto found = std::ranges::find(result, mesh, &OnMesh::mesh);
    if (found == result.end()) {
      found = result.insert(result.end(), {mesh, {}});
    }
    found->params.push_back(param);
  }
  return result;
}

// As torch's clip_grad_norm_ computes it.
double norm_of_gradients(
    const std::vector<at::Tensor>& params, double norm_type) {
  const bool is_max = std::isinf(norm_type);
  std::vector<at::Tensor> norms;
  norms.reserve(params.size());
  for (const at::Tensor& param : params) {
    norms.push_back(
        is_max ? param.grad().abs().max() : param.grad().norm(norm_type));
  }
  const at::Tensor all = at::stack(norms);
  return (is_max ? all.max() : all.norm(norm_type)).item<double>();
}

double norm_over(
    const World& world, const std::vector<OnMesh>& meshes, double norm_type) {
  std::vector<MeshNorm> norms;
  norms.reserve(meshes.size());
  for (const OnMesh& part : meshes) {
    norms.push_back({part.mesh, norm_of_gradients(part.params, norm_type)});
  }
  return combine_norms(world, norms, norm_type);
}

} // namespace

double norm_of_partial_gradients(
    const World& world,
    const std::vector<at::Tensor>& params,
    double norm_type) {
  return norm_over(world, by_mesh(params), norm_type);
}

double clip_partial_gradients(
    const World& world,
    const std::vector<at::Tensor>& params,
    double max_norm,
    double norm_type) {
  const std::vector<OnMesh> meshes = by_mesh(params);
  if (meshes.size() == 1 && meshes.front().mesh.size() == world.size()) {
    return torch::nn::utils::clip_grad_norm_(params, max_norm, norm_type);
  }
  const double norm = norm_over(world, meshes, norm_type);
  const double coefficient = clip_coefficient(max_norm, norm);
  for (const at::Tensor& param : params) {
    param.grad().mul_(coefficient);
  }
  return norm;
}

} // namespace tessera
