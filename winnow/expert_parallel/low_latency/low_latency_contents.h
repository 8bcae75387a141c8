// What the CPU reads from index tensors of the low-latency calls, and the checks of their contents.
// Internal.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/core/read_once.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"

namespace winnow::expert_parallel {

inline std::int64_t index_at(const ConstTensorView& indices, std::int64_t token, std::int64_t k) {
  if (indices.dtype() == DType::i64) return read_once(&indices.at<std::int64_t>(token, k));
  return read_once(&indices.at<std::int32_t>(token, k));
}

// The expert of every pair, [n, k], -1 for none, read once. Throws Error (invalid_argument) for one
// that does not exist, and for a token that names one twice.
std::vector<std::int32_t> read_experts(const Check& check, const LowLatencyConfig& config,
                                       const ConstTensorView& indices);

// A pair of a token that has an expert: the rank of that, and k.
struct LowLatencyPair {
  std::int64_t home = 0, k = 0;
  auto operator<=>(const LowLatencyPair&) const = default;
};
// Those of a token, whose experts read_experts() has given, ranks in ascending order.
std::vector<LowLatencyPair> pairs_by_rank(std::span<const std::int32_t> experts, int per_rank);

// `pair_rows`, [W, M, K], read once. Throws Error (invalid_argument) for a row that is none of
// `expert_output`. The shapes of both have been checked.
std::vector<std::int32_t> read_pair_rows(const Check& check, const LowLatencyCombineArgs& args);

}  // namespace winnow::expert_parallel
