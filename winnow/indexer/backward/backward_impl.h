// What backward() hands to its backends. Internal.
#pragma once

#include "winnow/core/executor.h"
#include "winnow/indexer/problem.h"

namespace winnow::indexer {

struct BackwardParams {
  Problem problem;
  std::int64_t topk = 0;              // columns of indices
  Rows<const std::int32_t*> indices;  // [s_q, topk]; absent: every row
  Rows<const float*> d_scores;        // [s_q, topk] or [s_q, s_k]
  bool deterministic = false;
  DType dq_dtype = DType::f32, dk_dtype = DType::f32, d_weights_dtype = DType::f32;
  Rows<void*> dq;         // [s_q, h, d]
  Rows<void*> dk;         // [s_k, d]
  Rows<void*> d_weights;  // [s_q, h]

  std::int64_t columns() const { return indices.present() ? topk : problem.s_k; }
};

void backward_cpu(const BackwardParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants what the checks for GPUs ask for. Does not wait, so the stream may be in capture.
// `workspace`: backward_gpu_workspace_bytes(), aligned to 256 bytes, in use until the stream has
// passed; null: taken from the stream's memory pool and given back.
void backward_sm90(const BackwardParams& params, void* workspace, void* stream);
void backward_cuda(const BackwardParams& params, void* workspace, void* stream);
std::int64_t backward_gpu_workspace_bytes(const BackwardParams& params);

}  // namespace winnow::indexer
