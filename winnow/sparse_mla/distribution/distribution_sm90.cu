// The attention distribution of top-k sparse MLA attention, sm90: the launch.
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/distribution/distribution_impl.h"
#include "winnow/sparse_mla/distribution/distribution_sm90.cuh"

namespace winnow::sparse_mla {

namespace {

using distribution_sm90_detail::Params;

constexpr device::Runtime kRuntime{"sparse_mla::distribution", "sm90"};

Params kernel_params(const DistributionParams& params) {
  const Problem& problem = params.problem;
  Params kernel{};
  kernel.rows = gather_view(problem);
  kernel.q = static_cast<const char*>(problem.q.data);
  kernel.lse = params.lse.as<const float>().data;
  kernel.attn_sum = params.attn_sum.as<float>().data;
  kernel.q_query_stride = 2 * problem.q.stride0;
  kernel.q_head_stride = 2 * problem.q.stride1;
  kernel.lse_stride = params.lse.stride0;
  kernel.attn_sum_stride = params.attn_sum.stride0;
  kernel.s_q = static_cast<int>(problem.s_q);
  kernel.h_q = static_cast<int>(problem.h_q);
  // Without indices topk is s_kv.
  kernel.tiles = static_cast<int>((problem.topk + kTileRows - 1) / kTileRows);
  kernel.ranges = range_view(problem);
  kernel.scale_log2 = static_cast<float>(problem.scale * 1.4426950408889634);
  return kernel;
}

template <int kColumns, bool kDense>
void launch(const DistributionParams& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(distribution_sm90_detail::Layout<kColumns>);
  auto* const function = distribution_sm90_detail::distribution_kernel<kColumns, kDense>;
  kRuntime.allow_shared_memory(function, kBytes);
  kRuntime.launch(function, kRuntime.multiprocessors(), distribution_sm90_detail::kThreads, kBytes,
                  stream, kernel_params(params));
}

// Of the problem's first source.
void launch(const DistributionParams& params, cudaStream_t stream) {
  if (params.problem.topk == 0) return;
  const bool wide = params.problem.d_qk == 576;
  const auto function = params.problem.dense ? (wide ? launch<576, true> : launch<512, true>)
                                             : (wide ? launch<576, false> : launch<512, false>);
  function(params, stream);
}

}  // namespace

void distribution_sm90(const DistributionParams& params, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  launch(params, queue);
  // With lse given, the sums of one source do not depend on the other.
  DistributionParams extra = params;
  static_cast<Source&>(extra.problem) = params.problem.extra;
  extra.attn_sum = params.extra_attn_sum;
  launch(extra, queue);
}

}  // namespace winnow::sparse_mla
