// Top-k sparse MLA attention, backward, sm90: the launch of the fused kernel, for its two ways to
// add to dkv. Host code of .cu files.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/backward/backward_fused_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_joint_sm90.h"

namespace winnow::sparse_mla::backward_fused_sm90_detail {

// Whether the blocks are kept in step: where the sums would not stay in L2 anyhow. A range beside
// another source is taken for a window, which moves along with the queries: few of its rows are in
// use at a time, however the blocks stand to each other.
inline bool keeps_step(const Runtime& runtime, const JointParams& params) {
  std::int64_t rows = 0;
  for (const Source* const source : {static_cast<const Source*>(&params.sources),
                                     static_cast<const Source*>(&params.sources.extra)}) {
    if (!source->dense || !params.sources.extra.kv.present()) rows += source->s_kv;
  }
  const std::int64_t bytes = rows * params.problem.d_qk * 4;
  return bytes > runtime.attribute(cudaDevAttrL2CacheSize) / 2;
}

// dq, the sums of dkv, shares of d_sink.
template <int kDim, class Drain, class Params>
void launch_fused(const Runtime& runtime, const Params& kernel, int blocks, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Layout<kDim>);
  auto* const function = fused_kernel<kDim, Drain, Params>;
  runtime.allow_shared_memory(function, kBytes);
  runtime.launch(function, blocks, kThreads, kBytes, stream, kernel);
  const unsigned tail = kernel.items % blocks;
  if (tail > 0 && kernel.tiles > 0) {
    runtime.launch(combine_kernel<kDim>, tail * kHeads, kCombineThreads, 0, stream, kernel, blocks);
  }
}

// With `query_ranges` where there are ranges.
template <int kDim, class Drain>
void launch_fused(const Runtime& runtime, const KernelParams& kernel,
                  const QueryRanges* query_ranges, int blocks, cudaStream_t stream) {
  if (query_ranges == nullptr) {
    launch_fused<kDim, Drain>(runtime, kernel, blocks, stream);
  } else {
    launch_fused<kDim, Drain>(runtime, WithRanges<KernelParams>{kernel, query_ranges}, blocks,
                              stream);
  }
}

}  // namespace winnow::sparse_mla::backward_fused_sm90_detail
