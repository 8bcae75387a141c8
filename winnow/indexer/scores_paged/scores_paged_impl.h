// What scores_paged() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/indexer/topk_paged/paged_problem.h"

namespace winnow::indexer {

struct ScoresPagedParams : PagedProblem {
  bool clean = true;
  std::int64_t max_context = 0;
  Rows<float*> scores;  // [b, s_q, max_context]
};

void scores_paged_cpu(const ScoresPagedParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants at least one score.
void scores_paged_sm90(const ScoresPagedParams& params, void* stream);
void scores_paged_cuda(const ScoresPagedParams& params, void* stream);

}  // namespace winnow::indexer
