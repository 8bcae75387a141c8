// indexer::scores: the case table, and what it refuses.
#include "winnow/indexer/scores/scores.h"

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
}

}  // namespace
}  // namespace winnow::indexer
