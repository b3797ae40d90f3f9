// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/data/loader.h>
#include <tessera/data/test_file.h>

#include <set>

namespace tessera {
namespace {

// Byte i of the file tells where it stands, modulo 251.
std::string counting(int64_t size) {
  std::string text;
  for (int64_t i = 0; i < size; ++i) {
    text.push_back(static_cast<char>(i % 251));
  }
  return text;
}

TokenLoader loader(const TestFile& file, const LoaderOptions& options) {
  return {std::make_shared<TokenFile>(file.path()), options};
}

TEST(TokenLoader, TargetsAreTheNextTokens) {
  const TestFile file(counting(1000));
  const Batch batch =
      loader(file, {.sequence = 10, .global_batch = 4}).train(3);
  EXPECT_EQ(batch.tokens.sizes(), (std::vector<int64_t>{4, 10}));
  EXPECT_TRUE(torch::equal((batch.tokens + 1) % 251, batch.targets));
}

TEST(TokenLoader, RanksTogetherReadWhatOneRankReads) {
  const TestFile file(counting(5000));
  for (const int64_t global_batch : {1, 3, 4, 10}) {
    const LoaderOptions whole{
        .sequence = 7, .global_batch = global_batch, .seed = 5};
    for (const int64_t ranks : {1, 2, 3, 4}) {
      for (const int64_t step : {0, 1, 400}) {
        std::vector<torch::Tensor> tokens;
        std::vector<torch::Tensor> held_out;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          LoaderOptions part = whole;
          part.rank = rank;
          part.ranks = ranks;
          tokens.push_back(loader(file, part).train(step).tokens);
          held_out.push_back(
              loader(file, part).validation(step % 2, 2).targets);
        }
        EXPECT_TRUE(torch::equal(
            torch::cat(tokens), loader(file, whole).train(step).tokens))
            << ranks << " ranks, step " << step;
        EXPECT_TRUE(torch::equal(
            torch::cat(held_out),
            loader(file, whole).validation(step % 2, 2).targets))
            << ranks << " ranks";
      }
    }
  }
}

TEST(TokenLoader, EveryRowComesOnceAnEpochInAnOrderOfItsOwn) {
  const TestFile file(counting(251)); // tokens tell their place
  const TokenLoader all = loader(
      file, {.sequence = 10, .global_batch = 1, .validation_fraction = 0});
  ASSERT_EQ(all.train_rows(), 25);
  std::vector<int64_t> first;
  std::vector<int64_t> second;
  for (int64_t step = 0; step < 25; ++step) {
    first.push_back(all.train(step).tokens[0][0].item<int64_t>());
    second.push_back(all.train(25 + step).tokens[0][0].item<int64_t>());
  }
  EXPECT_NE(first, second);
  EXPECT_EQ(std::set<int64_t>(first.begin(), first.end()).size(), 25U);
  EXPECT_EQ(
      std::set<int64_t>(first.begin(), first.end()),
      std::set<int64_t>(second.begin(), second.end()));
}

TEST(TokenLoader, TheSeedDecidesTheOrder) {
  const TestFile file(counting(5000));
  const auto tokens = [&](uint64_t seed) {
    return loader(file, {.sequence = 10, .global_batch = 8, .seed = seed})
        .train(0)
        .tokens;
  };
  EXPECT_TRUE(torch::equal(tokens(1), tokens(1)));
  EXPECT_FALSE(torch::equal(tokens(1), tokens(2)));
}

TEST(TokenLoader, TrainingNeverSeesTheValidationPart) {
  std::string text(900, 'a');
  text += std::string(100, 'b');
  const TestFile file(text);
  const TokenLoader both = loader(
      file, {.sequence = 8, .global_batch = 4, .validation_fraction = 0.1});
  for (int64_t step = 0; step < 100; ++step) {
    EXPECT_TRUE((both.train(step).targets == 'a').all().item<bool>());
  }
  for (int64_t index = 0; index < 5; ++index) {
    EXPECT_TRUE((both.validation(index, 5).tokens == 'b').all().item<bool>());
  }
}

TEST(TokenLoader, TheShortestFileThatFitsIsTaken) {
  const TestFile fits(counting(11));
  EXPECT_EQ(
      loader(
          fits, {.sequence = 10, .global_batch = 2, .validation_fraction = 0})
          .train(0)
          .tokens.size(0),
      2);
  const TestFile shorter(counting(10));
  EXPECT_THROW(
      loader(shorter, {.sequence = 10, .validation_fraction = 0}), UsageError);
  EXPECT_THROW(
      loader(fits, {.sequence = 10, .validation_fraction = 0.1}), UsageError);
}

TEST(TokenLoader, SaysWhatToDoAboutAFileThatIsTooShort) {
  const TestFile file(counting(50));
  try {
    loader(file, {.sequence = 128});
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(
        error.what(),
        testing::AllOf(
            testing::HasSubstr(file.path()),
            testing::HasSubstr("129"),
            testing::HasSubstr("shorter sequence")));
  }
}

TEST(TokenLoader, RefusesOptionsOutOfRange) {
  const TestFile file(counting(5000));
  EXPECT_THROW(loader(file, {.sequence = 0}), UsageError);
  EXPECT_THROW(loader(file, {.global_batch = 0}), UsageError);
  EXPECT_THROW(loader(file, {.validation_fraction = 1}), UsageError);
  EXPECT_THROW(loader(file, {.validation_fraction = -0.1}), UsageError);
  EXPECT_THROW(loader(file, {.validation_fraction = std::nan("")}), UsageError);
  EXPECT_THROW(loader(file, {.rank = 2, .ranks = 2}), UsageError);
  EXPECT_THROW(
      loader(file, {.validation_fraction = 0}).validation(0, 1), UsageError);
}

TEST(TokenLoader, ATokenOutsideTheVocabularyIsNamed) {
  const TestFile file(
      std::string(100, '\x05') + std::string(100, '\x10'), ".bin");
  const TokenLoader narrow = loader(
      file,
      {.sequence = 4,
       .global_batch = 20,
       .validation_fraction = 0,
       .vocab_size = 2000});
  try {
    narrow.train(0);
    FAIL() << "no error";
  } catch (const CorruptionError& error) {
    EXPECT_THAT(
        error.what(),
        testing::AllOf(
            testing::HasSubstr("token 4112"),
            testing::HasSubstr("vocab_size is 2000")));
  }
}

} // namespace
} // namespace tessera
