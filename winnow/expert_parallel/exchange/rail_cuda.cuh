// The kernel that sends rows along the rail: a block at a time takes a chunk of tokens for a node,
// puts its runs of tokens, then the chunk's signal. It does not wait for its puts; quiet_kernel
// does, behind kernels that run meanwhile. Device code only.
#pragma once

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/expert_parallel/cuda/fabric.cuh"
#include "winnow/expert_parallel/exchange/rail_cuda.h"
#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {

// As many as there can be: NVSHMEM's copies to GPUs of one host have one load of 16 bytes under way
// in each.
inline constexpr int kRailSendThreads = 1024;
static_assert(kChunkTokens == 64);  // a bit for each

// Bit t: token t of a chunk has an expert on `node`. `indices` [count, K] are the chunk's. By all
// threads of the block; `wanted` is in its shared memory.
__device__ inline std::uint64_t find_wanted(const CudaTopology& topology,
                                            const std::int32_t* indices, int count, int node,
                                            bool (&wanted)[kChunkTokens]) {
  __syncthreads();  // what was found before is known to all
  if (threadIdx.x < kChunkTokens) wanted[threadIdx.x] = false;
  __syncthreads();
  for (int pair = int(threadIdx.x); pair < count * topology.topk; pair += kRailSendThreads) {
    const std::int32_t expert = indices[pair];
    if (topology.kept(expert) && expert / (topology.per_rank() * topology.locals) == node) {
      wanted[pair / topology.topk] = true;
    }
  }
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  const unsigned low = __ballot_sync(0xffffffffu, wanted[lane]);
  const unsigned high = __ballot_sync(0xffffffffu, wanted[32 + lane]);
  return std::uint64_t(high) << 32 | low;
}

// Puts `count` rows of consecutive tokens, back to back, at `offset` of the peer's rail memory.
// `staged` is where they may stand in symmetric memory.
template <class Fabric>
__device__ void put_run(const LayerView& view, int peer, std::int64_t offset, const std::byte* rows,
                        std::int64_t stride, std::int64_t bytes, int count, std::byte* staged) {
  const auto join = [&] { bytes *= count, stride = bytes, count = 1; };
  if (stride == bytes) join();
  if (Fabric::kRegisteredSources && rows != staged) {
    for (int i = 0; i < count; ++i) copy_by_block(staged + i * bytes, rows + i * stride, bytes);
    __syncthreads();
    rows = staged;
    join();
  }
  for (int i = 0; i < count; ++i) {
    Fabric::put(view.rail, peer, offset + i * bytes, rows + i * stride, bytes);
  }
}

template <class Fabric>
__global__ void __launch_bounds__(kRailSendThreads, 1)
    rail_send_kernel(const __grid_constant__ RailSendParams params) {
  const LayerView& view = params.view;
  device::wait_for_kernel_before();
  if (!runs(view) || (params.placed != nullptr && *params.placed == 0)) return;
  WINNOW_BLOCK_SHARED(wanted, bool[kChunkTokens]);
  const CudaTopology& topology = view.topology;
  const RailLayout& layout = view.rail_layout;
  const std::uint64_t epoch = epoch_of(view);
  const std::int64_t items = layout.chunks * (topology.nodes - 1);
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    // From the next node on: no rank is everyone's first.
    const std::int64_t chunk = item / (topology.nodes - 1), begin = chunk * kChunkTokens;
    const int to = (topology.node + 1 + int(item % (topology.nodes - 1))) % topology.nodes;
    const int peer = topology.rank_at(to, topology.local);
    const std::int64_t tokens = params.back ? params.rail_tokens[peer] : params.tokens;
    const int count = int(min(kChunkTokens, tokens - begin));
    if (count <= 0) continue;
    const std::int64_t table = params.back ? to * layout.max_tokens : 0;
    const std::uint64_t all =
        find_wanted(topology, params.indices + (table + begin) * topology.topk, count,
                    params.back ? topology.node : to, wanted);
    for (std::uint64_t left = all; left != 0;) {
      // A carry goes through the lowest run of ones.
      const std::uint64_t run = left & ~(left + (left & (~left + 1)));
      const std::int64_t token = begin + __ffsll(static_cast<long long>(run)) - 1;
      const int length = __popcll(run);
      left ^= run;
      if (params.row_bytes > 0) {
        std::byte* staged = view.rail.local + layout.staged_row(to, token, params.row_bytes);
        put_run<Fabric>(view, peer, layout.row(topology.node, token, params.row_bytes),
                        params.back ? staged : params.rows + token * params.row_stride,
                        params.back ? params.row_bytes : params.row_stride, params.row_bytes,
                        length, staged);
      }
      if (params.scale_bytes == 0) continue;
      std::byte* staged = view.rail.local + layout.staged_scale(to, token, params.scale_bytes);
      put_run<Fabric>(view, peer, layout.scale(topology.node, token, params.scale_bytes),
                      params.back ? staged : params.scales + token * params.scale_stride,
                      params.back ? params.scale_bytes : params.scale_stride, params.scale_bytes,
                      length, staged);
    }
    if (all != 0) Fabric::signal(view.rail, peer, layout.signal(topology.node, chunk), epoch);
  }
}

// One thread. It does not wait where the layer is broken: a peer may be dead, and what the puts
// read is memory of the layer, which nobody uses again before all ranks have let go of it.
template <class Fabric>
__global__ void __launch_bounds__(1) quiet_kernel(const __grid_constant__ LayerView view) {
  if (runs(view)) Fabric::quiet();
}

}  // namespace winnow::expert_parallel
