// Tests of indexer::scores_paged: the case table, agreement with scores() and topk_paged(), errors.
#include "winnow/indexer/scores_paged/scores_paged.h"

#include <cstring>

#include <gtest/gtest.h>

#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/topk_paged/test_pages.h"
#include "winnow/indexer/topk_paged/topk_paged_cases.h"
#include "winnow/testing/expect.h"

namespace winnow::indexer {
namespace {

using winnow::testing::expect_error;
using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(ScoresPagedCases, "indexer::scores_paged");

TEST(ScoresPaged, ByHand) {
  PagesByHand pages;
  Tensor scores(DType::f32, {1, 2, 72});
  ScoresPagedArgs args = pages.args(ScoresPagedArgs{.scores = scores});
  const auto expect_score = [&](std::int64_t j, std::int64_t t, float want) {
    EXPECT_EQ(scores.view().at<float>(0, j, t), want) << "query " << j << ", position " << t;
  };
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_string(scores_paged(args)), "cpu");
  expect_score(0, 0, 2);
  expect_score(0, 68, 138);
  expect_score(0, 69, kNone);  // only query 1 sees the last row
  expect_score(1, 69, 140);
  expect_score(1, 70, kNone);
  expect_score(1, 71, kNone);
  pages.table.values<std::int32_t>()[1] = 4;  // there is no page 4, so its rows are absent
  args.clean = false;
  winnow::testing::fill(scores, 7);
  scores_paged(args);
  expect_score(1, 63, 128);
  expect_score(1, 69, kNone);
  expect_score(0, 68, kNone);
  expect_score(0, 69, 7);
  expect_score(1, 70, 7);
}

// For one sequence of consecutive pages the scores are bit for bit those of scores(), with any
// number of threads, and those of topk_paged() if that chooses all rows.
TEST(ScoresPaged, AgreesWithScoresAndTopkPaged) {
  constexpr std::int64_t s_q = 11;
  const ConsecutivePages pages(s_q);
  const std::int64_t rows = pages.kRows;
  Tensor dense(DType::f32, {s_q, rows}), scores(DType::f32, {1, s_q, rows});
  indexer::scores(pages.dense(ScoresArgs{.scores = dense}));
  for (const int threads : {1, 3}) {
    const winnow::testing::Threads number(threads);
    winnow::testing::fill_unwritten(scores);
    scores_paged(pages.args(ScoresPagedArgs{.scores = scores}));
    EXPECT_TRUE(winnow::testing::same_bytes(scores, dense));
  }
  Tensor indices(DType::i32, {1, s_q, rows}), length(DType::i32, {1, s_q});
  Tensor all(DType::f32, {1, s_q, rows});
  topk_paged(pages.args(TopkPagedArgs{.indices = indices, .length = length, .scores = all}));
  EXPECT_TRUE(winnow::testing::same_bytes(scores, all));
}

TEST(ScoresPaged, Refuses) {
  const PagedStep step({.name = "refused", .context_lens = {300, 20}});
  Tensor scores(DType::f32, {2, 1, 64}), flat(DType::f32, {2, 64}), half(DType::f16, {2, 1, 64});
  Tensor q32(DType::f32, {2, 1, 4, 128}), narrow(DType::u8, {40, 64 * 68});
  Tensor of_three(DType::i32, {2, 3}), more(DType::f32, {2, 2, 64});
  const auto reject = [&](const auto& bend, const std::string& text) {
    ScoresPagedArgs args{.scores = scores};
    step.pass_to(args);
    winnow::testing::fill_unwritten(scores);
    bend(args);
    expect_refused(scores_paged, args, "indexer::scores_paged: " + text, {scores});
  };
  using Args = ScoresPagedArgs;
  reject([](Args& a) { a.q = {}; }, "q: want a tensor [b, s_q, h, d], got none");
  reject([&](Args& a) { a.q = q32; }, "q: want dtype f8_e4m3, got f32");
  reject([&](Args& a) { a.pages = narrow; },
         "pages: want shape [num_pages=40, 64 * (d + 4)=8448], got [40, 4352]");
  reject([](Args& a) { a.weights = {}; },
         "weights: want a tensor of shape [b=2, s_q=1, h=4], got none");
  reject([&](Args& a) { a.context_lens = of_three; },
         "context_lens: want shape [b=2, s_q=1], got [2, 3]");
  reject([](Args& a) { a.scores = {}; }, "scores: want a tensor [b, s_q, max_context], got none");
  reject([&](Args& a) { a.scores = flat; },
         "scores: want 3 dimensions [b, s_q, max_context], got shape [2, 64]");
  reject([&](Args& a) { a.scores = half; }, "scores: want dtype f32, got f16");
  reject([&](Args& a) { a.scores = more; },
         "scores: want shape [b=2, s_q=1, max_context=64], got [2, 2, 64]");
  reject(
      [&](Args& a) {
        a.scores = TensorView(scores.data(), DType::f32, {2, 1, std::int64_t{1} << 31});
      },
      "scores: want max_context up to 2^31 - 128, got 2147483648");
  ScoresPagedArgs args;
  step.pass_to(args);
  args.scores = TensorView(const_cast<void*>(args.weights.data()), DType::f32, {2, 1, 3});
  expect_error([&] { scores_paged(args); }, ErrorCode::invalid_argument,
               "indexer::scores_paged: scores: want memory apart from weights, got memory that "
               "both use");
}

}  // namespace
}  // namespace winnow::indexer
