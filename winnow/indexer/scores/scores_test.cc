// indexer::scores: the case table, and what it refuses.
#include "winnow/indexer/scores/scores.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/indexer/cases.h"
#include "winnow/testing/expect.h"

namespace winnow::indexer {
namespace {

using winnow::testing::expect_error;

WINNOW_CASE_TABLE(ScoresCase, "indexer::scores");

TEST(Scores, Refuses) {
  Tensor q(DType::f32, {2, 1, 64}), k(DType::f32, {4, 64}), weights(DType::f32, {2, 1});
  Tensor dense(DType::f32, {2, 4}), at(DType::f32, {2, 3}), half(DType::f16, {2, 4});
  Tensor indices(DType::i32, {2, 3}), flat(DType::i32, {6});
  const auto reject = [&](const ScoresArgs& args, const std::string& text) {
    expect_error([&] { scores(args); }, ErrorCode::invalid_argument, "indexer::scores: " + text);
  };
  reject({.q = q, .k = k, .weights = weights, .scores = at},
         "scores: want shape [s_q=2, s_k=4], got [2, 3]");
  reject({.q = q, .k = k, .weights = weights, .indices = indices, .scores = dense},
         "scores: want shape [s_q=2, topk=3], got [2, 4]");
  reject({.q = q, .k = k, .weights = weights, .indices = flat, .scores = at},
         "indices: want 2 dimensions [s_q, topk], got shape [6]");
  reject({.q = q, .k = k, .weights = weights, .scores = half}, "scores: want dtype f32, got f16");
  reject({.q = q, .k = k, .weights = weights},
         "scores: want a tensor of shape [s_q=2, s_k=4], got none");
  // From each query's first row on.
  Tensor starts(DType::i32, {2});
  reject({.q = q, .k = k, .weights = weights, .width = 3, .scores = at},
         "key_start: want a tensor [s_q], which width needs, got none");
  reject({.q = q,
          .k = k,
          .weights = weights,
          .indices = indices,
          .key_start = starts,
          .width = 3,
          .scores = at},
         "width: want none beside indices, got 3");
  reject({.q = q, .k = k, .weights = weights, .key_start = starts, .width = 3, .scores = dense},
         "scores: want shape [s_q=2, width=3], got [2, 4]");
  for (const std::int64_t width : {std::int64_t{-1}, std::int64_t{1} << 31}) {
    reject({.q = q, .k = k, .weights = weights, .key_start = starts, .width = width, .scores = at},
           "width: want 0 to 2^31 - 1, got " + std::to_string(width));
  }
}

// Whatever a first row is: no score comes from outside of the keys, and all columns are written.
TEST(Scores, BeginWithAnyRow) {
  constexpr std::int64_t kRows = 300, kWidth = 64;
  const std::vector<std::int32_t> begins = {INT32_MIN, -64, -63, 0, 237, 299, 300, INT32_MAX};
  const auto s_q = static_cast<std::int64_t>(begins.size());
  Tensor q(DType::f32, {s_q, 1, 64}), k(DType::f32, {kRows, 64}), weights(DType::f32, {s_q, 1});
  std::ranges::fill(q.values<float>(), 1.0f);
  std::ranges::fill(weights.values<float>(), 1.0f);
  for (std::int64_t t = 0; t < kRows; ++t) k.view().at<float>(t, 0) = static_cast<float>(t + 1);
  Tensor starts(DType::i32, {s_q}), scored(DType::f32, {s_q, kWidth});
  std::ranges::copy(begins, starts.values<std::int32_t>().begin());
  std::ranges::fill(scored.values<float>(), std::nanf(""));
  scores(
      {.q = q, .k = k, .weights = weights, .key_start = starts, .width = kWidth, .scores = scored});
  for (std::int64_t i = 0; i < s_q; ++i) {
    for (std::int64_t c = 0; c < kWidth; ++c) {
      const std::int64_t row = begins[static_cast<std::size_t>(i)] + c;
      const float want = row < 0 || row >= kRows ? -HUGE_VALF : static_cast<float>(row + 1);
      EXPECT_EQ(scored.view().at<float>(i, c), want) << "query " << i << ", column " << c;
    }
  }
}

}  // namespace
}  // namespace winnow::indexer
