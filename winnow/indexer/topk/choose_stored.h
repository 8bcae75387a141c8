// How topk() stores scores and chooses from them, in turns that share a workspace. Host code of .cu
// files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/device/common/scratch.h"
#include "winnow/indexer/topk/choose.cuh"
#include "winnow/indexer/topk/topk_impl.h"

namespace winnow::indexer::gpu {

struct StoredWork {
  std::int64_t stride;   // of the scores of a query
  std::int64_t queries;  // whose scores the workspace holds at a time
  std::int64_t bytes;
};

inline StoredWork plan_stored(const Problem& problem) {
  const std::int64_t stride = std::max<std::int64_t>((problem.s_k + 3) / 4 * 4, 4);
  const std::int64_t row_bytes = stride * std::int64_t{sizeof(float)};
  const std::int64_t most = std::max<std::int64_t>(kWorkspaceLimit / row_bytes, 1);
  const std::int64_t turns = (problem.s_q + most - 1) / most;
  const std::int64_t queries = (problem.s_q + turns - 1) / turns;
  return {stride, queries, device::scratch_bytes(queries * row_bytes)};
}

// The queries from `first` on, `count` of them.
inline Problem part_of(Problem problem, std::int64_t first, std::int64_t count) {
  const auto skip = [first](const auto& rows, std::int64_t size) {
    return static_cast<const char*>(rows.data) + rows.offset(first) * size;
  };
  problem.q.data = skip(problem.q, size_of(problem.dtype));
  problem.weights.data = skip(problem.weights, size_of(problem.weights_dtype));
  if (problem.key_start.present()) problem.key_start.data += problem.key_start.offset(first);
  if (problem.key_end.present()) problem.key_end.data += problem.key_end.offset(first);
  problem.q_start += first;
  problem.s_q = count;
  return problem;
}

// Calls turn(problem, choose) for some of the queries after the others: their problem, and what is
// chosen from when their scores are in `stored`.
template <class Turn>
void for_each_stored_turn(const TopkParams& params, const float* stored, const Turn& turn) {
  const StoredWork work = plan_stored(params.problem);
  for (std::int64_t first = 0; first < params.problem.s_q; first += work.queries) {
    const Problem problem =
        part_of(params.problem, first, std::min(work.queries, params.problem.s_q - first));
    float* const scores = params.scores.data;
    turn(problem,
         ChooseParams{.seen = seen_rows(problem),
                      .stored = stored,
                      .stored_stride = work.stride,
                      .indices = params.indices.data + params.indices.offset(first),
                      .length = params.length.data + params.length.offset(first),
                      .scores = scores == nullptr ? nullptr : scores + params.scores.offset(first),
                      .indices_stride = params.indices.stride0,
                      .length_stride = params.length.stride0,
                      .scores_stride = params.scores.stride0,
                      .topk = static_cast<int>(params.topk),
                      .later_ties = params.later_ties});
  }
}

}  // namespace winnow::indexer::gpu
