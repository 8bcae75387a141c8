#include "winnow/expert_parallel/low_latency/low_latency_contents.h"

#include <string>

namespace winnow::expert_parallel {

void check_experts(const Check& check, const LowLatencyConfig& config,
                   const ConstTensorView& indices) {
  for (std::int64_t token = 0; token < indices.size(0); ++token) {
    for (std::int64_t k = 0; k < indices.size(1); ++k) {
      const std::int64_t expert = index_at(indices, token, k);
      check.that(expert >= -1 && expert <= config.experts, "expert_indices",
                 "-1 to " + std::to_string(config.experts),
                 std::to_string(expert) + " for token " + std::to_string(token));
      for (std::int64_t other = 0; other < k; ++other) {
        const bool again = index_at(indices, token, other) == expert;
        check.that(expert < 0 || expert == config.experts || !again, "expert_indices",
                   "every expert of a token once",
                   std::to_string(expert) + " again for token " + std::to_string(token));
      }
    }
  }
}

void check_handle(const Check& check, const LowLatencyConfig& config,
                  const LowLatencyCombineArgs& args) {
  const std::int64_t experts = args.ranges.size(0), world = args.ranges.size(1);
  const std::int64_t rows = world * config.max_tokens;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    for (std::int64_t source = 0; source < world; ++source) {
      const std::int64_t range = args.ranges.at<std::int64_t>(expert, source);
      const std::int64_t first = range >> 32, count = range & 0xffffffff;
      check.that(first >= 0 && count <= config.max_tokens && first + count <= rows, "ranges",
                 "those of a dispatch", std::to_string(range));
      for (std::int64_t row = first; row < first + count; ++row) {
        const std::int32_t pair = args.source_pairs.at<std::int32_t>(expert, row);
        check.that(pair >= 0 && pair < config.max_tokens * config.topk, "source_pairs",
                   "those of a dispatch", std::to_string(pair));
      }
    }
  }
}

}  // namespace winnow::expert_parallel
