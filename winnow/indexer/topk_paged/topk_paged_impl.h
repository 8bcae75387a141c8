// What topk_paged() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/indexer/topk_paged/paged_problem.h"

namespace winnow::indexer {

struct TopkPagedParams : PagedProblem {
  std::int64_t topk = 0;
  bool later_ties = false;  // of equal scores that of the larger position wins
  bool positions = false;
  Rows<std::int32_t*> indices;  // [b, s_q, topk]
  Rows<std::int32_t*> length;   // [b, s_q]
  Rows<float*> scores;          // [b, s_q, topk], may be null
};

void topk_paged_cpu(const TopkPagedParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants b and s_q of at least 1 and a `workspace` of as many bytes as the other function says;
// null: from the stream's pool. Does not wait, so the stream may be in capture.
void topk_paged_sm90(const TopkPagedParams& params, void* workspace, void* stream);
std::int64_t topk_paged_sm90_workspace_bytes(const TopkPagedParams& params);
void topk_paged_cuda(const TopkPagedParams& params, void* workspace, void* stream);
std::int64_t topk_paged_cuda_workspace_bytes(const TopkPagedParams& params);

}  // namespace winnow::indexer
