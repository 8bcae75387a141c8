// Top-k sparse MLA attention, forward, cuda: the launch.
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/forward/forward_cuda.cuh"
#include "winnow/sparse_mla/forward/forward_impl.h"

namespace winnow::sparse_mla {
namespace {

using forward_cuda_detail::KernelParams;

constexpr device::Runtime kRuntime{"sparse_mla::forward", "cuda"};

template <class Plan>
void launch(const ForwardParams& params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  KernelParams kernel{};
  kernel.sources = two_sources(problem);
  kernel.q = static_cast<const char*>(problem.q.data);
  kernel.q_stride0 = problem.q.stride0 * 2;
  kernel.q_stride1 = problem.q.stride1 * 2;
  kernel.out = static_cast<char*>(params.out.data);
  kernel.out_stride0 = params.out.stride0 * 2;
  kernel.out_stride1 = params.out.stride1 * 2;
  kernel.max_logits = params.max_logits.as<float>();
  kernel.lse = params.lse.as<float>();
  kernel.attn_sink = params.attn_sink.as<const float>();
  kernel.scale = static_cast<float>(problem.scale) * device::kLog2e;
  kernel.lse_of_nothing = params.lse_of_nothing;
  kernel.h_q = static_cast<int>(problem.h_q);
  kernel.head_blocks = static_cast<std::uint32_t>(
      device::ceil_div<std::int64_t>(problem.h_q, attention_cuda::kHeads));
  auto* const function = forward_cuda_detail::forward_kernel<Plan>;
  kRuntime.allow_shared_memory(function, Plan::kBytes);
  kRuntime.launch(function, static_cast<unsigned>(problem.s_q) * kernel.head_blocks,
                  attention_cuda::kThreads, Plan::kBytes, stream, kernel);
}

template <DType kType>
void launch(const ForwardParams& params, cudaStream_t stream) {
  using attention_cuda::AttendPlan;
  const int most = kRuntime.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const auto choose = [&]<int kDim>() {
    using Pipelined = AttendPlan<kType, kDim, 4, true>;
    using FourParts = AttendPlan<kType, kDim, 4, false>;
    using Small = AttendPlan<kType, kDim, 2, false>;
    static_assert(Small::kBytes <= 99 * 1024);
    return most >= Pipelined::kBytes   ? launch<Pipelined>
           : most >= FourParts::kBytes ? launch<FourParts>
                                       : launch<Small>;
  };
  const auto function = params.problem.d_qk == 512 ? choose.template operator()<512>()
                                                   : choose.template operator()<576>();
  function(params, stream);
}

}  // namespace

void forward_cuda(const ForwardParams& params, void* stream) {
  const auto function =
      params.problem.dtype == DType::f16 ? launch<DType::f16> : launch<DType::bf16>;
  function(params, static_cast<cudaStream_t>(stream));
}

}  // namespace winnow::sparse_mla
