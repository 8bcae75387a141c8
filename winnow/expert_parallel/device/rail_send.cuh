// The kernel that sends rows along the rail: a block at a time takes a chunk of tokens for a node,
// puts its runs of tokens, then the chunk's signal. Device code only.
#pragma once

#include "winnow/expert_parallel/device/rail_send.h"
#include "winnow/expert_parallel/device/wire.cuh"
#include "winnow/expert_parallel/placement.h"

namespace winnow::expert_parallel {

inline constexpr int kRailSendThreads = 512;
static_assert(kRailSendThreads >= kChunkTokens && kChunkTokens % 32 == 0);

// Bit t of the chunk: the token has an expert on `node`. `indices` [count, K] are the chunk's.
struct WantedTokens {
  std::uint32_t words[kChunkTokens / 32];

  __device__ void find(const DeviceTopology& topology, const std::int32_t* indices, int count,
                       int node) {
    const int token = int(threadIdx.x);
    if (token < kChunkTokens) {
      bool wanted = false;
      for (int k = 0; k < topology.topk && token < count; ++k) {
        const std::int32_t expert = indices[std::int64_t(token) * topology.topk + k];
        wanted |= topology.kept(expert) && expert / (topology.per_rank() * topology.locals) == node;
      }
      const unsigned ballot = __ballot_sync(0xffffffffu, wanted);
      if (token % 32 == 0) words[token / 32] = ballot;
    }
  }
  __device__ bool holds(int token) const { return words[token / 32] >> (token % 32) & 1; }
};

// Puts `count` rows of consecutive tokens, back to back, at `offset` of the peer's rail memory.
// `staged` is where they may stand in symmetric memory.
template <class W>
__device__ void put_run(const LayerView& view, int peer, std::int64_t offset, const std::byte* rows,
                        std::int64_t stride, std::int64_t bytes, int count, std::byte* staged) {
  if (W::kRegisteredSources && rows != staged) {
    for (int i = 0; i < count; ++i) copy_by_block(staged + i * bytes, rows + i * stride, bytes);
    __syncthreads();
    rows = staged;
    stride = bytes;
  }
  if (stride == bytes) return W::put(view.rail, peer, offset, rows, count * bytes);
  for (int i = 0; i < count; ++i) {
    W::put(view.rail, peer, offset + i * bytes, rows + i * stride, bytes);
  }
}

template <class W>
__global__ void __launch_bounds__(kRailSendThreads, 1)
    rail_send_kernel(const __grid_constant__ RailSendParams params) {
  const LayerView& view = params.view;
  if (!runs(view) || (params.placed != nullptr && *params.placed == 0)) return;
  __shared__ WantedTokens wanted;
  const DeviceTopology& topology = view.topology;
  const RailLayout& layout = view.rail_layout;
  const std::uint64_t epoch = epoch_of(view);
  const std::int64_t items = layout.chunks * (topology.nodes - 1);
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    // From the next node on: no rank is everyone's first.
    const std::int64_t chunk = item / (topology.nodes - 1), begin = chunk * kChunkTokens;
    const int to = (topology.node + 1 + int(item % (topology.nodes - 1))) % topology.nodes;
    const int peer = topology.rank_of(to, topology.local);
    const std::int64_t tokens = params.back ? params.rail_tokens[peer] : params.tokens;
    const int count = int(min(kChunkTokens, tokens - begin));
    if (count <= 0) continue;
    const std::int64_t table = params.back ? to * layout.max_tokens : 0;
    __syncthreads();  // the last item's runs are done with `wanted`
    wanted.find(topology, params.indices + (table + begin) * topology.topk, count,
                params.back ? topology.node : to);
    __syncthreads();
    bool any = false;
    for (int first = 0; first < count;) {
      if (!wanted.holds(first)) {
        ++first;
        continue;
      }
      int last = first + 1;
      while (last < count && wanted.holds(last)) ++last;
      any = true;
      const std::int64_t token = begin + first;
      std::byte* staged = view.rail.local + layout.staged_row(to, token, params.row_bytes);
      put_run<W>(view, peer, layout.row(topology.node, token, params.row_bytes),
                 params.back ? staged : params.rows + token * params.row_stride,
                 params.back ? params.row_bytes : params.row_stride, params.row_bytes, last - first,
                 staged);
      if (params.tail_bytes > 0) {
        put_run<W>(view, peer, layout.tail(topology.node, token, params.tail_bytes),
                   params.tails + token * params.tail_stride, params.tail_stride, params.tail_bytes,
                   last - first,
                   view.rail.local + layout.staged_tail(to, token, params.tail_bytes));
      }
      first = last;
    }
    if (any) W::signal(view.rail, peer, layout.signal(topology.node, chunk), epoch);
  }
  W::drain();
}

}  // namespace winnow::expert_parallel
