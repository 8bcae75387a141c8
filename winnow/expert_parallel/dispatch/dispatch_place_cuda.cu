// From the counts of all ranks the rows of all pairs: what placement.h defines.
#include <algorithm>

#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/cuda/pairs.cuh"
#include "winnow/expert_parallel/cuda/report.cuh"
#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"
#include "winnow/expert_parallel/exchange/received.cuh"
#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {
namespace {

using device::ceil_div;
using device::kFullWarp;
using device::warp_prefix;

constexpr int kThreads = 512;
constexpr std::int64_t kMostShared = 200 * 1024;  // dynamic, bytes
constexpr int kTogether = 4;                      // loads that do not wait for each other

// Beyond what a table can say lies only a worst case that has overflowed by far.
__device__ std::int32_t clamped(std::int64_t count) {
  return static_cast<std::int32_t>(min(count, std::int64_t{INT32_MAX}));
}

// What each block works out for itself: [E] first rows of experts on their ranks, [E] those of the
// blocks of this rank's rail sources on this node, [W] rows of ranks. In shared memory, or where it
// does not fit, in scratch memory.
std::int64_t block_bytes(const CudaTopology& topology) {
  const std::int64_t blocks_here = std::max(topology.experts, topology.world);
  return (topology.experts + blocks_here + topology.world) * std::int64_t(sizeof(std::int64_t));
}

struct Blocks {
  std::int64_t* starts;  // [E] where each expert's rows begin on its rank
  // Where each rail source's begin, by expert of this node (expert-major, [NN, E/NN]) or by rank of
  // this node (token-major, [NN, L]).
  std::int64_t* firsts;
  std::int64_t* wanted;  // [W] rows of each rank
};

// Rows that there are at most, on any rank.
__device__ std::int64_t limit_of(const PlaceParams& p) {
  return p.worst_case_rows > 0 ? p.worst_case_rows : INT32_MAX;
}

// Sums over the sources: of each expert's pairs (to `starts`, to be added up later), and of the
// blocks that come before those of the rail sources.
__device__ void sum_sources(const PlaceParams& p, const Received& received, const Blocks& blocks) {
  const CudaTopology& topology = p.view.topology;
  const int world = topology.world, locals = topology.locals, local = topology.local;
  const int per_node = topology.experts / topology.nodes;
  for (int expert = threadIdx.x; expert < topology.experts; expert += blockDim.x) {
    const bool here = !p.token_major && expert / per_node == topology.node;
    std::int64_t* first = blocks.firsts + expert - topology.node * per_node;
    std::int64_t sum = 0;
#pragma unroll 4
    for (int source = 0; source < world; ++source) {
      if (here && source % locals == local) first[source / locals * per_node] = sum;
      sum += received.pairs(source)[expert];
    }
    blocks.starts[expert] = sum;
  }
  if (!p.token_major) return;
  const std::int64_t limit = limit_of(p);
  for (int rank = threadIdx.x; rank < world; rank += blockDim.x) {
    const bool here = rank / locals == topology.node;
    const bool writes = blockIdx.x == 0 && rank == topology.rank;
    std::int64_t sum = 0;
    for (int source = 0; source < world; ++source) {
      if (here && source % locals == local) {
        blocks.firsts[source / locals * locals + rank % locals] = sum;
      }
      if (writes) p.tables.source_begins[source] = static_cast<std::int32_t>(min(sum, limit));
      sum += received.tokens(source)[rank];
    }
    if (writes) p.tables.source_begins[world] = static_cast<std::int32_t>(min(sum, limit));
    blocks.wanted[rank] = sum;
  }
}

// Adds up the experts of each rank, padded; a warp takes a rank.
__device__ void add_up_experts(const PlaceParams& p, const Blocks& blocks) {
  const CudaTopology& topology = p.view.topology;
  const int per_rank = topology.per_rank(), lane = threadIdx.x % 32;
  for (int rank = threadIdx.x / 32; rank < topology.world; rank += blockDim.x / 32) {
    const bool writes = blockIdx.x == 0 && rank == topology.rank;
    std::int64_t row = 0;
    for (int base = 0; base < per_rank; base += 32) {
      const int expert = base + lane;
      const bool any = expert < per_rank;
      std::int64_t* start = blocks.starts + std::int64_t(rank) * per_rank + expert;
      const std::int64_t count = any ? *start : 0;
      const std::int64_t padded = p.expert_alignment == 1
                                      ? count
                                      : ceil_div(count, p.expert_alignment) * p.expert_alignment;
      const std::int64_t behind = row + warp_prefix(padded, lane);
      if (any) *start = behind - padded;
      if (any && writes) {
        p.tables.expert_counts[expert] = clamped(count);
        p.tables.expert_offsets[expert] = clamped(behind - padded);
      }
      row = __shfl_sync(kFullWarp, behind, 31);
    }
    if (lane != 0) continue;
    if (!p.token_major) blocks.wanted[rank] = row;
    if (writes) p.tables.expert_offsets[per_rank] = clamped(row);
  }
}

// What the host wants to know.
__device__ void report(const PlaceParams& p, const Received& received, const Blocks& blocks) {
  const CudaTopology& topology = p.view.topology;
  const int per_rank = topology.per_rank();
  std::int32_t* words = p.view.report.words;
  for (int rank = threadIdx.x; rank < topology.world; rank += blockDim.x) {
    p.tables.wanted[rank] = blocks.wanted[rank];
    p.tables.tokens[rank] = static_cast<std::int32_t>(received.header(rank).tokens);
    if (p.reports) reinterpret_cast<std::int64_t*>(words)[rank] = blocks.wanted[rank];
  }
  for (int i = threadIdx.x; p.token_major && i < topology.nodes * topology.locals;
       i += blockDim.x) {
    p.tables.rail_begins[i] = clamped(blocks.firsts[i]);
  }
  words += PlaceReport::counts(topology.world);
  for (int i = threadIdx.x; p.reports && i < 2 * per_rank + 1; i += blockDim.x) {
    words[i] = i < per_rank ? p.tables.expert_counts[i] : p.tables.expert_offsets[i - per_rank];
  }
  if (p.reports) report_received(p.view, p.view.report, false);
  if (threadIdx.x != 0) return;
  if (p.reports) {
    p.view.report.report->refused = 0;
    complete(p.view, p.view.report);
  }
  for (int rank = 0; p.worst_case_rows > 0 && rank < topology.world; ++rank) {
    if (blocks.wanted[rank] <= p.worst_case_rows) continue;
    defer_overflow(p.view, blocks.wanted, p.worst_case_rows);
    break;
  }
}

// The rows of one rail source's pairs. By `placers` blocks, of which this one is number `placer`.
__device__ void place_pairs(const PlaceParams& p, int source_node, std::int64_t pairs,
                            const std::byte* table, const Blocks& blocks, int placer, int placers) {
  const CudaTopology& topology = p.view.topology;
  const int per_rank = topology.per_rank(), per_node = per_rank * topology.locals;
  const int blocks_here = p.token_major ? topology.locals : per_node;
  const int first_expert = topology.node * per_node;
  const std::int64_t limit = limit_of(p);
  const std::int64_t all = p.max_tokens * topology.topk, offset = source_node * all;
  const auto* indices = reinterpret_cast<const std::int32_t*>(table);
  const auto* ordinals = reinterpret_cast<const std::int32_t*>(table + PairTable::ordinals(pairs));
  const std::int64_t step = std::int64_t(placers) * blockDim.x;
  for (std::int64_t first = std::int64_t(placer) * blockDim.x + threadIdx.x; first < all;
       first += kTogether * step) {
    std::int32_t index[kTogether], ordinal[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {  // loads before what waits for them
      const std::int64_t pair = first + i * step;
      index[i] = pair < pairs ? indices[pair] : -1;
      ordinal[i] = pair < pairs ? ordinals[pair] : 0;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int64_t pair = first + i * step;
      if (pair >= all) break;
      std::int32_t row = -1;
      const int here = topology.kept(index[i]) ? index[i] - first_expert : -1;  // of this node
      if (here >= 0 && here < per_node) {
        const int block = p.token_major ? here / per_rank : here;
        const std::int64_t at = blocks.firsts[source_node * blocks_here + block] + ordinal[i];
        if (at < limit) row = static_cast<std::int32_t>(at);
      }
      p.tables.indices[offset + pair] = index[i];
      p.tables.rows[offset + pair] = row;
    }
  }
}

// The runs of tokens that a rail source has sent to this node; a warp takes a chunk.
__device__ void list_runs(const PlaceParams& p, int source_node, std::int64_t tokens,
                          const std::int32_t* indices, int placer, int placers) {
  const CudaTopology& topology = p.view.topology;
  const int topk = topology.topk, lane = threadIdx.x % 32;
  const int per_node = topology.experts / topology.nodes;
  std::int32_t* begins = p.tables.send_reqs + std::int64_t(source_node) * 2 * p.max_tokens;
  std::int32_t* ends = begins + p.max_tokens;
  const std::int64_t warps = placers * (blockDim.x / 32);
  for (std::int64_t chunk = placer * (blockDim.x / 32) + threadIdx.x / 32;
       chunk * kChunkTokens < p.max_tokens; chunk += warps) {
    const std::int64_t begin = chunk * kChunkTokens;
    const std::int64_t end = min(begin + kChunkTokens, p.max_tokens);
    for (std::int64_t slot = begin + lane; slot < end; slot += 32) begins[slot] = ends[slot] = -1;
    __syncwarp();
    std::int64_t slot = begin;
    bool open = false;  // a run goes on from the tokens before
    for (std::int64_t first = begin; first < end; first += 32) {
      const std::int64_t token = first + lane;
      bool wanted = false;
      for (int k = 0; token < tokens && k < topk; ++k) {
        const std::int32_t index = indices[token * topk + k];
        wanted |= topology.kept(index) && index / per_node == topology.node;
      }
      const unsigned those = __ballot_sync(kFullWarp, wanted);
      const unsigned before = those << 1 | unsigned(open);  // the token before is wanted
      const unsigned starts = those & ~before, stops = ~those & before;  // a run ends before a stop
      const std::int64_t closed = slot + __popc(stops & lanes_below(lane));
      if (stops >> lane & 1) ends[closed] = static_cast<std::int32_t>(token);
      // The run that a token begins follows all runs that ended before it.
      if (starts >> lane & 1) begins[closed] = static_cast<std::int32_t>(token);
      slot += __popc(stops);
      open = those >> 31;
    }
    if (open && lane == 0) ends[slot] = static_cast<std::int32_t>(end);
  }
}

__global__ __launch_bounds__(kThreads, 1) void place(const __grid_constant__ PlaceParams p,
                                                     bool spills) {
  device::wait_for_kernel_before();
  device::allow_next_kernel();
  if (!runs(p.view)) return;
  auto* const shared = reinterpret_cast<std::int64_t*>(device::dynamic_shared<16>());
  const CudaTopology& topology = p.view.topology;
  const int node = topology.node, experts = topology.experts;
  const int blocks_here = max(experts, topology.world);
  Blocks blocks;
  blocks.starts = shared;
  if (spills) {
    blocks.starts = reinterpret_cast<std::int64_t*>(p.scratch) +
                    std::int64_t(blockIdx.x) * (experts + blocks_here + topology.world);
  }
  blocks.firsts = blocks.starts + experts;
  blocks.wanted = blocks.firsts + blocks_here;

  const Received received(p.view);
  sum_sources(p, received, blocks);
  __syncthreads();
  add_up_experts(p, blocks);
  __syncthreads();
  const int per_node = experts / topology.nodes;
  for (int i = threadIdx.x; !p.token_major && i < experts; i += blockDim.x) {
    blocks.firsts[i] += blocks.starts[node * per_node + i % per_node];
  }
  __syncthreads();
  // The first block has enough to do with the report.
  const int reporters = gridDim.x > 1 ? 1 : 0;
  const int placer = int(blockIdx.x) - reporters, placers = int(gridDim.x) - reporters;
  if (blockIdx.x == 0) report(p, received, blocks);
  if (placer < 0) return;
  if (!p.token_major) {
    const std::int64_t tokens = topology.world * p.max_tokens;
    for (std::int64_t i = placer * std::int64_t(blockDim.x) + threadIdx.x; i < tokens;
         i += placers * std::int64_t(blockDim.x)) {
      p.tables.firsts[i] = FirstRow::kNone;
    }
  }
  for (int from = 0; from < topology.nodes; ++from) {
    const std::int64_t tokens = received.header(topology.rank_at(from, topology.local)).tokens;
    const std::byte* table =
        from == node ? p.table
                     : p.view.control.local +
                           p.view.control_layout.rail_table(epoch_of(p.view), topology.nodes, from);
    place_pairs(p, from, tokens * topology.topk, table, blocks, placer, placers);
    if (p.tables.send_reqs == nullptr) continue;
    list_runs(p, from, tokens, reinterpret_cast<const std::int32_t*>(table), placer, placers);
  }
}

}  // namespace

std::int64_t place_scratch_bytes(const CudaTopology& topology, int blocks) {
  const std::int64_t bytes = block_bytes(topology);
  return bytes > kMostShared ? blocks * bytes : 0;
}

int launch_place(const PlaceParams& params, int blocks, void* stream) {
  const std::int64_t bytes = block_bytes(params.view.topology);
  const bool spills = bytes > kMostShared;
  return device::launch_early(place, blocks, kThreads, spills ? 0 : bytes,
                              static_cast<cudaStream_t>(stream), params, spills);
}

int load_place() { return device::load_kernel(place, int(kMostShared)); }

}  // namespace winnow::expert_parallel
