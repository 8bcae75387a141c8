// The sums of combine: which rows belong to each, in which order, and where they are.
#include <cuda_runtime.h>

#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/combine/sums_cuda.cuh"
#include "winnow/expert_parallel/combine/sums_cuda.h"
#include "winnow/expert_parallel/device/wait.cuh"
#include "winnow/expert_parallel/placement.h"

namespace winnow::expert_parallel {
namespace {

using row_sums::Addend;
using row_sums::Cut;
using row_sums::Feeder;
using row_sums::kTeam;
using row_sums::Ring;
using row_sums::teams_of;

constexpr int kEndTicket = 12;  // of DeviceState::tickets

extern __shared__ __align__(128) std::byte ring_memory[];

// One (token, k) pair of a rail source: what lane k knows.
struct Pair {
  std::int32_t expert = -1, row = -1;
  float weight = 1.0f;
};

template <bool kWeighted>
__device__ Pair load_pair(const DeviceSumParams& params, int source_node, std::int64_t token,
                          int lane) {
  const DeviceTopology& topology = params.view.topology;
  Pair pair;
  if (lane >= topology.topk) return pair;
  const std::int64_t at =
      (source_node * params.view.rail_layout.max_tokens + token) * topology.topk + lane;
  pair.expert = params.routing.indices[at];
  pair.row = params.routing.rows[at];
  if constexpr (kWeighted) pair.weight = params.weights.pairs[at];
  return pair;
}

// The addends of one token of a rail source on this node, in the order of the ranks, k ascending in
// each. With kAllNodes also the sums that other nodes have sent for it, in the order of the nodes.
// The whole warp; `rows` [L] are the expert rows of each rank. The number of addends, -1 where the
// wait for a sum has failed.
template <bool kAllNodes>
__device__ int list_addends(const DeviceSumParams& params, std::byte* const* rows,
                            std::uint64_t epoch, std::int64_t token, const Pair& pair, int lane,
                            Addend* addends) {
  const DeviceTopology& topology = params.view.topology;
  const bool kept = topology.kept(pair.expert);
  const int home = kept ? pair.expert / topology.per_rank() : -1;
  const int node = kept ? home / topology.locals : -1, local = home - node * topology.locals;
  const bool here = kept && node == topology.node && pair.row >= 0;
  const bool there = kAllNodes && kept && node != topology.node;
  // Ascending groups: ranks of this node, and each other node as one.
  const int group = here ? home : there ? node * topology.locals : -1;
  const unsigned below = (1u << lane) - 1;
  const unsigned mates = __match_any_sync(device::kFullWarp, group);
  const bool crosses = here && params.local_combine && local != topology.local;
  const bool summed = crosses && __popc(mates) > 1;  // local_sum has summed them
  const bool one = there || summed || params.token_major;
  const bool counts = group >= 0 && (!one || (mates & below) == 0);
  const unsigned counted = __ballot_sync(device::kFullWarp, counts);
  const unsigned of_node = __ballot_sync(device::kFullWarp, counts && here);
  const unsigned before = __ballot_sync(device::kFullWarp, counts && there && node < topology.node);
  int at = 0;
  for (unsigned left = counted; left != 0; left &= left - 1) {
    const int k = __ffs(left) - 1;
    const int other = __shfl_sync(device::kFullWarp, group, k);
    at += other < group || (other == group && k < lane);
  }
  bool arrived = true;
  if (counts) {
    const bool begins_rank = one || (mates & below) == 0;
    const bool ends_rank = one || (mates >> lane) == 1;
    const bool ends_node = there || at + 1 == __popc(before) + __popc(of_node);
    const std::byte* row = nullptr;
    if constexpr (kAllNodes) {
      if (there) {
        const LayerView& view = params.view;
        const std::byte* signal =
            view.rail.local + view.rail_layout.signal(node, token / kChunkTokens);
        arrived = wait_at_least(view, reinterpret_cast<const std::uint64_t*>(signal), epoch,
                                Phase::sums, topology.rank_of(node, topology.local));
        row = view.rail.local + view.rail_layout.row(node, token, params.row_bytes);
      }
    }
    if (here) row = (summed ? params.sums.data[local] : rows[local]) + pair.row * params.row_bytes;
    addends[at] = {
        row, here && !summed ? pair.weight : 1.0f,
        (begins_rank ? row_sums::kBeginsRank : 0u) | (ends_rank ? row_sums::kEndsRank : 0u) |
            (crosses ? row_sums::kRoundRank : 0u) | (ends_node ? row_sums::kEndsNode : 0u)};
  }
  if constexpr (kAllNodes) {
    if (!__all_sync(device::kFullWarp, arrived)) return -1;
    // What others wrote and this warp has acquired is read by bulk copies next.
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
  return __popc(counted);
}

// Where the expert rows of the ranks of this node are, from their headers.
__device__ void find_rows(const LayerView& view, std::byte** rows) {
  const DeviceTopology& topology = view.topology;
  for (int local = int(threadIdx.x); local < topology.locals; local += int(blockDim.x)) {
    rows[local] = at_extent(view, local, heard(view, topology.rank_of(topology.node, local))->rows);
  }
}

__device__ bool placed(const DeviceRouting& routing) { return *routing.placed != 0; }

// The last block to come here tells the ranks of the node that this one is done with their memory,
// and waits for them. The whole block.
__device__ void finish(const LayerView& view, std::uint64_t epoch) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    unsigned* ticket = &view.state->tickets[kEndTicket];
    last = atomicAdd(ticket, 1u) + 1 == gridDim.x;
    if (last) *ticket = 0;
    last = last && runs(view);
  }
  __syncthreads();
  if (!last) return;
  const auto done = [&](std::byte* control, int local) {
    return reinterpret_cast<std::uint64_t*>(control + view.control_layout.done) + local;
  };
  const DeviceTopology& topology = view.topology;
  for (int local = int(threadIdx.x); local < topology.locals; local += int(blockDim.x)) {
    __threadfence_system();
    store_release_system(done(view.control.node[local], topology.local), epoch);
  }
  wait_for_all(
      view, topology.locals, [&](int local) { return done(view.control.local, local); }, epoch,
      Phase::end_of_sums, [&](int local) { return topology.rank_of(topology.node, local); });
}

template <class T, bool kWeighted, int kLevels>
__global__ void __launch_bounds__(kTeam* teams_of(kLevels), 1)
    sum_kernel(const __grid_constant__ DeviceSumParams params, const Cut cut) {
  if (__syncthreads_or(!runs(params.view))) return;  // all of the block or none
  __shared__ std::byte* rows[kMaxLocals];
  find_rows(params.view, rows);
  constexpr int kTeams = teams_of(kLevels);
  const Ring ring(ring_memory, cut);
  row_sums::begin(ring);
  const std::uint64_t epoch = epoch_of(params.view);
  const int lane = int(threadIdx.x) % 32, node = params.view.topology.node;
  if (row_sums::adds()) {
    row_sums::add_rows<T, kWeighted, kLevels>(ring);
  } else {
    Feeder feeder(ring);
    const std::int64_t step = row_sums::turns<kTeams>();
    const std::int64_t tokens = placed(params.routing) ? params.tokens : 0;
    std::int64_t token = row_sums::first_turn<kTeams>();
    Pair next;
    if (token < tokens) next = load_pair<kWeighted>(params, node, token, lane);
    for (; token < tokens; token += step) {
      const Pair pair = next;
      if (token + step < tokens) {
        next = load_pair<kWeighted>(params, node, token + step, lane);
      }
      const int count =
          list_addends<(kLevels > 2)>(params, rows, epoch, token, pair, lane, feeder.addends());
      if (count < 0) break;
      feeder.sum(count, params.out + token * params.out_stride,
                 params.bias == nullptr ? nullptr : params.bias + token * params.bias_stride);
    }
    feeder.end();
  }
  finish(params.view, epoch);
}

template <class T, bool kWeighted>
__global__ void __launch_bounds__(kTeam* teams_of(2), 1)
    node_sum_kernel(const __grid_constant__ DeviceSumParams params, const Cut cut) {
  const LayerView& view = params.view;
  if (__syncthreads_or(!runs(view)) || !placed(params.routing)) return;
  __shared__ std::byte* rows[kMaxLocals];
  find_rows(view, rows);
  constexpr int kTeams = teams_of(2);
  const Ring ring(ring_memory, cut);
  row_sums::begin(ring);
  if (row_sums::adds()) {
    row_sums::add_rows<T, kWeighted, 2>(ring);
    return;
  }
  const DeviceTopology& topology = view.topology;
  const int lane = int(threadIdx.x) % 32;
  Feeder feeder(ring);
  const std::int64_t step = row_sums::turns<kTeams>();
  for (int further = 1; further < topology.nodes; ++further) {
    const int to = (topology.node + further) % topology.nodes;
    const std::int64_t tokens = params.routing.tokens[topology.rank_of(to, topology.local)];
    std::int64_t token = row_sums::first_turn<kTeams>();
    Pair next;
    if (token < tokens) next = load_pair<kWeighted>(params, to, token, lane);
    for (; token < tokens; token += step) {
      const Pair pair = next;
      if (token + step < tokens) {
        next = load_pair<kWeighted>(params, to, token + step, lane);
      }
      const bool wanted = topology.kept(pair.expert) &&
                          pair.expert / (topology.per_rank() * topology.locals) == topology.node;
      if (!__any_sync(device::kFullWarp, wanted)) continue;
      const int count = list_addends<false>(params, rows, 0, token, pair, lane, feeder.addends());
      feeder.sum(count, view.rail.local + view.rail_layout.staged_row(to, token, params.row_bytes),
                 nullptr);
    }
  }
  feeder.end();
}

template <class T, bool kWeighted>
__global__ void __launch_bounds__(kTeam* teams_of(1), 1)
    local_sum_kernel(const __grid_constant__ DeviceSumParams params, const Cut cut) {
  if (broken(params.view) || !placed(params.routing)) return;
  constexpr int kTeams = teams_of(1);
  const Ring ring(ring_memory, cut);
  row_sums::begin(ring);
  if (row_sums::adds()) {
    row_sums::add_rows<T, kWeighted, 1>(ring);
    return;
  }
  const DeviceTopology& topology = params.view.topology;
  const DeviceRouting& routing = params.routing;
  const int lane = int(threadIdx.x) % 32, topk = topology.topk;
  // Tokens are looked up several at once, for the tables are far away.
  constexpr int kAhead = 4;
  struct Copy {
    std::int32_t row;
    float weight;
  };
  __shared__ Copy tables[kTeams][kAhead][32];
  auto& ahead = tables[threadIdx.x / kTeam];
  std::byte* sums = params.sums.data[topology.local];
  Feeder feeder(ring);
  const std::int64_t step = row_sums::turns<kTeams>();
  for (std::int64_t begin = row_sums::first_turn<kTeams>(); begin < params.rows;
       begin += 32 * step) {
    // Of 32 of this team's rows those that are the first of a token that another rail's rank
    // reduces.
    const std::int64_t mine = begin + lane * step;
    bool first = mine < params.rows && routing.first_copies[mine] == mine;
    if (first) first = routing.sources[mine] % topology.locals != topology.local;
    unsigned firsts = __ballot_sync(device::kFullWarp, first);
    while (firsts != 0) {
      Copy copies[kAhead];
      unsigned left = firsts;
#pragma unroll
      for (int i = 0; i < kAhead; ++i, left &= left - 1) {
        const std::int64_t row = begin + (__ffs(left) - 1) * step;
        copies[i].row =
            left != 0 && lane < topk ? std::int32_t(routing.copies[row * topk + lane]) : -1;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        copies[i].weight =
            kWeighted && copies[i].row >= 0 ? params.weights.rows[copies[i].row] : 1.0f;
        ahead[i][lane] = copies[i];
      }
#pragma unroll 1
      for (int i = 0; i < kAhead && firsts != 0; ++i, firsts &= firsts - 1) {
        const Copy copy = ahead[i][lane];  // written by this lane
        const unsigned all = __ballot_sync(device::kFullWarp, copy.row >= 0);
        if (__popc(all) < 2) continue;
        if (copy.row >= 0) {
          feeder.addends()[__popc(all & ((1u << lane) - 1))] = {
              params.expert_rows + copy.row * params.row_bytes, copy.weight, 0};
        }
        const std::int64_t to = begin + (__ffs(firsts) - 1) * step;
        feeder.sum(__popc(all), sums + to * params.row_bytes, nullptr);
      }
    }
  }
  feeder.end();
}

using Kernel = void (*)(DeviceSumParams, Cut);
enum Which { kSum, kSumOfNodes, kNodeSum, kLocalSum };

template <class T, bool kWeighted>
Kernel kernel_of(Which which) {
  switch (which) {
    case kSum:
      return sum_kernel<T, kWeighted, 2>;
    case kSumOfNodes:
      return sum_kernel<T, kWeighted, 3>;
    case kNodeSum:
      return node_sum_kernel<T, kWeighted>;
    case kLocalSum:
      return local_sum_kernel<T, kWeighted>;
  }
  return nullptr;
}
template <class T>
Kernel kernel_of(Which which, bool weighted) {
  return weighted ? kernel_of<T, true>(which) : kernel_of<T, false>(which);
}
Kernel kernel_of(Which which, DType dtype, bool weighted) {
  switch (dtype) {
    case DType::f32:
      return kernel_of<float>(which, weighted);
    case DType::f16:
      return kernel_of<__half>(which, weighted);
    default:  // the door lets no other dtype in
      return kernel_of<__nv_bfloat16>(which, weighted);
  }
}

int launch(Which which, const DeviceSumParams& params, int blocks, void* stream) {
  const Kernel kernel = kernel_of(which, params.dtype, params.weights.pairs != nullptr);
  const int teams = teams_of(which == kLocalSum ? 1 : which == kSumOfNodes ? 3 : 2);
  const Cut cut = row_sums::cut_rows(params.row_bytes, teams);
  const int bytes = row_sums::shared_bytes(cut, teams);
  kernel<<<blocks, kTeam * teams, bytes, static_cast<cudaStream_t>(stream)>>>(params, cut);
  return cudaGetLastError();
}

}  // namespace

int launch_local_sum(const DeviceSumParams& params, int blocks, void* stream) {
  return launch(kLocalSum, params, blocks, stream);
}
int launch_node_sum(const DeviceSumParams& params, int blocks, void* stream) {
  return launch(kNodeSum, params, blocks, stream);
}
int launch_sum(const DeviceSumParams& params, int blocks, void* stream) {
  return launch(params.view.topology.nodes > 1 ? kSumOfNodes : kSum, params, blocks, stream);
}

int load_sum_kernels() {
  for (const Which which : {kSum, kSumOfNodes, kNodeSum, kLocalSum}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const bool weighted : {false, true}) {
        const Kernel kernel = kernel_of(which, dtype, weighted);
        cudaFuncAttributes attributes;
        cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        if (error == cudaSuccess) {
          error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       row_sums::kRingBytes);
        }
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace winnow::expert_parallel
