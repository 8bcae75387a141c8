// Top-k sparse MLA attention, forward, sm90: the launch.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/forward/forward_impl.h"
#include "winnow/sparse_mla/forward/forward_sm90.cuh"

namespace winnow::sparse_mla {

namespace {

using forward_sm90_detail::KernelParams;

constexpr device::Runtime kRuntime{"sparse_mla::forward", "sm90"};

KernelParams kernel_params(const ForwardParams& params) {
  const Problem& problem = params.problem;
  const std::int64_t head_blocks =
      (problem.h_q + attention_sm90::kHeads - 1) / attention_sm90::kHeads;
  KernelParams kernel;
  kernel.kv = gather_view(problem);
  kernel.q = static_cast<const char*>(problem.q.data);
  kernel.q_stride0 = problem.q.stride0 * 2;
  kernel.q_stride1 = problem.q.stride1 * 2;
  kernel.out = static_cast<char*>(params.out.data);
  kernel.out_stride0 = params.out.stride0 * 2;
  kernel.out_stride1 = params.out.stride1 * 2;
  kernel.max_logits = params.max_logits.as<float>().data;
  kernel.max_logits_stride0 = params.max_logits.stride0;
  kernel.max_logits_stride1 = params.max_logits.stride1;
  kernel.lse = params.lse.as<float>().data;
  kernel.lse_stride0 = params.lse.stride0;
  kernel.lse_stride1 = params.lse.stride1;
  kernel.attn_sink = params.attn_sink.as<const float>().data;
  kernel.attn_sink_stride = params.attn_sink.stride0;
  kernel.scale = attention_sm90::logit_scale(problem.scale);
  kernel.h_q = static_cast<int>(problem.h_q);
  kernel.head_blocks = static_cast<std::uint32_t>(head_blocks);
  kernel.items = static_cast<std::uint32_t>(problem.s_q * head_blocks);
  kernel.ranges = range_view(problem);
  return kernel;
}

template <int kDim, bool kDense>
void launch(const KernelParams& kernel, cudaStream_t stream) {
  constexpr int kBytes = attention_sm90::Plan<kDim>::kBytes;
  auto* const function = forward_sm90_detail::forward_kernel<kDim, kDense>;
  kRuntime.allow_shared_memory(function, kBytes);
  const unsigned blocks =
      std::min(kernel.items, static_cast<std::uint32_t>(kRuntime.multiprocessors()));
  kRuntime.launch(function, blocks, attention_sm90::kThreads, kBytes, stream, kernel);
}

}  // namespace

void forward_sm90(const ForwardParams& params, void* stream) {
  const KernelParams kernel = kernel_params(params);
  const bool wide = params.problem.d_qk == 576;
  const auto function = params.problem.dense ? (wide ? launch<576, true> : launch<512, true>)
                                             : (wide ? launch<576, false> : launch<512, false>);
  function(kernel, static_cast<cudaStream_t>(stream));
}

}  // namespace winnow::sparse_mla
