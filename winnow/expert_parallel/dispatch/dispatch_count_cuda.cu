// Counts a rank's pairs and numbers them. Blocks and warps take consecutive tokens: each warp
// numbers its own pairs from 0, and when all counts are known adds those of the tokens before.
#include <algorithm>

#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/cuda/blocks.cuh"
#include "winnow/expert_parallel/cuda/pairs.cuh"
#include "winnow/expert_parallel/dispatch/dispatch_index.h"
#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"

namespace winnow::expert_parallel {
namespace {

using device::ceil_div;
using device::kFullWarp;

constexpr int kThreads = 512;
constexpr std::int64_t kMostShared = 200 * 1024;  // dynamic, bytes
constexpr unsigned long long kNone = ~0ull;
constexpr int kTogether = 4;  // loads that do not wait for each other

// Each warp has counters of its own: [E] pairs and [W] tokens. In shared memory, or where not even
// one warp's fit, in scratch memory behind what the blocks tell each other.
struct Shape {
  std::int64_t entries, warps, counter_bytes;
  bool spills;
  explicit Shape(const CudaTopology& topology) : entries(topology.experts + topology.world) {
    const std::int64_t bytes = entries * std::int64_t(sizeof(std::int32_t));
    warps = std::clamp<std::int64_t>(kMostShared / bytes, 1, kThreads / 32);
    counter_bytes = warps * bytes;
    spills = counter_bytes > kMostShared;
  }
};

// [blocks, entries] counts, then for each block its first bad pair.
__host__ __device__ std::int64_t block_counts_bytes(std::int64_t entries, int blocks) {
  return ceil_div<std::int64_t>(blocks * entries, 2) * 8;
}
__host__ __device__ std::int64_t shared_scratch_bytes(std::int64_t entries, int blocks) {
  return block_counts_bytes(entries, blocks) + blocks * std::int64_t(sizeof(unsigned long long));
}

// Counters of one kind for one warp: lanes with the same key (-1: none) count together. Returns how
// many with that key the warp has met before, in the order of lanes.
__device__ __forceinline__ int count_key(std::int32_t* counters, int key, int lane) {
  const unsigned same = __match_any_sync(kFullWarp, key);
  const int before = key < 0 ? 0 : counters[key] + __popc(same & lanes_below(lane));
  __syncwarp();
  if (key >= 0 && (same >> lane) == 1) counters[key] = before + 1;  // the last of them
  __syncwarp();
  return before;
}

__device__ __forceinline__ std::int64_t given_index(const CountParams& p, std::int64_t token,
                                                    int k) {
  const std::int64_t at = token * p.index_stride + k;
  return p.wide ? static_cast<const std::int64_t*>(p.indices)[at]
                : static_cast<const std::int32_t*>(p.indices)[at];
}

__global__ __launch_bounds__(kThreads, 1) void count(const __grid_constant__ CountParams p,
                                                     bool spills) {
  if (broken(p.view)) return;
  auto* const shared_counters = reinterpret_cast<std::int32_t*>(device::dynamic_shared<16>());
  WINNOW_BLOCK_SHARED(first_bad, unsigned long long);
  const CudaTopology& topology = p.view.topology;
  const int topk = topology.topk, experts = topology.experts, per_rank = topology.per_rank();
  const int entries = experts + topology.world;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const std::int64_t pairs = p.tokens * topk;
  auto* block_counts = reinterpret_cast<std::int32_t*>(p.scratch);
  auto* block_bad = reinterpret_cast<unsigned long long*>(
      p.scratch + block_counts_bytes(entries, int(gridDim.x)));
  std::int32_t* block_counters = shared_counters;
  if (spills) {
    block_counters = reinterpret_cast<std::int32_t*>(block_bad + gridDim.x) +
                     std::int64_t(blockIdx.x) * warps * entries;
  }
  std::int32_t* counters = block_counters + warp * entries;
  auto* indices = reinterpret_cast<std::int32_t*>(p.table);
  auto* ordinals = reinterpret_cast<std::int32_t*>(p.table + PairTable::ordinals(pairs));

  if (threadIdx.x == 0) first_bad = kNone;
  for (int i = lane; i < entries; i += 32) counters[i] = 0;
  __syncthreads();

  // This warp's tokens, in order.
  const std::int64_t per_block = ceil_div<std::int64_t>(p.tokens, gridDim.x);
  const std::int64_t block_begin = min(blockIdx.x * per_block, p.tokens);
  const std::int64_t block_end = min(block_begin + per_block, p.tokens);
  const std::int64_t per_warp = ceil_div<std::int64_t>(block_end - block_begin, warps);
  const std::int64_t begin = min(block_begin + warp * per_warp, block_end);
  const std::int64_t end = min(begin + per_warp, block_end);
  const PairLane mine(topk, lane);
  const auto is_mine = [&](std::int64_t step) { return mine.used && step + mine.slot < end; };
  const auto pair_of = [&](std::int64_t step) { return (step + mine.slot) * topk + mine.k; };
  // kTogether steps from `first` on: their loads before anything that waits for them.
  const auto load = [&](std::int64_t first, std::int32_t(&values)[kTogether], const auto& read) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int64_t step = first + i * mine.tokens;
      values[i] = is_mine(step) ? read(step) : -1;
    }
  };
  for (std::int64_t first = begin; first < end; first += kTogether * mine.tokens) {
    std::int32_t loaded[kTogether];
    load(first, loaded,
         [&](std::int64_t step) { return narrow_index(given_index(p, step + mine.slot, mine.k)); });
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int64_t step = first + i * mine.tokens;
      if (step >= end) break;
      const std::int32_t expert = loaded[i];
      const bool kept = topology.kept(expert);
      if (!kept && expert != -1 && expert != experts) {
        atomicMin(&first_bad, static_cast<unsigned long long>(pair_of(step)));
      }
      const int pairs_before = count_key(counters, kept ? expert : -1, lane);
      // Each token once for a rank: by its first pair there, which tells the others.
      const int rank = kept ? expert / per_rank : -1;
      const unsigned together = __match_any_sync(kFullWarp, kept ? rank * 32 + mine.slot : -1);
      const int counting = __ffs(together) - 1;
      const int tokens_before =
          count_key(counters + experts, kept && counting == lane ? rank : -1, lane);
      const int token_ordinal = __shfl_sync(kFullWarp, tokens_before, counting);
      if (is_mine(step)) {
        indices[pair_of(step)] = expert;
        ordinals[pair_of(step)] = p.token_major ? token_ordinal : pairs_before;
      }
    }
  }
  if (p.weights != nullptr) {
    std::byte* weights = p.table + PairTable::weights(pairs);
    const auto copy = [&]<class Word>(Word) {
      for (std::int64_t pair = begin * topk + lane; pair < end * topk; pair += 32) {
        const std::int64_t token = pair / topk;
        reinterpret_cast<Word*>(weights)[pair] =
            reinterpret_cast<const Word*>(p.weights + token * p.weight_stride)[pair - token * topk];
      }
    };
    p.weight_bytes == 2 ? copy(std::uint16_t{}) : copy(std::uint32_t{});
  }

  // Counters become what the warps before this one have met in the block.
  __syncthreads();
  for (int i = threadIdx.x; i < entries; i += blockDim.x) {
    std::int32_t sum = 0;
    for (int first = 0; first < warps; first += kTogether) {
      std::int32_t own[kTogether];
#pragma unroll
      for (int w = 0; w < kTogether; ++w) {
        own[w] = first + w < warps ? block_counters[(first + w) * entries + i] : 0;
      }
#pragma unroll
      for (int w = 0; w < kTogether; ++w) {
        if (first + w < warps) block_counters[(first + w) * entries + i] = sum;
        sum += own[w];
      }
    }
    block_counts[std::int64_t(blockIdx.x) * entries + i] = sum;
  }
  if (threadIdx.x == 0) block_bad[blockIdx.x] = first_bad;
  if (!meet_blocks(p.view, [](bool mine) { return __syncthreads_and(mine) != 0; })) return;
  device::allow_next_kernel();

  const bool last = blockIdx.x == gridDim.x - 1;
  for (int i = threadIdx.x; i < entries; i += blockDim.x) {
    std::int32_t before = 0;
    for (unsigned first = 0; first < blockIdx.x; first += 16) {
#pragma unroll
      for (unsigned block = first; block < first + 16; ++block) {
        if (block < blockIdx.x) before += block_counts[std::int64_t(block) * entries + i];
      }
    }
    for (int w = 0; w < warps; ++w) block_counters[w * entries + i] += before;
    if (last) p.counts[i] = before + block_counts[std::int64_t(blockIdx.x) * entries + i];
  }
  for (unsigned block = threadIdx.x; last && block < gridDim.x; block += blockDim.x) {
    atomicMin(&first_bad, block_bad[block]);
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    const unsigned long long bad = first_bad;
    Findings findings;
    if (bad != kNone) {
      findings.bad = 1;
      findings.token = static_cast<std::int32_t>(bad / topk);
      findings.set_value(given_index(p, findings.token, static_cast<int>(bad % topk)));
    }
    *reinterpret_cast<Findings*>(p.counts + entries) = findings;
    *p.placed = 0;
  }
  for (std::int64_t first = begin; first < end; first += kTogether * mine.tokens) {
    std::int32_t expert[kTogether], ordinal[kTogether];
    load(first, expert, [&](std::int64_t step) { return indices[pair_of(step)]; });
    load(first, ordinal, [&](std::int64_t step) { return ordinals[pair_of(step)]; });
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (!topology.kept(expert[i])) continue;
      const int counter = p.token_major ? experts + expert[i] / per_rank : expert[i];
      ordinals[pair_of(first + i * mine.tokens)] = ordinal[i] + counters[counter];
    }
  }
}

}  // namespace

std::int64_t count_scratch_bytes(const CudaTopology& topology, int blocks) {
  const Shape shape(topology);
  return shared_scratch_bytes(shape.entries, blocks) +
         (shape.spills ? blocks * shape.counter_bytes : 0);
}

int launch_count(const CountParams& params, int blocks, void* stream) {
  const Shape shape(params.view.topology);
  const std::int64_t shared = shape.spills ? 0 : shape.counter_bytes;
  return device::launch(count, blocks, int(shape.warps) * 32, std::size_t(shared),
                        static_cast<cudaStream_t>(stream), params, shape.spills);
}

int load_count() { return device::load_kernel(count, int(kMostShared)); }

}  // namespace winnow::expert_parallel
