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
      check.that(!again, "expert_indices", "each expert at most once for a token",
                 std::to_string(expert) + " again for token " + std::to_string(token));
      experts.push_back(none ? -1 : static_cast<std::int32_t>(expert));
    }
  }
  return experts;
}

std::vector<LowLatencyPair> pairs_by_rank(std::span<const std::int32_t> experts, int per_rank) {
  std::vector<LowLatencyPair> pairs;
  for (std::size_t k = 0; k < experts.size(); ++k) {
    if (experts[k] >= 0) pairs.push_back({experts[k] / per_rank, static_cast<std::int64_t>(k)});
  }
  std::ranges::sort(pairs);
  return pairs;
}

std::vector<std::int32_t> read_pair_rows(const Check& check, const LowLatencyCombineArgs& args) {
  const ConstTensorView& given = args.pair_rows;
  const std::int64_t rows = args.expert_output.size(0) * args.expert_output.size(1);
  std::vector<std::int32_t> read;
  read.reserve(static_cast<std::size_t>(given.numel()));
  for (std::int64_t source = 0; source < given.size(0); ++source) {
    for (std::int64_t token = 0; token < given.size(1); ++token) {
      for (std::int64_t k = 0; k < given.size(2); ++k) {
        const std::int32_t row = read_once(&given.at<std::int32_t>(source, token, k));
        check.that(row >= -1 && row < rows, "pair_rows", "the rows that dispatch() gave",
                   std::to_string(row));
        read.push_back(row);
      }
    }
  }
  return read;
}

}  // namespace winnow::expert_parallel
