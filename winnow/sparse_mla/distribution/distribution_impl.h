// What distribution() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

struct DistributionParams {
  Problem problem;
  // Of accumulator_of() the problem's dtype.
  Rows<const void*> lse;       // [s_q, h_q]
  Rows<void*> attn_sum;        // [s_q, topk]
  Rows<void*> extra_attn_sum;  // [s_q, extra.topk]; null without a second source
};

void distribution_cpu(const DistributionParams& params, const Executor& executor);

// Queues a kernel for each source on `stream` (a cudaStream_t) of the current device, which holds
// the tensors. Wants what the checks for GPUs ask for, and s_q of at least 1. Allocates nothing and
// does not wait, so the stream may be in capture.
void distribution_sm90(const DistributionParams& params, void* stream);
// The same on every GPU from compute capability 8.0 on.
void distribution_cuda(const DistributionParams& params, void* stream);

}  // namespace winnow::sparse_mla
