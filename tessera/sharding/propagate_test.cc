// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/sharding/simulation.h>

#include <cmath>

namespace tessera {
namespace {

using c10::IValue;
using simulation::PlainCall;
using simulation::raw_text;
using simulation::text;
using Ints = std::vector<int64_t>;

at::Tensor floats(Ints sizes) {
  return torch::empty(sizes);
}

at::Tensor longs(Ints sizes) {
  return torch::empty(sizes, torch::kLong);
}

c10::List<at::Tensor> list(std::vector<at::Tensor> tensors) {
  return c10::List<at::Tensor>(tensors);
}

const at::Tensor kAbsent;
const Placement kR = Replicate();
const Placement kP = Partial();
const Placement kS0 = Shard(0);
const Placement kS1 = Shard(1);
const Placement kS2 = Shard(2);

// One placement per tensor on a mesh of one axis.
std::vector<Placements> one_axis(const std::vector<Placement>& placements) {
  std::vector<Placements> all;
  for (const Placement& placement : placements) {
    all.push_back({placement});
  }
  return all;
}

Decision decide(
    const PlainCall& call,
    const std::vector<Placement>& placements,
    int64_t ranks = 2,
    const char* backend = "shm") {
  const DeviceMesh mesh = describe_mesh({{"dp", ranks}}, 0, backend);
  return propagate(
      simulation::seen(call, mesh, one_axis(placements)), CostModel());
}

// "inputs -> raw results" of a decision.
std::string flow(
    const PlainCall& call,
    const std::vector<Placement>& placements,
    int64_t ranks = 2) {
  const Decision decision = decide(call, placements, ranks);
  return text(decision.inputs) + " -> " + raw_text(decision);
}

TEST(Propagate, RunsDataParallelForwardWithoutMovingAnything) {
  EXPECT_EQ(
      flow({"aten::mm", {floats({64, 32}), floats({32, 48})}}, {kS0, kR}),
      "[S0], [R] -> [S0]");
  EXPECT_EQ(
      flow(
          {"aten::addmm", {floats({48}), floats({64, 32}), floats({32, 48})}},
          {kR, kS0, kR}),
      "[R], [S0], [R] -> [S0]");
  EXPECT_EQ(
      flow({"aten::embedding", {floats({256, 32}), longs({8, 16})}}, {kR, kS0}),
      "[R], [S0] -> [S0]");
  EXPECT_EQ(
      flow(
          {"aten::native_layer_norm",
           {floats({8, 16, 32}), Ints{32}, floats({32}), floats({32}), 1e-5}},
          {kS0, kR, kR}),
      "[S0], [R], [R] -> [S0], [S0], [S0]");
  EXPECT_EQ(
      flow(
          {"aten::mul.Tensor", {floats({8, 16, 32}), floats({32})}}, {kS0, kR}),
      "[S0], [R] -> [S0]");
  EXPECT_EQ(
      flow(
          {"aten::_scaled_dot_product_flash_attention_for_cpu",
           {floats({8, 4, 16, 8}),
            floats({8, 2, 16, 8}),
            floats({8, 2, 16, 8}),
            0.0,
            true}},
          {kS0, kS0, kS0, kR}),
      "[S0], [S0], [S0], - -> [S0], [S0]");
}

TEST(Propagate, LeavesWeightGradientsPartial) {
  EXPECT_EQ(
      flow({"aten::mm", {floats({48, 64}), floats({64, 32})}}, {kS1, kS0}),
      "[S1], [S0] -> [P]");
  EXPECT_EQ(
      flow({"aten::sum.dim_IntList", {floats({64, 48}), Ints{0}, true}}, {kS0}),
      "[S0] -> [P]");
  EXPECT_EQ(
      flow({"aten::view", {floats({1, 48}), Ints{48}}}, {kP}), "[P] -> [P]");
  EXPECT_EQ(flow({"aten::t", {floats({48, 32})}}, {kP}), "[P] -> [P]");
  EXPECT_EQ(
      flow(
          {"aten::embedding_dense_backward",
           {floats({8, 16, 32}), longs({8, 16}), 256, -1, false}},
          {kS0, kS0}),
      "[S0], [S0] -> [P]");
  EXPECT_EQ(
      flow(
          {"aten::native_layer_norm_backward",
           {floats({8, 32}),
            floats({8, 32}),
            Ints{32},
            floats({8, 1}),
            floats({8, 1}),
            floats({32}),
            floats({32}),
            std::vector<bool>{true, true, true}}},
          {kS0, kS0, kS0, kS0, kR, kR}),
      "[S0], [S0], [S0], [S0], [R], [R] -> [S0], [P], [P]");
}

TEST(Propagate, AccumulatesGradientsWithoutCommunication) {
  const Decision decision = decide(
      {"aten::add_.Tensor", {floats({48, 32}), floats({48, 32})}}, {kP, kP});
  EXPECT_EQ(text(decision.inputs), "[P], [P]");
  EXPECT_EQ(text(decision.written), "[P], -");
  EXPECT_TRUE(decision.outputs.empty());
  EXPECT_EQ(
      flow({"aten::mul.Tensor", {floats({48, 32}), floats({})}}, {kP, kR}),
      "[P], [R] -> [P]");
  EXPECT_EQ(
      flow(
          {"aten::new_empty_strided",
           {floats({48, 32}), Ints{48, 32}, Ints{1, 48}}},
          {kP}),
      "[P] -> [P]");
  EXPECT_EQ(
      flow({"aten::copy_", {floats({48, 32}), floats({48, 32})}}, {kP, kP}),
      "[P], [P] -> ");
}

TEST(Propagate, ReducesWhatIsNotLinear) {
  // A sum plus 10 must add 10 once.
  EXPECT_EQ(
      flow({"aten::add.Scalar", {floats({}), 10.0, 1}}, {kP}), "[R] -> [R]");
  EXPECT_EQ(
      flow({"aten::add.Tensor", {floats({}), floats({})}}, {kP, kR}),
      "[P], [P] -> [P]");
  EXPECT_EQ(
      flow({"aten::mul.Tensor", {floats({}), floats({})}}, {kP, kP}),
      "[P], [R] -> [P]");
  EXPECT_EQ(flow({"aten::relu", {floats({64, 32})}}, {kP}), "[S0] -> [S0]");
  EXPECT_EQ(
      flow(
          {"aten::_to_copy", {floats({3}), static_cast<int64_t>(torch::kLong)}},
          {kP},
          4),
      "[R] -> [R]");
  EXPECT_EQ(flow({"aten::_local_scalar_dense", {floats({})}}, {kP}), "[R] -> ");
  const Placement most = Partial(ReduceOp::kMax);
  EXPECT_EQ(
      flow({"aten::mul.Scalar", {floats({}), -1.0}}, {most}), "[R] -> [R]");
  EXPECT_EQ(
      flow({"aten::clone", {floats({}), IValue()}}, {most}),
      "[P(max)] -> [P(max)]");
}

TEST(Propagate, BringsWrittenPartialsBackFromReplicate) {
  const Decision decision =
      decide({"aten::clamp_", {floats({}), IValue(), 2.0}}, {kP});
  EXPECT_EQ(text(decision.inputs), "[R]");
  EXPECT_EQ(text(decision.written), "[R]");
  EXPECT_EQ(text(decide({"aten::zero_", {floats({4})}}, {kP}).written), "[P]");
  const Decision fill =
      decide({"aten::fill_.Scalar", {floats({4}), 2.0}}, {kP});
  EXPECT_EQ(text(fill.inputs), "[P]"); // not read, so not reduced
  EXPECT_EQ(text(fill.written), "[R]");
}

TEST(Propagate, CopiesIntoThePlacementOfTheTarget) {
  EXPECT_EQ(
      text(decide({"aten::copy_", {floats({8, 4}), floats({8, 4})}}, {kS0, kR})
               .inputs),
      "[S0], [S0]");
  EXPECT_EQ(
      text(decide({"aten::copy_", {floats({8, 4}), floats({8, 4})}}, {kR, kS0})
               .inputs),
      "[R], [R]");
  EXPECT_EQ(
      text(decide({"aten::copy_", {floats({8, 4}), floats({8, 4})}}, {kS0, kP})
               .inputs),
      "[S0], [S0]");
}

TEST(Propagate, UpdatesOnTheShardsOfTheStates) {
  const auto tensors = [] { return list({floats({512, 256})}); };
  const PlainCall call{
      "aten::_fused_adamw_",
      {tensors(),
       tensors(),
       tensors(),
       tensors(),
       c10::List<at::Tensor>(),
       list({floats({})}),
       0.1,
       0.9,
       0.99,
       0.0,
       1e-8,
       false,
       false,
       kAbsent,
       kAbsent}};
  const Decision decision = decide(call, {kR, kP, kS0, kS0, kR, kR, kR});
  EXPECT_EQ(text(decision.inputs), "[S0], [S0], [S0], [S0], [R], -, -");
  EXPECT_EQ(text(decision.written), "[S0], -, [S0], [S0], -, -, -");
}

TEST(Propagate, TakesTheNormOfPartialsFromShards) {
  const Decision decision = decide(
      {"aten::_foreach_norm.Scalar",
       {list({floats({512, 256}), floats({3})}), 2.0}},
      {kP, kR});
  EXPECT_EQ(text(decision.inputs), "[S0], [R]");
  EXPECT_EQ(raw_text(decision), "[P], [R]");
  EXPECT_EQ(decision.kernel, LocalKernel::kNorm);
  EXPECT_EQ(str(decision.outputs[0].placements), "[R]");
  const Decision largest =
      decide({"aten::linalg_vector_norm", {floats({8, 8}), HUGE_VAL}}, {kS0});
  EXPECT_EQ(raw_text(largest), "[P(max)]");
}

TEST(Propagate, FinishesTheMeanOfACutBatch) {
  const Decision nll = decide(
      {"aten::nll_loss_forward",
       {floats({64, 10}), longs({64}), floats({10}), 1, -100}},
      {kS0, kS0, kR});
  EXPECT_EQ(text(nll.inputs), "[S0], [S0], [R]");
  EXPECT_EQ(raw_text(nll), "[P], [P]");
  EXPECT_EQ(str(nll.outputs[0].placements), "[R]");
  EXPECT_EQ(nll.kernel, LocalKernel::kNllLoss);
  const Decision mean = decide({"aten::mean", {floats({3, 4})}}, {kS0});
  EXPECT_EQ(mean.kernel, LocalKernel::kMean);
  EXPECT_THAT(mean.numbers, testing::ElementsAre(12, -1));
  EXPECT_EQ(raw_text(mean), "[P]");
  EXPECT_EQ(
      decide({"aten::mean", {floats({3, 4})}}, {kR}).kernel, LocalKernel::kOp);
}

TEST(Propagate, KeepsUnevenFlatteningAView) {
  const Decision decision =
      decide({"aten::view", {floats({6, 256}), Ints{-1}}}, {kS0}, 4);
  EXPECT_EQ(text(decision.inputs), "[S0]");
  EXPECT_EQ(raw_text(decision), "[S0/256]");
  EXPECT_TRUE(decision.is_view);
  ASSERT_EQ(decision.edits.size(), 1u);
  EXPECT_THAT(decision.edits[0].ints, testing::ElementsAre(512));
  // And back, and where the rest of a group is cut.
  const Placement flat = Shard(0, 256);
  EXPECT_EQ(
      flow({"aten::view", {floats({1536}), Ints{6, 256}}}, {flat}, 4),
      "[S0/256] -> [S0]");
  EXPECT_NE(
      flow({"aten::view", {floats({12, 8}), Ints{16, 6}}}, {kS1}, 4)
          .substr(0, 4),
      "[S1]");
}

TEST(Propagate, SplitsWeightsByColumnsAndRows) {
  EXPECT_EQ(
      flow({"aten::mm", {floats({64, 32}), floats({32, 48})}}, {kR, kS1}),
      "[R], [S1] -> [S1]");
  EXPECT_EQ(
      flow({"aten::mm", {floats({64, 48}), floats({48, 32})}}, {kS1, kS0}),
      "[S1], [S0] -> [P]");
  EXPECT_EQ(
      flow(
          {"aten::addmm", {floats({48}), floats({64, 32}), floats({32, 48})}},
          {kS0, kR, kS1}),
      "[S0], [R], [S1] -> [S1]");
  EXPECT_EQ(
      flow(
          {"aten::addmm", {floats({32}), floats({64, 48}), floats({48, 32})}},
          {kR, kS1, kS0}),
      "[P], [S1], [S0] -> [P]");
}

TEST(Propagate, TreatsTheAxesOfAMeshTogether) {
  const DeviceMesh mesh = describe_mesh({{"dp", 2}, {"tp", 2}});
  const PlainCall mm{"aten::mm", {floats({64, 32}), floats({32, 48})}};
  const Decision forward = propagate(
      simulation::seen(mm, mesh, {{kS0, kR}, {kR, kS1}}), CostModel());
  EXPECT_EQ(raw_text(forward), "[S0, S1]");
  const PlainCall view{"aten::view", {floats({2, 8, 4, 48}), Ints{64, 48}}};
  const Decision flat =
      propagate(simulation::seen(view, mesh, {{kS0, kS2}}), CostModel());
  EXPECT_EQ(
      str(flat.inputs[0]->placements[0].is_shard(0) ? Placements{kS0}
                                                    : Placements{kR}),
      "[S0]");
}

TEST(Propagate, StaysQuickOnMeshesOfManyAxes) {
  const DeviceMesh mesh =
      describe_mesh({{"a", 2}, {"b", 2}, {"c", 2}, {"d", 2}, {"e", 2}});
  const PlainCall call{
      "aten::mul.Tensor", {floats({32, 32, 32}), floats({32, 32, 32})}};
  const Placements partial(5, kP);
  const Decision decision =
      propagate(simulation::seen(call, mesh, {partial, partial}), CostModel());
  EXPECT_EQ(decision.inputs.size(), 2u);
  EXPECT_FALSE(decision.fallback);
}

TEST(Propagate, ShapesFreshTensorsWithoutReadingPartials) {
  const Decision zeros = decide({"aten::zeros_like", {floats({8, 4})}}, {kP});
  EXPECT_EQ(text(zeros.inputs) + raw_text(zeros), "[P][R]");
  EXPECT_EQ(
      flow({"aten::zeros_like", {floats({8, 4})}}, {kS1}), "[S1] -> [S1]");
  EXPECT_EQ(flow({"aten::empty_like", {floats({8, 4})}}, {kP}), "[P] -> [P]");
  EXPECT_EQ(
      flow({"aten::new_zeros", {floats({8, 4}), Ints{3}}}, {kS1}),
      "[S1] -> [R]");
  const Decision same =
      decide({"aten::new_zeros", {floats({8, 5}), Ints{8, 5}}}, {kS1});
  EXPECT_EQ(raw_text(same), "[S1]");
  ASSERT_EQ(same.edits.size(), 1u);
  EXPECT_THAT(same.edits[0].ints, testing::ElementsAre(8, 3));
}

TEST(Propagate, ChoosesAnAttentionKernelWithoutMovingAnything) {
  const auto heads = [] { return floats({4, 4, 8, 8}); };
  const Decision choice = decide(
      {"aten::_fused_sdp_choice", {heads(), heads(), heads(), kAbsent}},
      {kS0, kS1, kP, kR});
  EXPECT_EQ(text(choice.inputs), "[S0], [S1], [P], -");
  EXPECT_EQ(choice.kernel, LocalKernel::kFusedSdpChoice);
  EXPECT_TRUE(choice.outputs.empty());
}

TEST(Propagate, DrawsRandomNumbersOnShards) {
  const Decision dropout =
      decide({"aten::native_dropout", {floats({8, 4}), 0.1, true}}, {kS0});
  EXPECT_EQ(dropout.kernel, LocalKernel::kRandom);
  EXPECT_EQ(raw_text(dropout), "[S0], [S0]");
  EXPECT_EQ(
      text(decide({"aten::uniform_", {floats({8, 4})}}, {kS1}).inputs), "[S1]");
}

TEST(Propagate, MovesOneOfTwoThatAreCutDifferently) {
  EXPECT_EQ(
      flow(
          {"aten::add.Tensor", {floats({16, 32}), floats({16, 32})}},
          {kS0, kS1}),
      "[S0], [S0] -> [S0]");
  // A softmax over a cut dim goes to the other one.
  EXPECT_EQ(
      flow({"aten::_softmax", {floats({64, 64}), 1, false}}, {kS1}),
      "[S0] -> [S0]");
}

TEST(Propagate, ReplicatesWhatHasNoRule) {
  EXPECT_FALSE(has_rule("aten::_cdist_forward"));
  const Decision decision = decide(
      {"aten::_cdist_forward", {floats({4, 3}), floats({5, 3}), 2.0, IValue()}},
      {kS0, kP});
  EXPECT_EQ(text(decision.inputs), "[R], [R]");
  EXPECT_TRUE(decision.fallback);
}

TEST(Propagate, SaysWhichScalarsDecide) {
  EXPECT_THAT(
      deciding_args("aten::linalg_vector_norm"), testing::ElementsAre(1));
  EXPECT_THAT(
      deciding_args("aten::masked_fill.Scalar"), testing::ElementsAre(2));
  EXPECT_TRUE(deciding_args("aten::mul.Scalar").empty());
  EXPECT_TRUE(deciding_args("aten::no_such_operator").empty());
}

TEST(Propagate, NeverCutsLessThanOneElementARank) {
  EXPECT_EQ(flow({"aten::relu", {floats({3})}}, {kP}, 4), "[R] -> [R]");
  EXPECT_EQ(flow({"aten::relu", {floats({3})}}, {kS0}, 4), "[S0] -> [S0]");
}

TEST(Propagate, RejectsShapesThatDoNotFit) {
  EXPECT_THROW(
      decide({"aten::mm", {floats({4, 3}), floats({5, 3})}}, {kR, kR}),
      UsageError);
  EXPECT_THROW(
      decide({"aten::view", {floats({4, 3}), Ints{5}}}, {kR}), UsageError);
  EXPECT_THROW(
      decide({"aten::add.Tensor", {floats({4, 3}), floats({5})}}, {kR, kR}),
      UsageError);
}

} // namespace
} // namespace tessera
