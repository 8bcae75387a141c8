// layout on CUDA. As many lanes as a token has experts take one each and find by a vote who is the
// first of them for its rank and for its node.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/layout/layout_impl.h"

namespace winnow::expert_parallel {
namespace {

using device::kFullWarp;

constexpr device::Runtime kRuntime{"expert_parallel::layout", "cuda"};
constexpr int kThreads = 256, kWarpSize = 32;
constexpr std::int64_t kSharedCounts = 48 * 1024 / sizeof(std::int32_t);

// Counts of ranks, nodes and experts; null: not wanted.
struct Counts {
  std::int32_t* ranks;    // [W]
  std::int32_t* nodes;    // [W/L]
  std::int32_t* experts;  // [E]
};

struct KernelParams {
  LayoutParams layout;
  int nodes;
  int lanes;       // of a token: a power of two, K or more
  bool in_shared;  // a block's counts fit into shared memory
};

__device__ __forceinline__ void add(std::int32_t* counts, int index, std::int32_t count = 1) {
  if (counts != nullptr && count != 0) atomicAdd(counts + index, count);
}

// The lowest of the token's lanes that has this value.
__device__ __forceinline__ bool is_first(unsigned lanes_of_token, int value, int lane) {
  return __ffs(__match_any_sync(kFullWarp, value) & lanes_of_token) - 1 == lane;
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel(const __grid_constant__ KernelParams p, Counts counts) {
  const std::int64_t from = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t step = std::int64_t(gridDim.x) * kThreads;
  const auto clear = [&](std::int32_t* array, std::int64_t size) {
    for (std::int64_t i = from; array != nullptr && i < size; i += step) array[i] = 0;
  };
  clear(counts.ranks, p.layout.world_size);
  clear(counts.nodes, p.nodes);
  clear(counts.experts, p.layout.experts);
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ KernelParams p, const Counts out) {
  auto* const of_block = reinterpret_cast<std::int32_t*>(device::dynamic_shared<16>());
  const LayoutParams& layout = p.layout;
  const int ranks = int(layout.world_size), experts = int(layout.experts);
  const int experts_per_rank = experts / ranks, ranks_per_node = int(layout.local_world_size);
  const int num_counts = ranks + p.nodes + experts;
  Counts counts = out;
  if (p.in_shared) {
    counts = {of_block, of_block + ranks, of_block + ranks + p.nodes};
    for (int i = threadIdx.x; i < num_counts; i += kThreads) of_block[i] = 0;
    __syncthreads();
  }

  const int lane = threadIdx.x % kWarpSize, k = lane % p.lanes, first_lane = lane - k;
  const unsigned lanes_of_token = (kFullWarp >> (kWarpSize - p.lanes)) << first_lane;
  const int tokens_per_warp = kWarpSize / p.lanes;
  const std::int64_t warp = (std::int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarpSize;
  const std::int64_t step = std::int64_t(gridDim.x) * (kThreads / kWarpSize) * tokens_per_warp;
  for (std::int64_t base = warp * tokens_per_warp; base < layout.num_tokens; base += step) {
    const std::int64_t token = base + lane / p.lanes;
    const bool there = token < layout.num_tokens;
    std::int32_t expert = -1;
    if (there && k < layout.topk) {
      expert = layout.expert_indices.data[token * layout.expert_indices.stride0 + k];
    }
    const bool kept = expert >= 0 && expert < experts;
    const int rank = kept ? expert / experts_per_rank : -1;
    const int node = kept ? rank / ranks_per_node : -1;
    const bool first_of_rank = is_first(lanes_of_token, rank, lane) && kept;
    const bool first_of_node = is_first(lanes_of_token, node, lane) && kept;
    if (kept) add(counts.experts, expert);
    if (first_of_rank) add(counts.ranks, rank);
    if (first_of_node) add(counts.nodes, node);
    if (!layout.is_token_in_rank.present()) continue;
    std::uint8_t* in_rank = layout.is_token_in_rank.data + token * layout.is_token_in_rank.stride0;
    for (int r = k; there && r < ranks; r += p.lanes) in_rank[r] = 0;
    __syncwarp();
    if (first_of_rank) in_rank[rank] = 1;
  }

  if (!p.in_shared) return;
  __syncthreads();
  const auto add_up = [&](std::int32_t* to, const std::int32_t* from, int size) {
    for (int i = threadIdx.x; i < size; i += kThreads) add(to, i, from[i]);
  };
  add_up(out.ranks, counts.ranks, ranks);
  add_up(out.nodes, counts.nodes, p.nodes);
  add_up(out.experts, counts.experts, experts);
}

}  // namespace

void layout_cuda(const LayoutParams& params, void* stream) {
  KernelParams kernel{params, int(params.world_size / params.local_world_size), 1, false};
  while (kernel.lanes < params.topk) kernel.lanes *= 2;
  const std::int64_t counts = params.world_size + kernel.nodes + params.experts;
  kernel.in_shared = counts <= kSharedCounts;
  const Counts out{params.tokens_per_rank, params.tokens_per_node, params.tokens_per_expert};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto blocks_for = [](std::int64_t threads) {
    const std::int64_t most = kRuntime.multiprocessors();
    return static_cast<int>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, most));
  };
  kRuntime.launch(clear_kernel, blocks_for(counts), kThreads, 0, cuda_stream, kernel, out);
  if (params.num_tokens == 0) return;
  const std::size_t shared = kernel.in_shared ? std::size_t(counts) * sizeof(std::int32_t) : 0;
  kRuntime.launch(count_kernel, blocks_for(params.num_tokens * kernel.lanes), kThreads, shared,
                  cuda_stream, kernel, out);
}

}  // namespace winnow::expert_parallel
