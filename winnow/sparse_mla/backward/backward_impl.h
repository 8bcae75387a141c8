// What backward() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

struct BackwardParams {
  Problem problem;
  Rows<const void*> out;    // [s_q, h_q, 512], dtype of the problem; null where delta is given
  Rows<const void*> d_out;  // [s_q, h_q, 512], dtype of the problem
  // In accumulator_of(dtype of the problem), as d_sink.
  Rows<const void*> lse;        // [s_q, h_q]
  Rows<const void*> attn_sink;  // [h_q], or null
  Rows<const void*> delta;      // [s_q, h_q], or null
  bool deterministic = false;
  DType dq_dtype = DType::f32, dkv_dtype = DType::f32, dextra_kv_dtype = DType::f32;
  Rows<void*> dq;         // [s_q, h_q, d_qk], dq_dtype
  Rows<void*> dkv;        // [s_kv, d_qk], dkv_dtype
  Rows<void*> dextra_kv;  // [extra.s_kv, d_qk], dextra_kv_dtype; null without a second source
  Rows<void*> d_sink;     // [h_q], or null
};

void backward_cpu(const BackwardParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// The arguments have passed check_args_for_gpu() of backward.cc. Does not wait, so the stream may
// be in capture. `workspace`: as many bytes as backward_sm90_workspace_bytes() says on that device,
// aligned to 256, in use until the kernels have ended; if null, the memory is allocated and freed
// in stream order.
void backward_sm90(const BackwardParams& params, void* workspace, void* stream);
std::int64_t backward_sm90_workspace_bytes(const BackwardParams& params);

// The same on every GPU from compute capability 8.0 on.
void backward_cuda(const BackwardParams& params, void* workspace, void* stream);
std::int64_t backward_cuda_workspace_bytes(const BackwardParams& params);

// The same for sm100.
void backward_sm100(const BackwardParams& params, void* workspace, void* stream);
std::int64_t backward_sm100_workspace_bytes(const BackwardParams& params);

}  // namespace winnow::sparse_mla
