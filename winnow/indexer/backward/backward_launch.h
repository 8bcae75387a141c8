// What the launches of all GPU backends of backward share: workspace, sums, scales. Host code of
// .cu files.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/scratch.h"
#include "winnow/indexer/backward/backward_impl.h"
#include "winnow/indexer/backward/backward_sums.cuh"

namespace winnow::indexer::gpu {

// Whether the kernel adds into dk itself: in f32, to rows that cudaMemset2DAsync can clear.
inline bool adds_in_place(const BackwardParams& params) {
  const std::int64_t stride = params.dk.stride0, d = params.problem.d;
  return !params.deterministic && params.dk_dtype == DType::f32 &&
         (params.problem.s_k == 1 || (stride >= d && stride <= (std::int64_t{1} << 28)));
}

// What lies where in the workspace; offsets in bytes, multiples of 256.
struct Workspace {
  std::int64_t sums = 0, bounds = 0, scales = 0, bytes = 0;

  explicit Workspace(const BackwardParams& params) {
    const std::int64_t rows = params.problem.s_k, numbers = rows * params.problem.d;
    const auto take = [&](std::int64_t size) {
      const std::int64_t offset = bytes;
      bytes += device::scratch_bytes(size);
      return offset;
    };
    if (!adds_in_place(params)) sums = take(numbers * (params.deterministic ? 8 : 4));
    if (params.deterministic) {
      bounds = take(rows * 4);
      scales = take(rows * 4);
    }
    bytes = std::max<std::int64_t>(bytes, 1);  // so that there is an address
  }
};

inline Params kernel_params(const BackwardParams& params, const Workspace& layout,
                            char* workspace) {
  const Problem& problem = params.problem;
  Params p{};
  p.view = view_of(problem, params.indices, params.columns());
  p.d_scores = params.d_scores.data;
  p.d_scores_stride = params.d_scores.stride0;
  p.dq = static_cast<char*>(params.dq.data);
  p.dq_stride0 = params.dq.stride0;
  p.dq_stride1 = params.dq.stride1;
  p.dq_f32 = params.dq_dtype == DType::f32;
  p.d_weights = static_cast<char*>(params.d_weights.data);
  p.d_weights_stride = params.d_weights.stride0;
  p.d_weights_f32 = params.d_weights_dtype == DType::f32;
  if (params.deterministic) {
    p.bounds = reinterpret_cast<unsigned*>(workspace + layout.bounds);
    p.scales = reinterpret_cast<float*>(workspace + layout.scales);
    p.fixed = reinterpret_cast<unsigned long long*>(workspace + layout.sums);
  } else if (adds_in_place(params)) {
    p.dk = static_cast<float*>(params.dk.data);
    p.dk_stride = params.dk.stride0;
  } else {
    p.dk = reinterpret_cast<float*>(workspace + layout.sums);
    p.dk_stride = problem.d;
  }
  const auto addends =
      static_cast<std::uint64_t>(problem.s_q) * static_cast<std::uint64_t>(params.columns());
  // 1 more bit, since two blocks of 64 heads add separately.
  p.headroom = static_cast<int>(std::bit_width(addends)) + 1;
  p.head_blocks = static_cast<unsigned>((problem.h + kBlockHeads - 1) / kBlockHeads);
  p.items = static_cast<unsigned>(problem.s_q) * p.head_blocks;
  return p;
}

inline void clear(const device::Runtime& runtime, void* data, std::int64_t bytes,
                  cudaStream_t stream) {
  runtime.check(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), stream),
                "cudaMemsetAsync");
}

// Clears the memory that the kernels add to.
inline void clear_sums(const device::Runtime& runtime, const BackwardParams& params,
                       const Params& p, cudaStream_t stream) {
  const std::int64_t rows = params.problem.s_k, d = params.problem.d;
  if (rows == 0) return;
  if (params.deterministic) {
    clear(runtime, p.fixed, rows * d * 8, stream);
    clear(runtime, p.bounds, rows * 4, stream);
  } else if (rows == 1 || p.dk_stride == d) {
    clear(runtime, p.dk, rows * d * 4, stream);
  } else {
    runtime.check(
        cudaMemset2DAsync(p.dk, static_cast<std::size_t>(p.dk_stride) * 4, 0,
                          static_cast<std::size_t>(d) * 4, static_cast<std::size_t>(rows), stream),
        "cudaMemset2DAsync");
  }
}

// Computes the rows' bounds, and their scales from these.
template <class NumberOf>
void launch_scales(const device::Runtime& runtime, const BackwardParams& params, const Params& p,
                   int multiprocessors, cudaStream_t stream) {
  const std::int64_t rows = params.problem.s_k;
  if (rows == 0) return;
  const auto blocks = std::min<std::int64_t>(params.problem.s_q, 8 * std::int64_t{multiprocessors});
  if (blocks > 0) {
    runtime.launch(bound_kernel<NumberOf>, static_cast<unsigned>(blocks), kBoundThreads, 0, stream,
                   p, static_cast<int>(params.problem.d));
  }
  runtime.launch(scale_kernel, static_cast<unsigned>((rows + 255) / 256), 256, 0, stream, p);
}

template <DType kNarrow>
void finish(const device::Runtime& runtime, const BackwardParams& params, const Params& p,
            int multiprocessors, cudaStream_t stream) {
  FinishParams finish{};
  finish.sums = p.dk;
  finish.fixed = p.fixed;
  finish.scales = p.scales;
  finish.dk = static_cast<char*>(params.dk.data);
  finish.dk_stride = params.dk.stride0;
  finish.row_quads = static_cast<int>(params.problem.d / 4);
  finish.quads = params.problem.s_k * finish.row_quads;
  finish.f32 = params.dk_dtype == DType::f32;
  const std::int64_t wanted = (finish.quads + kFinishThreads - 1) / kFinishThreads;
  const auto blocks = std::min<std::int64_t>(wanted, 32 * std::int64_t{multiprocessors});
  runtime.launch(finish_kernel<kNarrow>, static_cast<unsigned>(blocks), kFinishThreads, 0, stream,
                 finish);
}

// Queues all kernels of a call; products(p, multiprocessors) queues those of the backend. NumberOf:
// see bound_kernel. kNarrow: the dtype of dk if it is not f32. `workspace`: of
// backward_gpu_workspace_bytes(params) bytes, or null.
template <class NumberOf, DType kNarrow, class Products>
void run_backward(const device::Runtime& runtime, const BackwardParams& params, void* workspace,
                  cudaStream_t stream, const Products& products) {
  const Workspace layout(params);
  const device::Scratch scratch(runtime, workspace, layout.bytes, stream);
  const Params p = kernel_params(params, layout, static_cast<char*>(scratch.data()));
  const int multiprocessors = runtime.multiprocessors();
  clear_sums(runtime, params, p, stream);
  if (params.deterministic) launch_scales<NumberOf>(runtime, params, p, multiprocessors, stream);
  if (params.problem.s_q > 0) products(p, multiprocessors);
  if (!adds_in_place(params) && params.problem.s_k > 0) {
    finish<kNarrow>(runtime, params, p, multiprocessors, stream);
  }
}

}  // namespace winnow::indexer::gpu
