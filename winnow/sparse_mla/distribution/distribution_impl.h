// What distribution() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

struct DistributionParams {
  Problem problem;
  Rows<const float*> lse;  // [s_q, h_q]
  Rows<float*> attn_sum;   // [s_q, topk]
};

void distribution_cpu(const DistributionParams& params, const Executor& executor);

}  // namespace winnow::sparse_mla
