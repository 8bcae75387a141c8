// Experts for tokens, as a router might choose them and as none should. For tests and benchmarks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/core/tensor.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {

enum class ExpertChoice {
  distinct,    // the experts of a token differ; wants at least K of them
  dropped,     // distinct, and every fifth pair or so is E or -1
  duplicates,  // independent choices among a few experts, dropped pairs too
  one_expert,  // every pair the last expert
  none,        // every pair dropped
};

// Fills [n, K], i32, on the host.
inline void choose_experts(const TensorView& indices, testing::Random& random, std::int64_t experts,
                           ExpertChoice choice) {
  if (choice == ExpertChoice::distinct || choice == ExpertChoice::dropped) {
    testing::fill_distinct(indices, random, experts);
  }
  const auto none = [&] { return static_cast<std::int32_t>(random.below(2) == 0 ? -1 : experts); };
  for (std::int64_t t = 0; t < indices.size(0); ++t) {
    for (std::int64_t k = 0; k < indices.size(1); ++k) {
      std::int32_t& index = indices.at<std::int32_t>(t, k);
      switch (choice) {
        case ExpertChoice::distinct:
          break;
        case ExpertChoice::dropped:
          if (random.below(5) == 0) index = none();
          break;
        case ExpertChoice::duplicates: {
          const std::int64_t few = std::min<std::int64_t>(experts, 3);
          const auto expert = static_cast<std::int32_t>(random.below(few) * experts / few);
          index = random.below(8) == 0 ? none() : expert;
          break;
        }
        case ExpertChoice::one_expert:
          index = static_cast<std::int32_t>(experts - 1);
          break;
        case ExpertChoice::none:
          index = none();
          break;
      }
    }
  }
}

// The same indices in i64, dense.
inline Tensor widened(const Tensor& narrow) {
  Tensor wide(DType::i64, {narrow.size(0), narrow.size(1)});
  std::ranges::copy(narrow.values<std::int32_t>(), wide.values<std::int64_t>().begin());
  return wide;
}

// Distinct experts for the tokens of a rank: [tokens, topk], i32.
inline Tensor distinct_experts(int rank, std::int64_t tokens, int topk, std::int64_t experts) {
  Tensor indices(DType::i32, {tokens, topk});
  testing::Random random(static_cast<std::uint64_t>(rank) + 1);
  choose_experts(indices, random, experts, ExpertChoice::distinct);
  return indices;
}

}  // namespace winnow::expert_parallel
