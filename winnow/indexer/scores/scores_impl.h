// What scores() hands to its backends. Internal.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/executor.h"
#include "winnow/indexer/problem.h"

namespace winnow::indexer {

struct ScoresParams {
  Problem problem;
  bool clean = true;                  // dense scores that a query does not see are written
  std::int64_t topk = 0;              // columns of indices
  std::optional<std::int64_t> width;  // of dense scores from each query's first row on
  Rows<const std::int32_t*> indices;  // [s_q, topk]; null: every row
  Rows<float*> scores;                // [s_q, topk], [s_q, width] or [s_q, s_k]
};

void scores_cpu(const ScoresParams& params, const Executor& executor);

// Queued on `stream` (a cudaStream_t) of the current device. Wants what check_for_gpu() asks for,
// and at least one score.
void scores_sm90(const ScoresParams& params, void* stream);
void scores_cuda(const ScoresParams& params, void* stream);

// Which dense scores are stored: all of them, -inf for rows that a query does not see; or those
// that a query sees, and beside them what is convenient.
enum class DenseRows { all, seen };
// The kernels of dense scores, for topk() too; the kernel behind that of sm90 may be launched
// early.
void dense_scores_sm90(const Problem& problem, Rows<float*> scores, DenseRows rows, void* stream);
void dense_scores_cuda(const Problem& problem, Rows<float*> scores, DenseRows rows, void* stream);

}  // namespace winnow::indexer
