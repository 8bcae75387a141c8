// The attention distribution of top-k sparse MLA attention, cuda: the launch.
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/distribution/distribution_cuda.cuh"
#include "winnow/sparse_mla/distribution/distribution_impl.h"

namespace winnow::sparse_mla {
namespace {

using distribution_cuda_detail::KernelParams;

constexpr device::Runtime kRuntime{"sparse_mla::distribution", "cuda"};

template <class Plan>
void launch(const DistributionParams& params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  KernelParams kernel{};
  kernel.sources = two_sources(problem);
  kernel.q = static_cast<const char*>(problem.q.data);
  kernel.q_stride0 = problem.q.stride0 * 2;
  kernel.q_stride1 = problem.q.stride1 * 2;
  kernel.lse = params.lse.as<const float>();
  kernel.attn_sum = params.attn_sum.as<float>();
  kernel.scale = static_cast<float>(problem.scale) * device::kLog2e;
  kernel.h_q = static_cast<int>(problem.h_q);
  kernel.columns = static_cast<int>(problem.topk);  // without indices s_kv
  auto* const function = distribution_cuda_detail::distribution_kernel<Plan>;
  kRuntime.allow_shared_memory(function, Plan::kBytes);
  kRuntime.launch(function, static_cast<unsigned>(problem.s_q), attention_cuda::kThreads,
                  Plan::kBytes, stream, kernel);
}

template <DType kType>
void launch(const DistributionParams& params, cudaStream_t stream) {
  using distribution_cuda_detail::DistributionPlan;
  if (params.problem.topk == 0) return;
  const int most = kRuntime.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  using Two = DistributionPlan<kType, 576, 4, 2>;
  using One = DistributionPlan<kType, 576, 4, 1>;
  const auto function = params.problem.d_qk == 512 ? launch<DistributionPlan<kType, 512, 2, 2>>
                        : most >= 2 * Two::kBytes  ? launch<Two>
                        : most >= One::kBytes      ? launch<One>
                                                   : launch<DistributionPlan<kType, 576, 2, 1>>;
  function(params, stream);
}

}  // namespace

void distribution_cuda(const DistributionParams& params, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto function =
      params.problem.dtype == DType::f16 ? launch<DType::f16> : launch<DType::bf16>;
  // With lse given, the sums of one source do not depend on the other.
  DistributionParams one = params;
  one.problem.extra = {};
  function(one, queue);
  static_cast<Source&>(one.problem) = params.problem.extra;
  one.attn_sum = params.extra_attn_sum;
  function(one, queue);
}

}  // namespace winnow::sparse_mla
