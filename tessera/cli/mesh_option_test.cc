// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/cli/mesh_option.h>

namespace tessera::cli {
namespace {

std::string error_of(const std::string& text) {
  try {
    parse_mesh(text);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

std::string misfit(const std::string& text, int64_t ranks) {
  try {
    fit_mesh(text, parse_mesh(text), ranks);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(MeshOption, ReadsNamesAndSizesInOrder) {
  const std::vector<Axis> axes = parse_mesh("dp=2,tp_1=12");
  ASSERT_EQ(axes.size(), 2U);
  EXPECT_EQ(axes[0].name, "dp");
  EXPECT_EQ(axes[0].size, 2);
  EXPECT_EQ(axes[1].name, "tp_1");
  EXPECT_EQ(axes[1].size, 12);
  EXPECT_EQ(ranks_of(axes), 24);
}

TEST(MeshOption, SaysHowToWriteAMesh) {
  for (const char* wrong :
       {"",
        ",",
        "dp",
        "dp=",
        "=2",
        "dp=0",
        "dp=-2",
        "dp=-1,tp=-1",
        "dp=2x",
        "dp=2,",
        "dp=2,,tp=2",
        "2d=2",
        "d p=2",
        "dp=1e3",
        "dp=99999999999999999999"}) {
    EXPECT_THAT(error_of(wrong), testing::HasSubstr("as in dp=2")) << wrong;
  }
  EXPECT_THAT(error_of("dp=2,dp=2"), testing::HasSubstr("there twice"));
  EXPECT_THAT(
      error_of("a=1000000,b=1000000,c=1000000,d=1000000"),
      testing::HasSubstr("too many"));
}

TEST(MeshOption, OneAxisMayTakeTheRestOfTheRanks) {
  const auto size = [](const std::string& text, size_t axis) {
    return fit_mesh(text, parse_mesh(text), 8).at(axis).size;
  };
  EXPECT_EQ(size("dp=-1", 0), 8);
  EXPECT_EQ(size("dp=-1,tp=2", 0), 4);
  EXPECT_EQ(size("dp=8,tp=-1", 1), 1);
  EXPECT_EQ(ranks_of(parse_mesh("dp=-1,tp=2")), 2);
  EXPECT_THAT(
      error_of("dp=-1,tp=-1"),
      testing::AllOf(
          testing::HasSubstr("tp=-1"),
          testing::HasSubstr("only one axis can take the rest")));
  EXPECT_EQ(
      misfit("dp=-1,tp=3", 8),
      "--mesh dp=-1,tp=3 needs a multiple of 3 ranks, world size is 8; try "
      "dp=8");
  EXPECT_EQ(
      misfit("tp=3,dp=-1", 7),
      "--mesh tp=3,dp=-1 needs a multiple of 3 ranks, world size is 7; try "
      "dp=7");
}

TEST(MeshOption, SuggestsAMeshThatFitsTheWorld) {
  EXPECT_EQ(misfit("dp=2,tp=4", 8), "no error");
  EXPECT_EQ(
      misfit("dp=4,tp=3", 8),
      "--mesh dp=4,tp=3 needs 12 ranks, world size is 8; try dp=4,tp=2");
  EXPECT_EQ(
      misfit("dp=3", 2),
      "--mesh dp=3 needs 3 ranks, world size is 2; try dp=2");
  EXPECT_EQ(
      misfit("dp=3,tp=2", 4),
      "--mesh dp=3,tp=2 needs 6 ranks, world size is 4; try dp=4");
}

} // namespace
} // namespace tessera::cli
