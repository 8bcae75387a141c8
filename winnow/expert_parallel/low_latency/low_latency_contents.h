// What the CPU reads from index tensors of the low-latency calls, and the checks of their contents.
// Internal.
#pragma once

#include <cstdint>

#include "winnow/core/check.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"

namespace winnow::expert_parallel {

inline std::int64_t index_at(const ConstTensorView& indices, std::int64_t token, std::int64_t k) {
  if (indices.dtype() == DType::i64) return indices.at<std::int64_t>(token, k);
  return indices.at<std::int32_t>(token, k);
}

// Throws Error (invalid_argument) for an expert that does not exist, and for a token that names one
// twice.
void check_experts(const Check& check, const LowLatencyConfig& config,
                   const ConstTensorView& indices);
// Throws Error (invalid_argument) for `ranges` and `source_pairs` that no dispatch returned. Their
// shapes have been checked.
void check_handle(const Check& check, const LowLatencyConfig& config,
                  const LowLatencyCombineArgs& args);

}  // namespace winnow::expert_parallel
