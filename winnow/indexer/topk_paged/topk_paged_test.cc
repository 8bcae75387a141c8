// indexer::topk_paged: the case table, a choice worked by hand, agreement with topk(), bits that do
// not depend on the batch, and what it refuses.
#include "winnow/indexer/topk_paged/topk_paged.h"

#include <cstring>

#include <gtest/gtest.h>

#include "winnow/indexer/topk_paged/test_pages.h"
#include "winnow/indexer/topk_paged/topk_paged_cases.h"
#include "winnow/testing/expect.h"

namespace winnow::indexer {
namespace {

using winnow::testing::expect_error;
using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(TopkPagedCases, "indexer::topk_paged");

// The best three are the last three, which lie in the second page of the table.
TEST(TopkPaged, ByHand) {
  PagesByHand pages;
  Tensor indices(DType::i32, {1, 2, 3}), length(DType::i32, {1, 2}), scores(DType::f32, {1, 2, 3});
  TopkPagedArgs args =
      pages.args(TopkPagedArgs{.indices = indices, .length = length, .scores = scores});
  EXPECT_EQ(to_string(topk_paged(args)), "cpu");
  const auto expect_indices = [&](std::int64_t j, std::vector<std::int32_t> wanted) {
    for (std::int64_t n = 0; n < 3; ++n) {
      EXPECT_EQ(indices.view().at<std::int32_t>(0, j, n), wanted[static_cast<std::size_t>(n)]);
    }
  };
  expect_indices(0, {66, 67, 68});  // does not see the last row
  expect_indices(1, {67, 68, 69});
  EXPECT_EQ(scores.view().at<float>(0, 1, 2), 140.0f);
  args.positions = true;
  topk_paged(args);
  expect_indices(1, {67, 68, 69});
  expect_indices(0, {66, 67, 68});
  pages.table.values<std::int32_t>()[1] = 4;  // no page: its rows are absent
  args.positions = false;
  topk_paged(args);
  expect_indices(1, {3 * 64 + 61, 3 * 64 + 62, 3 * 64 + 63});
  EXPECT_EQ(length.view().at<std::int32_t>(0, 1), 3);
}

// Of one sequence whose pages follow each other the choice is topk()'s, to the bit.
TEST(TopkPaged, AgreesWithTopk) {
  constexpr std::int64_t s_q = 3, k = 100;
  const ConsecutivePages pages(s_q);
  Tensor indices(DType::i32, {1, s_q, k}), length(DType::i32, {1, s_q});
  Tensor scores(DType::f32, {1, s_q, k});
  topk_paged(pages.args(TopkPagedArgs{.indices = indices, .length = length, .scores = scores}));
  Tensor want(DType::i32, {s_q, k}), want_length(DType::i32, {s_q}),
      want_scores(DType::f32, {s_q, k});
  topk(pages.dense(TopkArgs{.indices = want, .length = want_length, .scores = want_scores}));
  EXPECT_TRUE(winnow::testing::same_bytes(indices, want));
  EXPECT_TRUE(winnow::testing::same_bytes(length, want_length));
  EXPECT_TRUE(winnow::testing::same_bytes(scores, want_scores));
}

// Queries with lengths of their own are those of as many sequences of one query each, to the bit,
// and lengths that grow by a row are those of a sequence.
TEST(TopkPaged, LengthsOfQueriesAreThoseOfSequences) {
  constexpr std::int64_t s_q = 4, k = 90;
  const PagedStep step({.name = "of-queries",
                        .context_lens = {7, 700, 0, 699, 1497, 1498, 1499, 1500},
                        .s_q = s_q,
                        .h = 16,
                        .topk = k,
                        .table = 30,
                        .num_pages = 100,
                        .of_queries = true});
  struct Results {
    Tensor indices, length, scores;
    Results(std::int64_t b, std::int64_t queries)
        : indices(DType::i32, {b, queries, k}),
          length(DType::i32, {b, queries}),
          scores(DType::f32, {b, queries, k}) {}
    void run(TopkPagedArgs args) {
      args.indices = indices, args.length = length, args.scores = scores;
      topk_paged(args);
    }
  };
  Results whole(2, s_q), by_sequence(1, s_q);
  whole.run(step.args());
  Tensor length(DType::i32, {1});
  const auto expect_same = [&](const Results& part, std::int64_t i, std::int64_t j,
                               std::int64_t queries) {
    const auto count = static_cast<std::size_t>(queries * k) * 4;
    EXPECT_EQ(
        std::memcmp(part.indices.data(), &whole.indices.view().at<std::int32_t>(i, j, 0), count),
        0);
    EXPECT_EQ(std::memcmp(part.scores.data(), &whole.scores.view().at<float>(i, j, 0), count), 0);
    EXPECT_EQ(part.length.view().at<std::int32_t>(0, queries - 1),
              whole.length.view().at<std::int32_t>(i, j + queries - 1));
  };
  const auto of_sequence = [&](std::int64_t i) {
    TopkPagedArgs args = step.args();
    for (ConstTensorView* view : {&args.q, &args.weights, &args.block_tables}) {
      *view = view->slice(0, i, i + 1);
    }
    args.context_lens = length;
    return args;
  };
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t j = 0; j < s_q; ++j) {
      TopkPagedArgs args = of_sequence(i);
      for (ConstTensorView* view : {&args.q, &args.weights}) *view = view->slice(1, j, j + 1);
      length.values<std::int32_t>()[0] =
          step.shape.context_lens[static_cast<std::size_t>(i * s_q + j)];
      Results one(1, 1);
      one.run(args);
      expect_same(one, i, j, 1);
    }
  }
  length.values<std::int32_t>()[0] = 1500;
  by_sequence.run(of_sequence(1));
  expect_same(by_sequence, 1, 0, s_q);
}

TEST(TopkPaged, HasTheSameBitsWhateverTheBatchAndTheThreads) {
  const PagedStep step({.name = "batch",
                        .context_lens = {700, 40, 1500, 1},
                        .s_q = 2,
                        .h = 16,
                        .topk = 90,
                        .table = 30,
                        .num_pages = 100});
  const auto call = [&](std::int64_t first, std::int64_t end, int threads) {
    const winnow::testing::Threads number(threads);
    Tensor indices(DType::i32, {end - first, 2, 90}), length(DType::i32, {end - first, 2});
    Tensor scores(DType::f32, {end - first, 2, 90});
    TopkPagedArgs args = step.args();
    for (ConstTensorView* view : {&args.q, &args.weights, &args.block_tables, &args.context_lens}) {
      *view = view->slice(0, first, end);
    }
    args.indices = indices;
    args.length = length;
    args.scores = scores;
    topk_paged(args);
    return std::pair(std::move(indices), std::move(scores));
  };
  const auto whole = call(0, 4, 1);
  for (std::int64_t i = 0; i < 4; ++i) {
    for (const int threads : {1, 3, 8}) {  // more threads than queries cut the rows into parts
      const auto one = call(i, i + 1, threads);
      EXPECT_EQ(std::memcmp(one.first.data(), &whole.first.view().at<std::int32_t>(i, 0, 0), 720),
                0);
      EXPECT_EQ(std::memcmp(one.second.data(), &whole.second.view().at<float>(i, 0, 0), 720), 0);
    }
  }
}

TEST(TopkPaged, Refuses) {
  const PagedStep step({.name = "refused", .context_lens = {300, 20}});
  Tensor indices(DType::i32, {2, 1, 64}), length(DType::i32, {2, 1}),
      scores(DType::f32, {2, 1, 64});
  Tensor q32(DType::f32, {2, 1, 4, 128}), d32(DType::f8_e4m3, {2, 1, 4, 32});
  Tensor heads(DType::f8_e4m3, {2, 1, 129, 128}), flat(DType::f8_e4m3, {2, 4, 128});
  Tensor narrow(DType::u8, {40, 64 * 68}), three(DType::i32, {3}), none(DType::i32, {2, 1, 0});
  Tensor wide(DType::i64, {2, 8}), of_three(DType::i32, {2, 3}), turned(DType::i32, {1, 2});
  Tensor long_lens(DType::i64, {2, 1});
  const auto reject = [&](const auto& bend, const std::string& text) {
    TopkPagedArgs args = step.args();
    args.indices = indices;
    args.length = length;
    args.scores = scores;
    for (Tensor* output : {&indices, &length, &scores}) winnow::testing::fill_unwritten(*output);
    bend(args);
    expect_error([&] { topk_paged_workspace_bytes(args); }, ErrorCode::invalid_argument,
                 "indexer::topk_paged: " + text);
    expect_refused(topk_paged, args, "indexer::topk_paged: " + text, {indices, length, scores});
  };
  using Args = TopkPagedArgs;
  reject([](Args& a) { a.q = {}; }, "q: want a tensor [b, s_q, h, d], got none");
  reject([&](Args& a) { a.q = flat; },
         "q: want 4 dimensions [b, s_q, h, d], got shape [2, 4, 128]");
  reject([&](Args& a) { a.q = q32; }, "q: want dtype f8_e4m3, got f32");
  reject([&](Args& a) { a.q = d32; }, "q: want d = 128 or 64, got d = 32");
  reject([&](Args& a) { a.q = heads; }, "q: want 1 to 128 heads, got 129");
  reject([&](Args& a) { a.pages = narrow; },
         "pages: want shape [num_pages=40, 64 * (d + 4)=8448], got [40, 4352]");
  reject([&](Args& a) { a.pages = {}; },
         "pages: want a tensor [num_pages, 64 * (d + 4)], got none");
  reject([](Args& a) { a.weights = {}; },
         "weights: want a tensor of shape [b=2, s_q=1, h=4], got none");
  reject([&](Args& a) { a.block_tables = wide; }, "block_tables: want dtype i32, got i64");
  reject([&](Args& a) { a.block_tables = three; },
         "block_tables: want 2 dimensions [b, n], got shape [3]");
  reject([&](Args& a) { a.context_lens = three; }, "context_lens: want shape [b=2], got [3]");
  reject([&](Args& a) { a.context_lens = of_three; },
         "context_lens: want shape [b=2, s_q=1], got [2, 3]");
  reject([&](Args& a) { a.context_lens = turned; },
         "context_lens: want shape [b=2, s_q=1], got [1, 2]");
  reject([&](Args& a) { a.context_lens = long_lens; }, "context_lens: want dtype i32, got i64");
  reject([](Args& a) { a.context_lens = {}; },
         "context_lens: want a tensor of shape [b=2], got none");
  reject([&](Args& a) { a.context_lens = ConstTensorView(of_three.data(), DType::i32, {2, 1, 1}); },
         "context_lens: want 2 dimensions [b, s_q], or one, [b], got shape [2, 1, 1]");
  reject([&](Args& a) { a.indices = none; }, "indices: want topk from 1 to 2^31 - 1, got 0");
  reject([&](Args& a) { a.length = {}; }, "length: want a tensor of shape [b=2, s_q=1], got none");
  reject([&](Args& a) { a.scores = q32; },
         "scores: want shape [b=2, s_q=1, topk=64], got [2, 1, 4, 128]");
  reject(
      [&](Args& a) {
        a.block_tables = ConstTensorView(three.data(), DType::i32, {2, 1 << 25}, {0, 1});
      },
      "block_tables: want at most 2^31 - 128 rows, the range of the positions, got 33554432 "
      "pages of 64");
  TopkPagedArgs args = step.args();
  args.indices = indices;
  args.length = length;
  args.scores = TensorView(indices.data(), DType::f32, {2, 1, 64});
  expect_error([&] { topk_paged(args); }, ErrorCode::invalid_argument,
               "indexer::topk_paged: scores: want memory apart from indices, got memory that both "
               "use");
}

}  // namespace
}  // namespace winnow::indexer
