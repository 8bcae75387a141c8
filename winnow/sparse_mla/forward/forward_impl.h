// What forward() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

struct ForwardParams {
  Problem problem;
  Rows<const float*> attn_sink;  // [h_q], may be null
  Rows<void*> out;               // [s_q, h_q, 512], dtype of the problem
  Rows<float*> max_logits;       // [s_q, h_q], may be null
  Rows<float*> lse;              // [s_q, h_q], may be null
};

void forward_cpu(const ForwardParams& params, const Executor& executor);

}  // namespace winnow::sparse_mla
