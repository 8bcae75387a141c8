// What backward() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

struct BackwardParams {
  Problem problem;
  Rows<const void*> out;    // [s_q, h_q, 512], dtype of the problem; null where delta is given
  Rows<const void*> d_out;  // [s_q, h_q, 512], dtype of the problem
  // In accumulator_of(dtype of the problem); attn_sink, delta and d_sink may be null.
  Rows<const void*> lse;        // [s_q, h_q]
  Rows<const void*> attn_sink;  // [h_q]
  Rows<const void*> delta;      // [s_q, h_q]
  bool deterministic = false;
  DType dq_dtype = DType::f32, dkv_dtype = DType::f32;
  Rows<void*> dq;      // [s_q, h_q, d_qk]
  Rows<void*> dkv;     // [s_kv, d_qk]
  Rows<void*> d_sink;  // [h_q]
};

void backward_cpu(const BackwardParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Requires what the checks for sm90 ask for. Does not wait, so the stream may be in capture.
// `workspace`: backward_sm90_workspace_bytes() on that device, aligned to 256 bytes, in use until
// the kernels have ended; null: it is taken from the stream's memory pool and given back.
void backward_sm90(const BackwardParams& params, void* workspace, void* stream);
std::int64_t backward_sm90_workspace_bytes(const BackwardParams& params);

// The same for sm100.
void backward_sm100(const BackwardParams& params, void* workspace, void* stream);
std::int64_t backward_sm100_workspace_bytes(const BackwardParams& params);

}  // namespace winnow::sparse_mla
