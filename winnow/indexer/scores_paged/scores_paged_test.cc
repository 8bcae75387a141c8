// Tests of indexer::scores_paged: the case table, agreement with scores() and topk_paged(), errors.
#include "winnow/indexer/scores_paged/scores_paged.h"

#include <cstring>

#include <gtest/gtest.h>

#include "winnow/core/parallel.h"
#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/topk_paged/topk_paged_cases.h"
#include "winnow/testing/expect.h"

namespace winnow::indexer {
namespace {

using winnow::testing::expect_error;

WINNOW_CASE_TABLE(ScoresPagedCases, "indexer::scores_paged");

// The key of position p has p + 1 in its first column. The second page begins at position 64.
TEST(ScoresPaged, ByHand) {
  Tensor keys(DType::f32, {70, 64}), slots(DType::i32, {70}), pages(DType::u8, {4, 64 * 68});
  Tensor table(DType::i32, {1, 2}), context(DType::i32, {1});
  table.values<std::int32_t>()[0] = 3;
  table.values<std::int32_t>()[1] = 1;
  context.values<std::int32_t>()[0] = 70;
  for (std::int32_t p = 0; p < 70; ++p) {
    keys.view().at<float>(p, 0) = static_cast<float>(p + 1);
    slots.values<std::int32_t>()[p] = p < 64 ? 3 * 64 + p : 64 + p - 64;
  }
  quantize({.x = keys, .pages = pages, .slots = slots});
  Tensor q(DType::f8_e4m3, {1, 2, 1, 64}), weights(DType::f32, {1, 2, 1});
  Tensor scores(DType::f32, {1, 2, 72});
  for (std::int64_t j = 0; j < 2; ++j) {
    q.view().at<Float8E4M3>(0, j, 0, 0) = Float8E4M3(1.0f);
    weights.view().at<float>(0, j, 0) = 2.0f;
  }
  ScoresPagedArgs args{.q = q,
                       .pages = pages,
                       .weights = weights,
                       .block_tables = table,
                       .context_lens = context,
                       .scores = scores};
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
  table.values<std::int32_t>()[1] = 4;  // there is no page 4, so its rows are absent
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
  constexpr std::int64_t rows = 640, s_q = 11, h = 8, d = 128;
  Tensor keys(DType::f32, {rows, d}), k8(DType::f8_e4m3, {rows, d}), k_scale(DType::f32, {rows});
  Tensor slots(DType::i64, {rows}), pages(DType::u8, {rows / 64, page_bytes(d)});
  winnow::testing::Random random(3);
  winnow::testing::fill_normal(keys, random);
  for (std::int64_t r = 0; r < rows; ++r) slots.values<std::int64_t>()[r] = r;
  quantize({.x = keys, .rows = k8, .scale = k_scale});
  quantize({.x = keys, .pages = pages, .slots = slots});
  Tensor q(DType::f8_e4m3, {1, s_q, h, d}), weights(DType::f32, {1, s_q, h});
  winnow::testing::fill_normal(q, random);
  winnow::testing::fill_normal(weights, random);
  Tensor table(DType::i32, {1, rows / 64}), context(DType::i32, {1});
  for (std::int32_t p = 0; p < rows / 64; ++p) table.values<std::int32_t>()[p] = p;
  context.values<std::int32_t>()[0] = rows;
  Tensor dense(DType::f32, {s_q, rows}), scores(DType::f32, {1, s_q, rows});
  indexer::scores({.q = ConstTensorView(q.data(), DType::f8_e4m3, {s_q, h, d}),
                   .k = k8,
                   .weights = ConstTensorView(weights.data(), DType::f32, {s_q, h}),
                   .k_scale = k_scale,
                   .q_start = rows - s_q,
                   .scores = dense});
  const int before = num_threads();
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    winnow::testing::fill_unwritten(scores);
    scores_paged({.q = q,
                  .pages = pages,
                  .weights = weights,
                  .block_tables = table,
                  .context_lens = context,
                  .scores = scores});
    EXPECT_TRUE(winnow::testing::same_bytes(scores, dense));
  }
  set_num_threads(before);
  Tensor indices(DType::i32, {1, s_q, rows}), length(DType::i32, {1, s_q});
  Tensor all(DType::f32, {1, s_q, rows});
  topk_paged({.q = q,
              .pages = pages,
              .weights = weights,
              .block_tables = table,
              .context_lens = context,
              .indices = indices,
              .length = length,
              .scores = all});
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
    for (const bool dry_run : {false, true}) {
      expect_error([&] { scores_paged(args, {.dry_run = dry_run}); }, ErrorCode::invalid_argument,
                   "indexer::scores_paged: " + text);
    }
    EXPECT_EQ(winnow::testing::count_unwritten(scores.view()), scores.numel()) << text;
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
