// Moves rows: tokens to their rows at the ranks of the node, each once for a rank; then, when all
// are there, the further rows of tokens with several experts on a rank from the first one.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "winnow/expert_parallel/device/wait.cuh"
#include "winnow/expert_parallel/dispatch/pairs_cuda.cuh"
#include "winnow/expert_parallel/dispatch/row_pipe.cuh"
#include "winnow/expert_parallel/placement.h"

namespace winnow::expert_parallel {
namespace {

using device::kFullWarp;

// Warps that send tokens, or repeat rows in finish; that repeat rows in move.
constexpr int kSenders = 8, kRepeaters = 3;
static_assert(kSenders + kRepeaters < PipeShape::kLeastStages);

// Generic accesses before, bulk copies after, of memory of any rank.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ float to_float(DType dtype, std::uint32_t bits) {
  if (dtype == DType::f32) return __uint_as_float(bits);
  if (dtype == DType::bf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
// A weight as it is, of 2 or 4 bytes.
__device__ __forceinline__ std::uint32_t load_bits(const std::byte* table, std::int64_t i,
                                                   DType dtype) {
  if (dtype == DType::f32) return reinterpret_cast<const std::uint32_t*>(table)[i];
  return reinterpret_cast<const std::uint16_t*>(table)[i];
}
__device__ __forceinline__ void store_bits(std::byte* table, std::int64_t i, DType dtype,
                                           std::uint32_t bits) {
  if (dtype == DType::f32) {
    reinterpret_cast<std::uint32_t*>(table)[i] = bits;
  } else {
    reinterpret_cast<std::uint16_t*>(table)[i] = static_cast<std::uint16_t>(bits);
  }
}

// A repeated routing may be that of a dispatch which was refused; then this one moves nothing.
__device__ bool goes_on(const MoveParams& p) {
  return runs(p.view) && (p.fresh || *p.tables.placed != 0);
}

// Where a repeated expert-major routing has further rows of a token, they are made while later
// tokens are under way: a rank tells its node after each phase, an equal part of its tokens. The
// others' tokens that it passes on belong to the last one.
__device__ __forceinline__ int phase_of(std::int64_t token, std::int64_t tokens) {
  return static_cast<int>(token * kPhases / tokens);
}

// A sending warp of move.
class TokenSender {
 public:
  __device__ TokenSender(const MoveParams& p, RowPipe& pipe)
      : p_(p), topology_(p.view.topology), pipe_(pipe), lane_(threadIdx.x % 32) {
    const bool aligned =
        (reinterpret_cast<std::uintptr_t>(p.input) | std::uintptr_t(p.input_stride)) % 16 == 0;
    element_bytes_ = aligned ? 0 : p.element_bytes;
  }

  // A token of this rank.
  __device__ void send_own(std::int64_t token) {
    const Pair pair = look(topology_.node, token);
    pipe_.send(p_.input + token * p_.input_stride, p_.row_bytes, element_bytes_, gets_row(pair),
               payload_of(pair));
    const std::byte* weights = p_.weights_travel ? p_.weights + token * p_.weight_stride : nullptr;
    write_tables(pair, topology_.rank, token, weights, 0, p_.scales + token * p_.scale_stride);
  }

  // A token of the rail source on node `from`, when its chunk has come; false: it does not come.
  __device__ bool send_forward(int from, std::int64_t token, std::int64_t tokens) {
    const Pair pair = look(from, token);
    const int source = topology_.rank_of(from, topology_.local);
    const LayerView& view = p_.view;
    if (__any_sync(kFullWarp, pair.row >= 0)) {
      bool came = true;
      if (lane_ == 0) {
        const auto* signal = reinterpret_cast<const std::uint64_t*>(
            view.rail.local + view.rail_layout.signal(from, token / kChunkTokens));
        came = wait_at_least(view, signal, epoch_of(view), Phase::tokens, source);
        fence_proxy_async();
      }
      if (!__shfl_sync(kFullWarp, came, 0)) return false;
      __syncwarp();
      pipe_.send(view.rail.local + view.rail_layout.row(from, token, p_.row_bytes), p_.row_bytes, 0,
                 gets_row(pair), payload_of(pair));
    }
    const std::int64_t pairs = tokens * topology_.topk;
    const std::byte* weights = nullptr;
    if (p_.weights_travel) {
      weights = view.control.local +
                view.control_layout.rail_table(epoch_of(view), topology_.nodes, from) +
                (p_.fresh ? PairTable::weights(pairs) : 0);
    }
    const std::byte* scales =
        view.rail.local + view.rail_layout.tail(from, token, p_.scale_words * sizeof(float));
    write_tables(pair, source, token, weights, token * topology_.topk, scales);
    return true;
  }

 private:
  // This lane's pair of the token.
  struct Pair {
    std::int64_t at;  // in tables [NN, T, K]
    std::int32_t expert = -1, row = -1;
    int local = -1;  // of the rank that has its row
    int first = 0;   // the lane of the token's first pair there
  };

  __device__ Pair look(int from, std::int64_t token) const {
    Pair pair;
    pair.at = (from * p_.max_tokens + token) * topology_.topk + lane_;
    if (lane_ < topology_.topk) {
      pair.expert = p_.tables.indices[pair.at];
      pair.row = p_.tables.rows[pair.at];
    }
    if (pair.row >= 0) {
      pair.local = pair.expert / topology_.per_rank() - topology_.node * topology_.locals;
    }
    pair.first = __ffs(__match_any_sync(kFullWarp, pair.local)) - 1;
    return pair;
  }
  // One row for each rank, all of them at this one.
  __device__ bool gets_row(const Pair& pair) const {
    if (pair.row < 0) return false;
    return pair.first == lane_ || (!p_.token_major && pair.local == topology_.local);
  }
  __device__ std::byte* payload_of(const Pair& pair) const {
    return pair.row < 0 ? nullptr : p_.payload.data[pair.local] + pair.row * p_.row_bytes;
  }

  // What stands beside the rows. Weights [first_weight, + K] are the token's.
  __device__ void write_tables(const Pair& pair, int source, std::int64_t token,
                               const std::byte* weights, std::int64_t first_weight,
                               const std::byte* scales) {
    const int topk = topology_.topk;
    std::uint32_t weight = 0;
    if (weights != nullptr && lane_ < topk) {
      weight = load_bits(weights, first_weight + lane_, p_.weight_dtype);
      p_.pair_weights[pair.at] = to_float(p_.weight_dtype, weight);
    }
    const bool first = pair.row >= 0 && pair.first == lane_;
    const std::int32_t first_row = __shfl_sync(kFullWarp, pair.row, pair.first);
    if (pair.row >= 0 && (first || !p_.token_major)) {
      if (p_.fresh) {
        reinterpret_cast<RowSource*>(p_.row_sources.data[pair.local])[pair.row] = {
            source, static_cast<std::int32_t>(token), lane_, first_row};
      }
      if (weights != nullptr && !p_.token_major) {
        store_bits(p_.row_weights.data[pair.local], pair.row, p_.weight_dtype, weight);
      }
    }
    if (p_.token_major)
      write_ids(pair, __ballot_sync(kFullWarp, first), weights != nullptr, weight);
    if (p_.scale_words > 0) write_scales(pair, scales);
  }

  // Beside a token-major row: which pairs are there.
  __device__ void write_ids(const Pair& pair, unsigned firsts, bool weighted,
                            std::uint32_t weight) {
    for (; firsts != 0; firsts &= firsts - 1) {
      const int lane = __ffs(firsts) - 1;
      const int local = __shfl_sync(kFullWarp, pair.local, lane);
      const std::int64_t row = __shfl_sync(kFullWarp, pair.row, lane);
      if (lane_ >= topology_.topk) continue;
      const bool here = pair.local == local;
      const std::int64_t at = row * topology_.topk + lane_;
      reinterpret_cast<std::int32_t*>(p_.ids.data[local])[at] =
          here ? pair.expert % topology_.per_rank() : -1;
      if (weighted) {
        store_bits(p_.row_weights.data[local], at, p_.weight_dtype, here ? weight : 0);
      }
    }
  }

  __device__ void write_scales(const Pair& pair, const std::byte* scales) {
    for (unsigned lanes = __ballot_sync(kFullWarp, gets_row(pair)); lanes != 0;
         lanes &= lanes - 1) {
      const int lane = __ffs(lanes) - 1;
      const int local = __shfl_sync(kFullWarp, pair.local, lane);
      const std::int64_t row = __shfl_sync(kFullWarp, pair.row, lane);
      auto* to = reinterpret_cast<std::uint32_t*>(p_.row_scales.data[local]) + row * p_.scale_words;
      for (int i = lane_; i < p_.scale_words; i += 32) {
        to[i] = reinterpret_cast<const std::uint32_t*>(scales)[i];
      }
    }
  }

  const MoveParams& p_;
  const DeviceTopology& topology_;
  RowPipe& pipe_;
  int lane_, element_bytes_;
};

// A sending warp's part of this rank's tokens, and then of those of its rail in the order in which
// chunks come. Blocks take every gridDim.x-th token. `sending` [kPhases]: the block's warps that
// still are in that phase. False: something did not come.
template <bool kRepeats>
__device__ bool send_tokens(const MoveParams& p, RowPipe& pipe, std::int32_t* sending) {
  const DeviceTopology& topology = p.view.topology;
  const int warp = threadIdx.x / 32, blocks = gridDim.x, block = blockIdx.x;
  TokenSender sender(p, pipe);
  int phase = 0;
  const auto go_on_to = [&](int next) {
    for (; kRepeats && phase < next; ++phase) pipe.mark(sending[phase], phase);
  };
  for (std::int64_t token = block + std::int64_t(warp) * blocks; token < p.tokens;
       token += std::int64_t(kSenders) * blocks) {
    go_on_to(phase_of(token, p.tokens));
    sender.send_own(token);
  }
  go_on_to(kPhases - 1);
  std::int64_t most_tokens = 0;
  for (int node = 0; node < topology.nodes; ++node) {
    const std::int64_t tokens = p.tables.tokens[topology.rank_of(node, topology.local)];
    if (node != topology.node) most_tokens = max(most_tokens, tokens);
  }
  for (std::int64_t begin = 0; begin < most_tokens; begin += kChunkTokens) {
    for (int step = topology.nodes - 1; step > 0; --step) {
      const int from = (topology.node + step) % topology.nodes;
      const std::int64_t tokens = p.tables.tokens[topology.rank_of(from, topology.local)];
      const std::int64_t end = min(tokens, begin + kChunkTokens);
      for (std::int64_t token = begin + block + warp * blocks; token < end;
           token += kSenders * blocks) {
        if (!sender.send_forward(from, token, tokens)) return false;
      }
    }
  }
  go_on_to(kPhases);
  return true;
}

// Makes `to` the same as row `from` of this rank. By a warp.
__device__ __forceinline__ void repeat_row(const MoveParams& p, RowPipe& pipe, std::int64_t from,
                                           std::int64_t to) {
  const int lane = threadIdx.x % 32, local = p.view.topology.local;
  std::byte* payload = p.payload.data[local];
  pipe.send(payload + from * p.row_bytes, p.row_bytes, 0, lane == 0, payload + to * p.row_bytes);
  auto* scales = reinterpret_cast<std::uint32_t*>(p.row_scales.data[local]);
  for (int i = lane; i < p.scale_words; i += 32) {
    scales[to * p.scale_words + i] = scales[from * p.scale_words + i];
  }
}

// A repeating warp of move: the rows of each phase when all ranks of the node have written it.
// False: some rank has not.
__device__ bool repeat_rows(const MoveParams& p, RowPipe& pipe) {
  const LayerView& view = p.view;
  const DeviceTopology& topology = view.topology;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - kSenders;
  const auto* words =
      reinterpret_cast<const std::uint64_t*>(view.control.local + view.control_layout.phases);
  const std::uint64_t before = epoch_of(view) * kPhases;
  const std::int64_t step = std::int64_t(gridDim.x) * kRepeaters * 32;
  for (int phase = 0; phase < kPhases; ++phase) {
    bool there = true;
    for (int from = lane; from < topology.locals; from += 32) {
      if (from == topology.local) continue;  // there is nothing to repeat
      there = there && wait_at_least(view, words + from, before + phase + 1, Phase::rows,
                                     topology.rank_of(topology.node, from));
    }
    if (!__all_sync(kFullWarp, there)) return false;
    __syncwarp();
    fence_proxy_async();
    const auto phase_at = [&](std::int64_t row) {
      return row < p.rows ? p.tables.repeat_phases[row] : std::int8_t{-1};
    };
    const std::int64_t first_row = (blockIdx.x + std::int64_t(warp) * gridDim.x) * 32 + lane;
    std::int8_t next = phase_at(first_row);
    for (std::int64_t row = first_row; row - lane < p.rows; row += step) {
      const bool repeats = next == phase;
      next = phase_at(row + step);
      const std::int64_t from = repeats ? p.tables.first_copies[row] : 0;
      for (unsigned lanes = __ballot_sync(kFullWarp, repeats); lanes != 0; lanes &= lanes - 1) {
        const int which = __ffs(lanes) - 1;
        repeat_row(p, pipe, __shfl_sync(kFullWarp, from, which), row - lane + which);
      }
    }
  }
  return true;
}

// The rows of this rank that no token has: padding behind each expert's rows, and in the worst case
// what follows the last row, of which only the small tables are cleared. All producing warps.
__device__ void clear_rows(const MoveParams& p) {
  const DeviceTopology& topology = p.view.topology;
  const int local = topology.local, topk = topology.topk;
  const std::int64_t thread = blockIdx.x * (32 * kSenders) + threadIdx.x;
  const std::int64_t threads = gridDim.x * (32 * kSenders);
  // Each entry of a table of `entries` for each row.
  const auto fill = [&](std::int64_t begin, std::int64_t end, std::int64_t entries,
                        const auto& write) {
    for (std::int64_t i = begin * entries + thread; i < end * entries; i += threads) write(i);
  };
  const auto clear_small = [&](std::int64_t begin, std::int64_t end) {
    if (p.weights_travel) {
      fill(begin, end, p.token_major ? topk : 1,
           [&](std::int64_t i) { store_bits(p.row_weights.data[local], i, p.weight_dtype, 0); });
    }
    if (p.token_major) {
      fill(begin, end, topk,
           [&](std::int64_t i) { reinterpret_cast<std::int32_t*>(p.ids.data[local])[i] = -1; });
    }
    if (p.fresh) {
      fill(begin, end, 1, [&](std::int64_t i) {
        reinterpret_cast<RowSource*>(p.row_sources.data[local])[i] = RowSource{};
      });
    }
  };
  for (int x = 0; p.pads && x < topology.per_rank(); ++x) {
    const std::int64_t begin = std::int64_t(p.tables.expert_offsets[x]) + p.tables.expert_counts[x];
    const std::int64_t end = min(std::int64_t(p.tables.expert_offsets[x + 1]), p.rows);
    if (begin >= end) continue;
    clear_small(begin, end);
    fill(begin, end, p.row_bytes / 16,
         [&](std::int64_t i) { reinterpret_cast<uint4*>(p.payload.data[local])[i] = uint4{}; });
    fill(begin, end, p.scale_words,
         [&](std::int64_t i) { reinterpret_cast<float*>(p.row_scales.data[local])[i] = 0.0f; });
  }
  clear_small(p.tables.wanted[topology.rank], p.rows);
  if (p.fresh && !p.token_major) {
    fill(0, p.rows, topk, [&](std::int64_t i) { p.tables.copies[i] = -1; });
  }
}

// The last block that comes here sets this rank's word at each rank of the node. One thread, after
// what the block has written.
__device__ void tell_node(const LayerView& view, std::uint32_t* ticket, std::int64_t words,
                          std::uint64_t value) {
  __threadfence_system();
  if (atomicAdd(ticket, 1u) != gridDim.x - 1) return;
  *ticket = 0;
  __threadfence_system();
  for (int to = 0; to < view.topology.locals; ++to) {
    store_release_system(
        reinterpret_cast<std::uint64_t*>(view.control.node[to] + words) + view.topology.local,
        value);
  }
}

template <bool kRepeats>
__global__ __launch_bounds__(32 * (kSenders + kRepeats * kRepeaters + 1),
                             1) void move(const __grid_constant__ MoveParams p,
                                          const __grid_constant__ PipeShape shape) {
  constexpr int kProducers = kSenders + kRepeats * kRepeaters;
  if (!goes_on(p)) return;
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ RowPipe::Shared shared;
  __shared__ std::int32_t sending[kPhases];
  RowPipe pipe(shared, stages, shape);
  if (threadIdx.x == 0) pipe.begin(kProducers);
  if (threadIdx.x < kPhases) sending[threadIdx.x] = kSenders;
  __syncthreads();
  const LayerView& view = p.view;
  bool all = true;
  if (threadIdx.x < 32 * kSenders) {
    all = send_tokens<kRepeats>(p, pipe, sending);
    pipe.end();
    clear_rows(p);
  } else if (threadIdx.x < 32 * kProducers) {
    if constexpr (kRepeats) all = repeat_rows(p, pipe);
    pipe.end();
  } else if (threadIdx.x == 32 * kProducers) {
    pipe.store([&](int phase) {
      tell_node(view, &view.state->tickets[kMovePhases + phase], view.control_layout.phases,
                epoch_of(view) * kPhases + phase + 1);
    });
  }
  all = __syncthreads_and(all);
  // Not where something has not come, which is a fault that every wait hears of.
  if (threadIdx.x == 0 && all && runs(view)) {
    tell_node(view, &view.state->tickets[kMoveDone], view.control_layout.done, epoch_of(view));
  }
}

// Whether all ranks of the node are done with this rank's rows. By all threads.
__device__ bool wait_for_node(const LayerView& view) {
  bool done = true;
  if (int(threadIdx.x) < view.topology.locals) {
    const auto* words =
        reinterpret_cast<const std::uint64_t*>(view.control.local + view.control_layout.done);
    done = wait_at_least(view, words + threadIdx.x, epoch_of(view), Phase::rows,
                         view.topology.rank_of(view.topology.node, int(threadIdx.x)));
  }
  return __syncthreads_and(done);
}

// A producing warp of finish takes 32 rows at a time: fills their tables, and for a new routing
// repeats those that are not the first ones of their tokens.
__device__ void finish_rows(const MoveParams& p, RowPipe& pipe, std::int64_t first_row) {
  const DeviceTopology& topology = p.view.topology;
  const int lane = threadIdx.x % 32, local = topology.local, topk = topology.topk;
  const std::int64_t row = first_row + lane;
  std::int64_t first = -1;
  std::int32_t rank = -1, token = -1;
  if (row < p.rows && p.fresh) {
    const int4 read = reinterpret_cast<const int4*>(p.row_sources.data[local])[row];
    const RowSource source{read.x, read.y, read.z, read.w};
    rank = source.rank;
    token = source.token;
    first = rank < 0 ? -1 : source.first;
    p.tables.first_copies[row] = first;
    p.tables.sources[row] = rank;
    if (!p.token_major && rank >= 0) p.tables.copies[first * topk + source.k] = row;
  }
  if (p.token_major) return;
  if (p.weights_of_rows != nullptr && row < p.rows) {
    p.weights_of_rows[row] =
        to_float(p.weight_dtype, load_bits(p.row_weights.data[local], row, p.weight_dtype));
  }
  if (!p.fresh) return;  // move has repeated the rows
  // This rank has written all the rows of tokens that it passes on.
  const bool repeats = first >= 0 && first != row && rank % topology.locals != local;
  if (row < p.rows) {
    const bool of_node = rank / topology.locals == topology.node;
    const int phase = !repeats  ? -1
                      : of_node ? phase_of(token, p.tables.tokens[rank])
                                : kPhases - 1;
    p.tables.repeat_phases[row] = static_cast<std::int8_t>(phase);
  }
  for (unsigned lanes = __ballot_sync(kFullWarp, repeats); lanes != 0; lanes &= lanes - 1) {
    const int which = __ffs(lanes) - 1;
    repeat_row(p, pipe, __shfl_sync(kFullWarp, first, which), first_row + which);
  }
}

__global__ __launch_bounds__(32 * (kSenders + 1),
                             1) void finish(const __grid_constant__ MoveParams p,
                                            const __grid_constant__ PipeShape shape) {
  if (!goes_on(p)) return;
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ RowPipe::Shared shared;
  RowPipe pipe(shared, stages, shape);
  if (threadIdx.x == 0) pipe.begin(kSenders);
  if (!wait_for_node(p.view)) return;
  if (threadIdx.x < 32 * kSenders) {
    fence_proxy_async();
    const std::int64_t warps = gridDim.x * kSenders;
    for (std::int64_t tile = blockIdx.x + std::int64_t(threadIdx.x / 32) * gridDim.x;
         tile * 32 < p.rows; tile += warps) {
      finish_rows(p, pipe, tile * 32);
    }
    pipe.end();
    const std::int64_t thread = blockIdx.x * (32 * kSenders) + threadIdx.x;
    const std::int64_t pairs = p.fresh && p.token_major ? p.rows * p.view.topology.topk : 0;
    const auto* ids = reinterpret_cast<const std::int32_t*>(p.ids.data[p.view.topology.local]);
    for (std::int64_t i = thread; i < pairs; i += gridDim.x * (32 * kSenders)) {
      p.tables.copies[i] = ids[i] >= 0 ? i / p.view.topology.topk : -1;
    }
    if (p.fresh && thread == 0) *p.tables.placed = 1;
  } else if (threadIdx.x == 32 * kSenders) {
    pipe.store([](int) {});
  }
}

template <class Kernel>
int launch(Kernel* kernel, const MoveParams& params, int blocks, int warps, void* stream) {
  const PipeShape shape(params.row_bytes);
  kernel<<<blocks, 32 * warps, int(shape.bytes()), static_cast<cudaStream_t>(stream)>>>(params,
                                                                                        shape);
  return cudaGetLastError();
}

}  // namespace

int launch_move(const MoveParams& params, int blocks, void* stream) {
  const bool repeats = !params.fresh && !params.token_major;
  return repeats ? launch(move<true>, params, blocks, kSenders + kRepeaters + 1, stream)
                 : launch(move<false>, params, blocks, kSenders + 1, stream);
}

int launch_finish(const MoveParams& params, int blocks, void* stream) {
  const bool only_waits =
      !params.fresh && (params.token_major || params.weights_of_rows == nullptr);
  return launch(finish, params, only_waits ? 1 : blocks, kSenders + 1, stream);
}

int load_move() {
  for (const auto kernel : {move<false>, move<true>, finish}) {
    if (const int status = load_kernel(kernel, int(PipeShape::kBytes)); status != cudaSuccess) {
      return status;
    }
  }
  return cudaSuccess;
}

}  // namespace winnow::expert_parallel
