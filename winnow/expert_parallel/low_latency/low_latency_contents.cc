#include "winnow/expert_parallel/low_latency/low_latency_contents.h"

#include <algorithm>
#include <cstddef>
#include <string>

namespace winnow::expert_parallel {

std::vector<std::int32_t> read_experts(const Check& check, const LowLatencyConfig& config,
                                       const ConstTensorView& indices) {
  std::vector<std::int32_t> experts;
  experts.reserve(static_cast<std::size_t>(indices.numel()));
  for (std::int64_t token = 0; token < indices.size(0); ++token) {
    const auto first = static_cast<std::ptrdiff_t>(experts.size());
    for (std::int64_t k = 0; k < indices.size(1); ++k) {
      const std::int64_t expert = index_at(indices, token, k);
      check.that(expert >= -1 && expert <= config.experts, "expert_indices",
                 "-1 to " + std::to_string(config.experts),
                 std::to_string(expert) + " for token " + std::to_string(token));
      const bool none = expert < 0 || expert == config.experts;
      const bool again =
          !none && std::find(experts.begin() + first, experts.end(), expert) != experts.end();
      check.that(!again, "expert_indices", "every expert of a token once",
                 std::to_string(expert) + " again for token " + std::to_string(token));
      experts.push_back(none ? -1 : static_cast<std::int32_t>(expert));
    }
  }
  return experts;
}

std::vector<LowLatencyPair> pairs_by_rank(const ConstTensorView& indices, std::int64_t token,
                                          int experts, int per_rank) {
  std::vector<LowLatencyPair> pairs;
  for (std::int64_t k = 0; k < indices.size(1); ++k) {
    const std::int64_t expert = index_at(indices, token, k);
    if (expert >= 0 && expert < experts) pairs.push_back({expert / per_rank, k});
  }
  std::ranges::sort(pairs);
  return pairs;
}

std::vector<LowLatencyRange> read_handle(const Check& check, const LowLatencyConfig& config,
                                         const LowLatencyCombineArgs& args) {
  const std::int64_t experts = args.ranges.size(0), world = args.ranges.size(1);
  const std::int64_t rows = world * config.max_tokens;
  std::vector<LowLatencyRange> ranges;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    for (std::int64_t source = 0; source < world; ++source) {
      const std::int64_t range = read_once(&args.ranges.at<std::int64_t>(expert, source));
      const std::int64_t first = range >> 32, count = range & 0xffffffff;
      check.that(first >= 0 && count <= config.max_tokens && first + count <= rows, "ranges",
                 "those of a dispatch", std::to_string(range));
      LowLatencyRange& read = ranges.emplace_back(LowLatencyRange{first, {}});
      for (std::int64_t row = first; row < first + count; ++row) {
        const std::int32_t pair = read_once(&args.source_pairs.at<std::int32_t>(expert, row));
        check.that(pair >= 0 && pair < config.max_tokens * config.topk, "source_pairs",
                   "those of a dispatch", std::to_string(pair));
        read.pairs.push_back(pair);
      }
    }
  }
  return ranges;
}

}  // namespace winnow::expert_parallel
