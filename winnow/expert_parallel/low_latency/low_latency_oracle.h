// What the low-latency calls do, with the whole world in one place. Plain loops; it shares no code
// with the backends.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "winnow/core/dtype.h"
#include "winnow/core/tensor.h"

namespace winnow::expert_parallel::low_latency_oracle {

struct World {
  int world_size = 1, experts = 1, topk = 1;
  std::vector<ConstTensorView> inputs;   // [W] of [n, H] bf16
  std::vector<ConstTensorView> indices;  // [W] of [n, k] i32

  int per_rank() const { return experts / world_size; }
};

// The pairs (token * K + k) of a source rank that go to an expert, in the order of tokens.
inline std::vector<std::int32_t> pairs_of(const World& world, int source, int expert) {
  std::vector<std::int32_t> pairs;
  const ConstTensorView& indices = world.indices[std::size_t(source)];
  for (std::int64_t token = 0; token < indices.size(0); ++token) {
    for (std::int64_t k = 0; k < indices.size(1); ++k) {
      if (indices.at<std::int32_t>(token, k) != expert) continue;
      pairs.push_back(std::int32_t(token * world.topk + k));
    }
  }
  return pairs;
}

// The scale of columns [128 * block, + 128) of a row.
inline float scale_of(const ConstTensorView& rows, std::int64_t row, std::int64_t block,
                      bool power_of_two) {
  double largest = 1e-4f;
  for (std::int64_t c = 128 * block; c < 128 * (block + 1); ++c) {
    largest = std::max(largest, std::abs(double(float(rows.at<BFloat16>(row, c)))));
  }
  const float scale = float(largest / 448.0);
  if (!power_of_two) return scale;
  float power = 0x1p-40f;
  while (power < scale) power *= 2;
  return power;
}
inline std::uint8_t element_of(float x, float scale) {
  return Float8E4M3(float(double(x) / double(scale))).bits;
}

// The sum of a token's rows: row_of(k, column) is that of the pair's expert. In f32: of each rank
// with k ascending, each product rounded, then of the ranks.
template <class RowOf>
BFloat16 sum_of(const World& world, const ConstTensorView& indices, const ConstTensorView& weights,
                std::int64_t token, const RowOf& row_of) {
  float sum = 0;
  for (int rank = 0; rank < world.world_size; ++rank) {
    float of_rank = 0;
    for (std::int64_t k = 0; k < indices.size(1); ++k) {
      const std::int32_t expert = indices.at<std::int32_t>(token, k);
      if (expert < 0 || expert >= world.experts || expert / world.per_rank() != rank) continue;
      // Exact in double precision, so no compiler can fuse product and sum.
      of_rank += float(double(row_of(k, expert)) * double(weights.at<float>(token, k)));
    }
    sum += of_rank;
  }
  return BFloat16(sum);
}

}  // namespace winnow::expert_parallel::low_latency_oracle
