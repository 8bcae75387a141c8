// notify on CUDA: the kernels over this rank's own tokens.
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/cuda/view.cuh"
#include "winnow/expert_parallel/exchange/block_scan.cuh"
#include "winnow/expert_parallel/notify/notify_cuda.h"

namespace winnow::expert_parallel {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Tokens of [begin, end) that go to rank `row`, or with row >= W to node row - W. By a whole warp.
__device__ int count_tokens(const TokenParams& p, int row, std::int64_t begin, std::int64_t end) {
  const CudaTopology& topology = p.view.layer.topology;
  const bool of_node = row >= topology.world;
  const int first = of_node ? (row - topology.world) * topology.locals : row;
  const int last = of_node ? first + topology.locals : row + 1;
  int count = 0;
  for (std::int64_t token = begin + threadIdx.x % 32; token < end; token += 32) {
    bool goes = false;
    for (int rank = first; rank < last; ++rank) goes |= p.in_rank[token * p.stride + rank] != 0;
    count += goes;
  }
  return device::warp_sum(count);
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ TokenParams p) {
  WINNOW_BLOCK_SHARED(sum, int);
  if (broken(p.view.layer)) return;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  const int row = blockIdx.x, warp = threadIdx.x / 32;
  const std::int64_t share = (p.tokens + kWarps - 1) / kWarps;
  const int count = count_tokens(p, row, warp * share, min((warp + 1) * share, p.tokens));
  if (threadIdx.x % 32 == 0) atomicAdd(&sum, count);
  __syncthreads();
  if (threadIdx.x == 0) p.view.sums[row] = sum;
}

__global__ void __launch_bounds__(kThreads) prefix_kernel(const __grid_constant__ TokenParams p) {
  WINNOW_BLOCK_SHARED(scratch, std::int64_t[kWarps]);
  if (!runs(p.view.layer)) return;
  const int row = blockIdx.x, world = p.view.layer.topology.world;
  std::int32_t* out = row < world ? p.rank_prefix : p.node_prefix;
  if (out == nullptr) return;
  out += row < world ? row * p.rank_stride : (row - world) * p.node_stride;
  const std::int64_t per_channel = (p.tokens + p.channels - 1) / p.channels;
  for (std::int64_t channel = threadIdx.x / 32; channel < p.channels; channel += kWarps) {
    const int count = count_tokens(p, row, min(channel * per_channel, p.tokens),
                                   min((channel + 1) * per_channel, p.tokens));
    if (threadIdx.x % 32 == 0) out[channel] = count;
  }
  __syncthreads();
  inclusive_sums(
      p.channels, scratch, [&](std::int64_t channel) { return std::int64_t(out[channel]); },
      [&](std::int64_t channel, std::int64_t sum) { out[channel] = std::int32_t(sum); });
}

int rows(const TokenParams& params) {
  return params.view.layer.topology.world + params.view.layer.topology.nodes;
}

}  // namespace

int sum_tokens(const TokenParams& params, void* stream) {
  return device::launch(sum_kernel, rows(params), kThreads, 0, static_cast<cudaStream_t>(stream),
                        params);
}

int prefix_channels(const TokenParams& params, void* stream) {
  return device::launch(prefix_kernel, rows(params), kThreads, 0, static_cast<cudaStream_t>(stream),
                        params);
}

int load_notify_kernels() { return device::load_kernels(sum_kernel, prefix_kernel); }

}  // namespace winnow::expert_parallel
