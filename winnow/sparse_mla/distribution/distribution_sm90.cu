// The attention distribution of top-k sparse MLA attention, sm90: the launch.
#include <algorithm>
#include <cstdint>
#include <string>

#include <cuda_runtime.h>

#include "winnow/core/error.h"
#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/distribution/distribution_impl.h"
#include "winnow/sparse_mla/distribution/distribution_sm90.cuh"

namespace winnow::sparse_mla {

namespace {

using distribution_sm90_detail::Params;

constexpr const char* kOperation = "sparse_mla::distribution";
constexpr device::Runtime kRuntime{kOperation, "sm90"};

// The kernel's view of queries [first, first + count).
Params kernel_params(const DistributionParams& params, std::int64_t first, std::int64_t count) {
  const Problem& problem = params.problem;
  Params kernel{};
  kernel.rows = gather_view(problem);
  kernel.rows.indices += problem.indices.offset(first);
  if (kernel.rows.topk_length != nullptr) {
    kernel.rows.topk_length += problem.topk_length.offset(first);
  }
  kernel.rows.q_start += first;
  kernel.q = static_cast<const char*>(problem.q.data) + 2 * problem.q.offset(first);
  kernel.lse = params.lse.data + params.lse.offset(first);
  kernel.attn_sum = params.attn_sum.data + params.attn_sum.offset(first);
  kernel.q_query_stride = 2 * problem.q.stride0;
  kernel.q_head_stride = 2 * problem.q.stride1;
  kernel.lse_stride = params.lse.stride0;
  kernel.attn_sum_stride = params.attn_sum.stride0;
  kernel.s_q = static_cast<int>(count);
  kernel.h_q = static_cast<int>(problem.h_q);
  kernel.tiles = static_cast<int>((problem.topk + kTileRows - 1) / kTileRows);
  kernel.scale_log2 = static_cast<float>(problem.scale * 1.4426950408889634);
  return kernel;
}

template <int kColumns>
void launch(const DistributionParams& params, cudaStream_t stream) {
  constexpr int kBytes = distribution_sm90_detail::SharedPlan<kColumns>::kBytes;
  constexpr std::int64_t kLaunchQueries = std::int64_t{1} << 30;  // the kernel counts in 32 bits
  auto* const function = distribution_sm90_detail::distribution_kernel<kColumns>;
  kRuntime.allow_shared_memory(function, kBytes);
  for (std::int64_t first = 0; first < params.problem.s_q; first += kLaunchQueries) {
    const std::int64_t count = std::min(params.problem.s_q - first, kLaunchQueries);
    function<<<kRuntime.multiprocessors(), distribution_sm90_detail::kThreads, kBytes, stream>>>(
        kernel_params(params, first, count));
    kRuntime.check_launch();
  }
}

}  // namespace

void distribution_sm90(const DistributionParams& params, void* stream) {
  const Problem& problem = params.problem;
  if (problem.s_q == 0 || problem.topk == 0) return;
  constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - 128;  // of what the kernel counts
  if (problem.topk > kLimit || problem.h_q > kLimit) {
    throw Error(ErrorCode::unsupported, kOperation,
                "sm90: want topk and h_q up to 2^31 - 128, got topk " +
                    std::to_string(problem.topk) + ", h_q " + std::to_string(problem.h_q));
  }
  const auto queue = static_cast<cudaStream_t>(stream);
  if (problem.d_qk == 576) {
    launch<576>(params, queue);
  } else {
    launch<512>(params, queue);
  }
}

}  // namespace winnow::sparse_mla
