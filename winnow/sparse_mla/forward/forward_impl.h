// What forward() hands to its backends. Internal.
#pragma once

#include <cstdint>
#include <limits>

#include "winnow/core/executor.h"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

struct ForwardParams {
  Problem problem;
  bool in_list_order = false;
  // In the place of -inf.
  float lse_of_nothing = -std::numeric_limits<float>::infinity();
  Rows<void*> out;  // [s_q, h_q, 512], dtype of the problem
  // Of accumulator_of() that dtype, may be null.
  Rows<const void*> attn_sink;  // [h_q]
  Rows<void*> max_logits, lse;  // [s_q, h_q]
};

void forward_cpu(const ForwardParams& params, const Executor& executor);

// Queues the kernel on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants what the checks for sm90 ask for, and s_q and h_q of at least 1. Allocates nothing and does
// not wait, so the stream may be in capture. `workspace` may be null.
void forward_sm90(const ForwardParams& params, void* workspace, void* stream);
// On the current device.
std::int64_t forward_sm90_workspace_bytes(const ForwardParams& params);
// The same on every GPU from compute capability 8.0 on. No workspace.
void forward_cuda(const ForwardParams& params, void* stream);

}  // namespace winnow::sparse_mla
