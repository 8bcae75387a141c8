// What topk() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/indexer/problem.h"

namespace winnow::indexer {

struct TopkParams {
  Problem problem;
  std::int64_t topk = 0;
  bool later_ties = false;      // of equal scores that of the larger row wins
  Rows<std::int32_t*> indices;  // [s_q, topk]
  Rows<std::int32_t*> length;   // [s_q]
  Rows<float*> scores;          // [s_q, topk], may be null
};

void topk_cpu(const TopkParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants what check_for_gpu() asks for and s_q of at least 1. `workspace`: as many bytes of that
// device as the other function says, aligned to 256 bytes, in use until the stream has passed;
// null: from the stream's pool.
void topk_sm90(const TopkParams& params, void* workspace, void* stream);
std::int64_t topk_sm90_workspace_bytes(const TopkParams& params);
void topk_cuda(const TopkParams& params, void* workspace, void* stream);
std::int64_t topk_cuda_workspace_bytes(const TopkParams& params);

}  // namespace winnow::indexer
