// Moves rows: tokens to their rows at the ranks of the node, each once for a rank, and on the rank
// the further rows of tokens with several experts there from the first one, or rows of other ranks
// to the caller's tensor. Warps claim what they do next, since SMs do not get equal shares of the
// links. In token-major order on one node some blocks send rows to other ranks and the rest write
// those of this rank: stores over a link hold up the other stores of their SM.
#include <algorithm>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/expert_parallel/cuda/bits.cuh"
#include "winnow/expert_parallel/cuda/blocks.cuh"
#include "winnow/expert_parallel/cuda/claims.cuh"
#include "winnow/expert_parallel/cuda/fabric.cuh"
#include "winnow/expert_parallel/cuda/pairs.cuh"
#include "winnow/expert_parallel/cuda/row_pipe.cuh"
#include "winnow/expert_parallel/cuda/signal_node.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"
#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {
namespace {

using device::ceil_div;
using device::kFullWarp;

// What a kernel does beside sending.
enum class Beside { nothing, repeats, takes };

// Warps that send tokens, and that repeat or take rows meanwhile; stages for all of them.
constexpr int kSenders = 8;
template <Beside kBeside>
constexpr int kOthers = kBeside == Beside::takes     ? 5
                        : kBeside == Beside::repeats ? 3
                                                     : 0;
template <Beside kBeside>
constexpr int kLeastStages = kBeside == Beside::takes ? 14 : PipeShape::kLeastStages;

// Few send where rows are large: when tokens run out, the slowest SM still has to send all that its
// senders have claimed. More send where blocks send apart: with four the warps were the limit.
constexpr int kLargeRowSenders = 4, kApartSenders = 6;
constexpr std::int64_t kLargeRow = 6144;  // bytes

// Behind the last row that a block has sent each rank of the node, by the slice of the token;
// shared memory.
using Reached = std::uint32_t[kMostSlices][kMaxLocals];

// A repeated routing may be that of a dispatch which was refused; then this one moves nothing.
__device__ bool goes_on(const MoveParams& p) {
  return runs(p.view) && (p.fresh || *p.tables.placed != 0);
}

// Whether some blocks send rows to other ranks only and the rest those of this rank's own tokens;
// and whether this block sends rows to other ranks.
__device__ __forceinline__ bool sends_apart(const MoveParams& p) {
  return p.senders < int(gridDim.x);
}
__device__ __forceinline__ bool sends_to_others(const MoveParams& p) {
  return int(blockIdx.x) < p.senders;
}

// Where a repeated expert-major routing has further rows of a token, they are made while later
// tokens are under way, and rows are taken so: a rank tells its node after each slice, an equal
// part of its tokens. The others' tokens that it passes on belong to the last one. RepeatPlan
// divides them in the same way.
__device__ __forceinline__ int slice_of(std::int64_t token, const MoveParams& p) {
  return static_cast<int>(token * p.slices / p.tokens);
}

// The rows of a token that a warp sends.
enum class Rows { all, of_others, own };

// A sending warp of move.
class TokenSender {
 public:
  __device__ TokenSender(const MoveParams& p, RowPipe& pipe)
      : p_(p), topology_(p.view.topology), pipe_(pipe), lane_(threadIdx.x % 32) {
    const bool aligned =
        (reinterpret_cast<std::uintptr_t>(p.input) | std::uintptr_t(p.input_stride)) % 16 == 0;
    element_bytes_ = aligned ? 0 : p.element_bytes;
  }

  // Of the tokens to come only these rows are sent.
  __device__ void choose(Rows rows) { rows_ = rows; }

  // The tokens of this rank that `claims` gives this warp: what is known of the next one is loaded
  // while one is sent. `reached_of`(token) is called before each: where its slice notes its rows,
  // or null. Returns the first claim behind the tokens.
  template <class ReachedOf>
  __device__ std::int64_t send_claimed(Claims& claims, const ReachedOf& reached_of) {
    claims.begin();
    std::int64_t token = claims.next();
    Loaded loaded = load_own(token);
    while (token < p_.tokens) {
      const std::int64_t next = claims.next();
      const Loaded ahead = load_own(next);
      std::uint32_t* const reached = reached_of(token);
      const Pair pair = pair_of(loaded);
      if (reached != nullptr && gets_row(pair)) {
        atomicMax(reached + pair.local, std::uint32_t(pair.row) + 1);
      }
      pipe_.send(p_.input + token * p_.input_stride, p_.row_bytes, element_bytes_, gets_row(pair),
                 payload_of(pair));
      write_tables(pair, topology_.rank, token, loaded.weight, p_.scales + token * p_.scale_stride);
      token = next;
      loaded = ahead;
    }
    return token;
  }

  // A token of the rail source on node `from`, when its chunk has come; false: it does not come.
  __device__ bool send_forward(int from, std::int64_t token, std::int64_t tokens) {
    const Loaded loaded = load(from, token);
    const Pair pair = pair_of(loaded);
    const int source = topology_.rank_at(from, topology_.local);
    const LayerView& view = p_.view;
    if (__any_sync(kFullWarp, pair.row >= 0)) {
      bool came = true;
      if (lane_ == 0) {
        const auto* signal = reinterpret_cast<const std::uint64_t*>(
            view.rail.local + view.rail_layout.signal(from, token / kChunkTokens));
        came = wait_at_least(view, signal, epoch_of(view), kTokensPhase, source);
        device::fence_proxy_async_global();
      }
      if (!__shfl_sync(kFullWarp, came, 0)) return false;
      __syncwarp();
      pipe_.send(view.rail.local + view.rail_layout.row(from, token, p_.row_bytes), p_.row_bytes, 0,
                 gets_row(pair), payload_of(pair));
    }
    std::uint32_t weight = 0;
    if (p_.weights_travel && lane_ < topology_.topk) {
      const std::byte* weights =
          view.control.local +
          view.control_layout.rail_table(epoch_of(view), topology_.nodes, from) +
          (p_.fresh ? PairTable::weights(tokens * topology_.topk) : 0);
      weight = load_bits(weights, token * topology_.topk + lane_, p_.weight_dtype);
    }
    const std::byte* scales =
        view.rail.local + view.rail_layout.scale(from, token, p_.scale_words * sizeof(float));
    write_tables(pair, source, token, weight, scales);
    return true;
  }

 private:
  // What tables say of this lane's pair of a token, and of one of this rank its weight.
  struct Loaded {
    std::int64_t at;  // in tables [NN, T, K]
    std::int32_t expert = -1, row = -1;
    std::uint32_t weight = 0;
  };
  // This lane's pair of the token.
  struct Pair : Loaded {
    int local = -1;  // of the rank that has its row
    int first = 0;   // the lane of the token's first pair there
  };

  __device__ Loaded load(int from, std::int64_t token) const {
    Loaded loaded;
    loaded.at = (from * p_.max_tokens + token) * topology_.topk + lane_;
    if (lane_ < topology_.topk) {
      loaded.expert = p_.tables.indices[loaded.at];
      loaded.row = p_.tables.rows[loaded.at];
    }
    return loaded;
  }
  __device__ Loaded load_own(std::int64_t token) const {
    if (token >= p_.tokens) return Loaded{};
    Loaded loaded = load(topology_.node, token);
    if (p_.weights_travel && lane_ < topology_.topk) {
      loaded.weight = load_bits(p_.weights + token * p_.weight_stride, lane_, p_.weight_dtype);
    }
    return loaded;
  }
  __device__ Pair pair_of(const Loaded& loaded) const {
    Pair pair{loaded};
    if (pair.row >= 0) {
      pair.local = pair.expert / topology_.per_rank() - topology_.node * topology_.locals;
    }
    pair.first = __ffs(__match_any_sync(kFullWarp, pair.local)) - 1;
    return pair;
  }
  __device__ bool has_chosen_row(const Pair& pair) const {
    if (pair.row < 0) return false;
    return rows_ == Rows::all || (pair.local == topology_.local) == (rows_ == Rows::own);
  }
  // One row for each rank, all of them at this one.
  __device__ bool gets_row(const Pair& pair) const {
    if (!has_chosen_row(pair)) return false;
    return pair.first == lane_ || (!p_.token_major && pair.local == topology_.local);
  }
  __device__ std::byte* payload_of(const Pair& pair) const {
    if (pair.row < 0) return nullptr;
    if (p_.out != nullptr && pair.local == topology_.local) {
      return p_.out + pair.row * p_.out_stride;
    }
    return p_.payload.data[pair.local] + pair.row * p_.row_bytes;
  }

  // What stands beside the rows.
  __device__ void write_tables(const Pair& pair, int source, std::int64_t token,
                               std::uint32_t weight, const std::byte* scales) {
    if (p_.weights_travel && lane_ < topology_.topk && rows_ != Rows::own) {
      p_.pair_weights[pair.at] = to_float(p_.weight_dtype, weight);
    }
    const bool first = has_chosen_row(pair) && pair.first == lane_;
    const std::int32_t first_row = __shfl_sync(kFullWarp, pair.row, pair.first);
    if (pair.row >= 0 && !p_.token_major) {
      if (p_.fresh) {
        reinterpret_cast<RowSource*>(p_.row_sources.data[pair.local])[pair.row] = {
            source, static_cast<std::int32_t>(token), lane_, first_row};
      }
      if (p_.weights_travel) {
        store_bits(p_.row_weights.data[pair.local], pair.row, p_.weight_dtype, weight);
      }
    }
    if (p_.token_major) write_ids(pair, __ballot_sync(kFullWarp, first), weight);
    if (p_.scale_words > 0) write_scales(pair, scales);
  }

  // Beside a token-major row: which pairs are there.
  __device__ void write_ids(const Pair& pair, unsigned firsts, std::uint32_t weight) {
    for (; firsts != 0; firsts &= firsts - 1) {
      const int lane = __ffs(firsts) - 1;
      const int local = __shfl_sync(kFullWarp, pair.local, lane);
      const std::int64_t row = __shfl_sync(kFullWarp, pair.row, lane);
      if (lane_ >= topology_.topk) continue;
      const bool here = pair.local == local;
      const bool taken = local == topology_.local && p_.taken.ids != nullptr;
      const std::int64_t at = row * topology_.topk + lane_;
      std::int32_t* const ids =
          taken ? p_.taken.ids : reinterpret_cast<std::int32_t*>(p_.ids.data[local]);
      ids[at] = here ? pair.expert % topology_.per_rank() : -1;
      if (p_.weights_travel) {
        store_bits(taken ? p_.taken.weights : p_.row_weights.data[local], at, p_.weight_dtype,
                   here ? weight : 0);
      }
    }
  }

  __device__ void write_scales(const Pair& pair, const std::byte* scales) {
    const unsigned rows = __ballot_sync(kFullWarp, gets_row(pair));
    const auto* from = reinterpret_cast<const std::uint32_t*>(scales);
    for (int begin = 0; begin < p_.scale_words; begin += 64) {
      const int i = begin + lane_, j = i + 32;
      const std::uint32_t low = i < p_.scale_words ? from[i] : 0;
      const std::uint32_t high = j < p_.scale_words ? from[j] : 0;
      for (unsigned lanes = rows; lanes != 0; lanes &= lanes - 1) {
        const int lane = __ffs(lanes) - 1;
        const int local = __shfl_sync(kFullWarp, pair.local, lane);
        const std::int64_t row = __shfl_sync(kFullWarp, pair.row, lane);
        const bool taken = local == topology_.local && p_.taken.scales != nullptr;
        auto* const to =
            taken ? p_.taken.scales : reinterpret_cast<std::uint32_t*>(p_.row_scales.data[local]);
        if (i < p_.scale_words) to[row * p_.scale_words + i] = low;
        if (j < p_.scale_words) to[row * p_.scale_words + j] = high;
      }
    }
  }

  const MoveParams& p_;
  const CudaTopology& topology_;
  RowPipe& pipe_;
  Rows rows_ = Rows::all;
  int lane_, element_bytes_;
};

// A sending warp: tokens of this rank, and then those of its rail in the order in which chunks
// come. `sending`: of each slice, the block's warps that still are in it. False: something did
// not come.
template <Beside kBeside>
__device__ bool send_tokens(const MoveParams& p, RowPipe& pipe, std::int32_t* sending,
                            Reached& reached) {
  const CudaTopology& topology = p.view.topology;
  const bool apart = sends_apart(p);
  TokenSender sender(p, pipe);
  const auto send_own_rows = [&] {
    sender.choose(Rows::own);
    Claims claims(&p.view.state->claims[kOwnClaims]);
    sender.send_claimed(claims, [](std::int64_t) -> std::uint32_t* { return nullptr; });
  };
  const int senders = apart                      ? kApartSenders
                      : p.row_bytes >= kLargeRow ? kLargeRowSenders
                                                 : kSenders;
  const bool idle = int(threadIdx.x / 32) >= senders;
  if (!sends_to_others(p)) {
    if (!idle) send_own_rows();
    return true;
  }
  int slice = 0;
  const auto go_on_to = [&](int next) {
    for (; slice < next; ++slice) pipe.mark(sending[slice], slice);
  };
  if (idle) {
    go_on_to(p.slices);
    return true;
  }
  if (apart) sender.choose(Rows::of_others);
  Claims claims(&p.view.state->claims[kSendClaims]);
  std::int64_t claim = sender.send_claimed(claims, [&](std::int64_t token) {
    go_on_to(slice_of(token, p));
    return kBeside == Beside::takes ? reached[slice] : nullptr;
  });
  if (apart) {
    go_on_to(p.slices);
    send_own_rows();
    return true;
  }
  go_on_to(p.slices - 1);
  const int others = topology.nodes - 1;
  std::int64_t most_tokens = 0;
  for (int node = 0; node < topology.nodes; ++node) {
    const std::int64_t tokens = p.tables.tokens[topology.rank_at(node, topology.local)];
    if (node != topology.node) most_tokens = max(most_tokens, tokens);
  }
  const std::int64_t round = kChunkTokens * others;  // a chunk of every other node
  const std::int64_t end = p.tokens + ceil_div(most_tokens, kChunkTokens) * round;
  for (; claim < end; claim = claims.next()) {
    const std::int64_t forward = claim - p.tokens, in_round = forward % round;
    const int step = others - static_cast<int>(in_round / kChunkTokens);
    const int from = (topology.node + step) % topology.nodes;
    const std::int64_t tokens = p.tables.tokens[topology.rank_at(from, topology.local)];
    const std::int64_t token = forward / round * kChunkTokens + in_round % kChunkTokens;
    if (token < tokens && !sender.send_forward(from, token, tokens)) return false;
  }
  go_on_to(p.slices);
  return true;
}

// Tokens of one source whose rows are repeated under one claim: first those of this node's ranks in
// kSlices equal parts, then those of other nodes, which their rail's ranks here pass on last.
class RepeatPlan {
 public:
  static constexpr int kTokens = 8;
  struct Item {
    int source, slice;
    std::int64_t begin, end;  // tokens
  };

  __device__ explicit RepeatPlan(const MoveParams& p)
      : p_(p),
        topology_(p.view.topology),
        mates_(topology_.locals - 1),
        part_items_(ceil_div<std::int64_t>(p.max_tokens / kSlices + 1, kTokens)),
        rank_items_(ceil_div<std::int64_t>(p.max_tokens, kTokens)) {}

  __device__ std::int64_t of_node() const { return kSlices * mates_ * part_items_; }
  __device__ std::int64_t items() const {
    return of_node() + (topology_.nodes - 1) * mates_ * rank_items_;
  }
  __device__ Item item(std::int64_t i) const {
    Item item;
    const bool here = i < of_node();
    if (!here) i -= of_node();
    // Each part of all mates, before the next part; other nodes' tokens are one part.
    const std::int64_t each = here ? part_items_ : rank_items_;
    const int part = static_cast<int>(i / (mates_ * each));
    const int mate = static_cast<int>(i / each % mates_);
    const int node = here ? topology_.node : (topology_.node + 1 + part) % topology_.nodes;
    item.source = topology_.rank_at(node, (topology_.local + 1 + mate) % topology_.locals);
    item.slice = here ? part : kSlices - 1;
    const std::int64_t tokens = p_.tables.tokens[item.source];
    const std::int64_t first = here ? ceil_div<std::int64_t>(part * tokens, kSlices) : 0;
    const std::int64_t last = here ? ceil_div<std::int64_t>((part + 1) * tokens, kSlices) : tokens;
    item.begin = min(first + i % each * kTokens, last);
    item.end = min(item.begin + kTokens, last);
    return item;
  }

 private:
  const MoveParams& p_;
  const CudaTopology& topology_;
  std::int64_t mates_, part_items_, rank_items_;
};

// Makes the further rows of a token from the one at `from`. `copy` is this lane's row, -1: none. By
// a warp.
__device__ __forceinline__ void repeat_row(const MoveParams& p, RowPipe& pipe, std::int64_t from,
                                           std::int64_t copy) {
  const int lane = threadIdx.x % 32, local = p.view.topology.local;
  std::byte* payload = p.payload.data[local];
  const bool further = copy >= 0 && copy != from;
  pipe.send(payload + from * p.row_bytes, p.row_bytes, 0, further, payload + copy * p.row_bytes);
  if (p.scale_words == 0) return;
  auto* scales = reinterpret_cast<std::uint32_t*>(p.row_scales.data[local]);
  for (unsigned lanes = __ballot_sync(kFullWarp, further); lanes != 0; lanes &= lanes - 1) {
    const std::int64_t to = __shfl_sync(kFullWarp, copy, __ffs(lanes) - 1);
    for (int i = lane; i < p.scale_words; i += 32) {
      scales[to * p.scale_words + i] = __ldcg(&scales[from * p.scale_words + i]);
    }
  }
}

// A repeating warp: the tokens of each slice when their rank has written it. False: it has not.
__device__ bool repeat_rows(const MoveParams& p, RowPipe& pipe) {
  const LayerView& view = p.view;
  const CudaTopology& topology = view.topology;
  const int lane = threadIdx.x % 32, topk = topology.topk;
  const auto* words =
      reinterpret_cast<const std::uint64_t*>(view.control.local + view.control_layout.slices);
  const RepeatPlan plan(p);
  Claims claims(&view.state->claims[kRepeatClaims]);
  claims.begin();
  for (std::int64_t claim = claims.next(); claim < plan.items(); claim = claims.next()) {
    const RepeatPlan::Item item = plan.item(claim);
    const std::int64_t token = item.begin + lane;
    FirstRow found;
    if (token < item.end) {
      found.word = __ldcg(&p.tables.firsts[item.source * p.max_tokens + token]);
    }
    const std::int64_t first = found.has_others() ? found.row() : -1;
    unsigned lanes = __ballot_sync(kFullWarp, first >= 0);
    if (lanes == 0) continue;
    const auto copy_of = [&](unsigned which) {  // this lane's, of the first token of `which`
      const std::int64_t row = which == 0 ? -1 : __shfl_sync(kFullWarp, first, __ffs(which) - 1);
      return row >= 0 && lane < topk ? __ldcg(&p.tables.copies[row * topk + lane]) : -1;
    };
    std::int64_t copy = copy_of(lanes);
    if (!p.fresh) {  // otherwise everything is there
      bool there = true;
      const int from = item.source % topology.locals;
      if (lane == 0) {
        there = wait_at_least(view, words + from, epoch_of(view) * kSlices + item.slice + 1,
                              kRowsPhase, topology.rank_at(topology.node, from));
        device::fence_proxy_async_global();
      }
      if (!__shfl_sync(kFullWarp, there, 0)) return false;
    }
    for (; lanes != 0; lanes &= lanes - 1) {
      const std::int64_t from = __shfl_sync(kFullWarp, first, __ffs(lanes) - 1);
      const std::int64_t this_copy = copy;
      copy = copy_of(lanes & (lanes - 1));
      repeat_row(p, pipe, from, this_copy);
    }
  }
  return true;
}

// What stands beside the rows, to the caller's tables. By a warp.
__device__ __forceinline__ void take_tables(const MoveParams& p, std::int64_t first,
                                            std::int64_t last) {
  const int local = p.view.topology.local, lane = threadIdx.x % 32;
  const auto each = [&](std::int64_t entries, const auto& take) {
    for (std::int64_t i = first * entries + lane; i < last * entries; i += 32) take(i);
  };
  if (p.taken.ids != nullptr) {
    const auto* ids = reinterpret_cast<const std::int32_t*>(p.ids.data[local]);
    each(p.view.topology.topk, [&](std::int64_t i) { p.taken.ids[i] = __ldcg(&ids[i]); });
  }
  if (p.taken.weights != nullptr) {
    each(p.view.topology.topk, [&](std::int64_t i) {
      store_bits(p.taken.weights, i, p.weight_dtype,
                 load_bits(p.row_weights.data[local], i, p.weight_dtype));
    });
  }
  if (p.taken.scales != nullptr) {
    const auto* scales = reinterpret_cast<const std::uint32_t*>(p.row_scales.data[local]);
    each(p.scale_words, [&](std::int64_t i) { p.taken.scales[i] = __ldcg(&scales[i]); });
  }
}

// A taking warp: other ranks' rows, to `out` as they come. False: they do not.
__device__ bool take_rows(const MoveParams& p, RowPipe& pipe) {
  constexpr int kTogether = 2;  // rows of one claim
  const LayerView& view = p.view;
  const CudaTopology& topology = view.topology;
  const std::int32_t* const begins = p.tables.source_begins;
  const int lane = threadIdx.x % 32, mates = topology.locals - 1;
  std::int32_t most = 0;
  for (int rank = 0; rank < topology.world; ++rank) {
    if (rank != topology.rank) most = max(most, begins[rank + 1] - begins[rank]);
  }
  const auto* words =
      reinterpret_cast<const std::uint64_t*>(view.control.local + view.control_layout.sent);
  const std::int64_t items = mates * ceil_div<std::int64_t>(most, kTogether);
  Claims claims(&view.state->claims[kRepeatClaims]);
  claims.begin();
  for (std::int64_t claim = claims.next(); claim < items; claim = claims.next()) {
    const int from = int((topology.local + 1 + claim % mates) % topology.locals);
    const int source = topology.rank_at(topology.node, from);
    const std::int64_t first = begins[source] + claim / mates * kTogether;
    const std::int64_t last = min(first + kTogether, std::int64_t(begins[source + 1]));
    if (first >= last) continue;
    bool there = true;
    if (lane == 0) {
      const std::uint64_t epoch = epoch_of(view);
      const auto below = std::uint32_t(last);
      there = wait_until(
          view, words + from,
          [&](std::uint64_t seen) { return RowsSent::cover(seen, epoch, below); },
          RowsSent::pack(epoch, below), kRowsPhase, source);
      device::fence_proxy_async_global();
    }
    if (!__shfl_sync(kFullWarp, there, 0)) return false;
    for (std::int64_t row = first; row < last; ++row) {
      pipe.send(p.payload.data[topology.local] + row * p.row_bytes, p.row_bytes, 0, lane == 0,
                p.out + row * p.out_stride);
    }
    take_tables(p, first, last);
  }
  return true;
}

// The rows of this rank that no token has: padding behind each expert's rows, and in the worst case
// what follows the last row, of which only the small tables are cleared. All sending warps.
__device__ void clear_rows(const MoveParams& p) {
  const CudaTopology& topology = p.view.topology;
  const int local = topology.local, topk = topology.topk;
  const std::int64_t thread = blockIdx.x * (32 * kSenders) + threadIdx.x;
  const std::int64_t threads = gridDim.x * (32 * kSenders);
  // Each entry of a table of `entries` for each row.
  const auto fill = [&](std::int64_t begin, std::int64_t end, std::int64_t entries,
                        const auto& write) {
    for (std::int64_t i = begin * entries + thread; i < end * entries; i += threads) write(i);
  };
  std::byte* const weights =
      p.taken.weights != nullptr ? p.taken.weights : p.row_weights.data[local];
  std::int32_t* const ids =
      p.taken.ids != nullptr ? p.taken.ids : reinterpret_cast<std::int32_t*>(p.ids.data[local]);
  const auto clear_small = [&](std::int64_t begin, std::int64_t end) {
    if (p.weights_travel) {
      fill(begin, end, p.token_major ? topk : 1,
           [&](std::int64_t i) { store_bits(weights, i, p.weight_dtype, 0); });
    }
    if (p.token_major) {
      fill(begin, end, topk, [&](std::int64_t i) { ids[i] = -1; });
    }
    if (p.fresh && !p.token_major) {
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

// Uses read(i) of the numbers i from `first` on, `step` apart, below `end`: as use(i, read(i)),
// when several loads have been begun that do not wait for each other.
template <class Read, class Use>
__device__ __forceinline__ void read_ahead(std::int64_t first, std::int64_t end, std::int64_t step,
                                           const Read& read, const Use& use) {
  constexpr int kTogether = 4;
  for (; first < end; first += kTogether * step) {
    decltype(read(first)) values[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i * step < end) values[i] = read(first + i * step);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i * step < end) use(first + i * step, values[i]);
    }
  }
}

// The tables of this rank's rows, when all of them are there. All sending warps of all blocks.
__device__ void fill_tables(const MoveParams& p) {
  const CudaTopology& topology = p.view.topology;
  const int local = topology.local, topk = topology.topk;
  const std::int64_t thread = blockIdx.x * (32 * kSenders) + threadIdx.x;
  const std::int64_t threads = gridDim.x * (32 * kSenders);
  if (p.fresh && p.token_major) {
    const std::int64_t covered = p.tables.wanted[topology.rank];
    const auto* ids = reinterpret_cast<const std::int32_t*>(p.ids.data[local]);
    const PairLane pair(topk, static_cast<int>(threadIdx.x % 32));
    const std::int64_t first = thread / 32 * pair.tokens + pair.slot;
    read_ahead(
        pair.used ? first : p.rows, p.rows, threads / 32 * pair.tokens,
        [&](std::int64_t row) { return __ldcg(&ids[row * topk + pair.k]); },
        [&](std::int64_t row, std::int32_t id) {
          p.tables.copies[row * topk + pair.k] = id >= 0 ? row : -1;
          if (pair.k == 0) p.tables.first_copies[row] = row < covered ? row : -1;
        });
  } else if (p.fresh) {
    const auto* sources = reinterpret_cast<const int4*>(p.row_sources.data[local]);
    read_ahead(
        thread, p.rows, threads, [&](std::int64_t row) { return __ldcg(&sources[row]); },
        [&](std::int64_t row, int4 read) {
          const RowSource source{read.x, read.y, read.z, read.w};
          p.tables.first_copies[row] = source.rank < 0 ? -1 : source.first;
          if (source.rank < 0) return;
          p.tables.copies[std::int64_t(source.first) * topk + source.k] = row;
          // This rank passes on, and reduces, the tokens of its own rail.
          if (source.rank % topology.locals != local) {
            atomicMax(&p.tables.firsts[source.rank * p.max_tokens + source.token],
                      FirstRow::pack(source.first, source.first == row));
          }
        });
  }
  for (std::int64_t row = thread; p.weights_of_rows != nullptr && row < p.rows; row += threads) {
    p.weights_of_rows[row] =
        to_float(p.weight_dtype, load_bits(p.row_weights.data[local], row, p.weight_dtype));
  }
  if (p.fresh && thread == 0) *p.tables.placed = 1;
}

// Named barriers: of the sending warps; of these and of those that take when all is sent.
constexpr int kSendersBarrier = 1, kSentBarrier = 2;

// The sending warps of a block: whether all of them say so.
__device__ __forceinline__ bool all_senders(bool mine) {
  return device::barrier_red_and<32 * kSenders>(kSendersBarrier, mine);
}

// What the sending warps do behind their tokens, if `all` of them came. A new routing makes the
// tables of its rows and repeats rows. In any case the kernel ends when this rank's rows are there.
__device__ void finish(const MoveParams& p, RowPipe& pipe, bool all) {
  if (!p.fresh && p.weights_of_rows == nullptr) {
    if (all && blockIdx.x == 0 && threadIdx.x < 32) wait_for_node(p.view, kRowsPhase);
    return;
  }
  if (all && threadIdx.x < 32) all = wait_for_node(p.view, kRowsPhase);
  if (!all_senders(all)) return;
  fill_tables(p);
  if (!p.fresh || p.token_major || !meet_blocks(p.view, all_senders)) return;
  device::fence_proxy_async_global();
  repeat_rows(p, pipe);
}

// Slice `slice` of this rank's tokens has been sent, or behind the last one all: what the others
// learn of it. One thread of each block that sends them. What the last block has reached is told,
// of all that it knows at least to be there.
template <Beside kBeside>
__device__ void signal_sent(const MoveParams& p, int slice, const Reached& reached) {
  const LayerView& view = p.view;
  const bool sent = slice == p.slices;
  const std::uint64_t epoch = epoch_of(view);
  std::uint64_t* const arrivals =
      sent ? &view.state->arrivals[kMoveDone] : &view.state->slice_arrivals[slice];
  if (!last_to_signal(arrivals, sent ? gridDim.x : p.senders)) return;
  for (int to = 0; to < view.topology.locals; ++to) {
    if (kBeside == Beside::takes) {
      std::uint32_t below = sent ? UINT32_MAX : 0;
      for (int i = 0; i <= slice && !sent; ++i) below = max(below, reached[i][to]);
      signal(view, to, view.control_layout.sent, RowsSent::pack(epoch, below));
    } else if (!sent) {
      signal(view, to, view.control_layout.slices, epoch * kSlices + slice + 1);
    }
    if (sent) signal(view, to, view.control_layout.done, epoch);
  }
}

// The marks that the storing thread of a block has reached, for the warp that tells of them: a
// fence would hold up the stores. Shared memory; marks come in order.
struct Marks {
  static constexpr std::uint32_t kOver = 1u << 31;
  std::uint32_t reached;  // 1 + the last one; with kOver no more will be
};

// One thread. Where something has not come not all marks do.
template <Beside kBeside>
__device__ void signal_marks(const MoveParams& p, const Marks& marks, const Reached& reached) {
  const auto sent = std::uint32_t(p.slices);
  for (std::uint32_t signalled = sends_to_others(p) ? 0 : sent; signalled <= sent;) {
    const std::uint32_t now = device::ld_acquire_cta_shared(&marks.reached);
    for (; signalled < (now & ~Marks::kOver); ++signalled) {
      if (runs(p.view)) signal_sent<kBeside>(p, int(signalled), reached);
    }
    if ((now & Marks::kOver) != 0) break;
  }
}

// A repeated expert-major routing has warps that repeat rows while others send; a token-major one
// with copy_out, new or repeated, such that take rows; both one that tells.
template <Beside kBeside>
constexpr int kProducers = kSenders + kOthers<kBeside>;
template <Beside kBeside>
constexpr int kMoveWarps = kProducers<kBeside> + (kBeside == Beside::nothing ? 1 : 2);

template <Beside kBeside>
__global__ __launch_bounds__(32 * kMoveWarps<kBeside>,
                             1) void move(const __grid_constant__ MoveParams p,
                                          const __grid_constant__ PipeShape shape) {
  std::byte* const stages = device::dynamic_shared<128>();
  WINNOW_BLOCK_SHARED(shared, RowPipe::Shared);
  WINNOW_BLOCK_SHARED(sending, std::int32_t[kMostSlices + 1]);
  WINNOW_BLOCK_SHARED(reached, Reached);
  WINNOW_BLOCK_SHARED(marks, Marks);
  RowPipe pipe(shared, stages, shape);
  if (threadIdx.x == 0) {
    pipe.begin(kProducers<kBeside>);
    marks.reached = 0;
  }
  if (threadIdx.x <= kMostSlices) sending[threadIdx.x] = kSenders;
  constexpr int kReached = kBeside == Beside::takes ? kMostSlices * kMaxLocals : 0;
  for (int i = threadIdx.x; i < kReached; i += blockDim.x) {
    reached[i / kMaxLocals][i % kMaxLocals] = 0;
  }
  device::wait_for_kernel_before();
  if (__syncthreads_or(!goes_on(p))) return;  // all of the block or none
  const int warp = threadIdx.x / 32;
  const bool sends = warp < kSenders;
  if (warp < kProducers<kBeside>) {
    bool all = true;
    if (sends) {
      all = send_tokens<kBeside>(p, pipe, sending, reached);
      clear_rows(p);
      // Not where something has not come, which is a fault that every wait learns of.
      if (all) pipe.mark(sending[p.slices], p.slices);
    }
    if constexpr (kBeside == Beside::repeats) {
      if (!sends) repeat_rows(p, pipe);
    }
    if constexpr (kBeside == Beside::takes) {
      // A block that sends to other ranks only takes rows when it has sent all, since both go
      // through the same stages.
      if (sends_apart(p) && sends_to_others(p)) {
        device::bar_sync<32 * kProducers<kBeside>>(kSentBarrier);
      }
      if (!sends && p.out != nullptr) take_rows(p, pipe);
    }
    if (sends) finish(p, pipe, all);
    pipe.end();
  } else if (threadIdx.x % 32 == 0) {
    if (kBeside == Beside::nothing) {
      pipe.store([&](int mark) {
        if (runs(p.view)) signal_sent<kBeside>(p, mark, reached);
      });
    } else if (warp == kProducers<kBeside>) {
      std::uint32_t so_far = 0;
      pipe.store([&](int mark) {
        so_far = std::uint32_t(mark) + 1;
        device::st_release_cta_shared(&marks.reached, so_far);
      });
      device::st_release_cta_shared(&marks.reached, so_far | Marks::kOver);
    } else {
      signal_marks<kBeside>(p, marks, reached);
    }
  }
}

// Of so many blocks. Ten of 24 fill the links with large rows when they send nothing else; where
// ranks share a GPU there are none. With fewer than 20 it is the blocks that are short of time, and
// with small rows the storing thread: then each does all.
int senders_of(const MoveParams& params, int blocks) {
  constexpr int kLeastBlocks = 20, kMostSenders = 12;
  constexpr std::int64_t kLeastRow = 8192;  // bytes
  const CudaTopology& topology = params.view.topology;
  const bool apart = params.token_major && topology.nodes == 1 && topology.locals > 1 &&
                     !params.shares_gpu && blocks >= kLeastBlocks && params.row_bytes >= kLeastRow;
  if (!apart) return blocks;
  return params.takes ? std::min((3 * blocks + 3) / 7, kMostSenders) : blocks / 2;
}

// Telling the others takes 2.6 us, so what is sent meanwhile should take longer.
int slices_of(const MoveParams& params, int blocks) {
  if (!params.takes) return params.fresh || params.token_major ? 0 : kSlices;
  constexpr std::int64_t kSliceBytes = 4'500'000;
  const std::int64_t most = params.senders < blocks ? kMostSlices : kSlices;
  return int(std::clamp<std::int64_t>(params.tokens * params.row_bytes / kSliceBytes, 1, most));
}

template <Beside kBeside>
int launch(const MoveParams& params, int blocks, void* stream) {
  static_assert(kProducers<kBeside> < kLeastStages<kBeside>);
  const PipeShape shape(params.row_bytes, kLeastStages<kBeside>);
  return device::launch_early(move<kBeside>, blocks, 32 * kMoveWarps<kBeside>, shape.bytes(),
                              static_cast<cudaStream_t>(stream), params, shape);
}

}  // namespace

int launch_move(MoveParams params, int blocks, void* stream) {
  params.senders = senders_of(params, blocks);
  params.slices = slices_of(params, blocks);
  if (params.takes) return launch<Beside::takes>(params, blocks, stream);
  if (!params.fresh && !params.token_major) return launch<Beside::repeats>(params, blocks, stream);
  return launch<Beside::nothing>(params, blocks, stream);
}

int load_move() {
  for (const auto kernel : {move<Beside::nothing>, move<Beside::repeats>, move<Beside::takes>}) {
    if (const int status = device::load_kernel(kernel, int(PipeShape::kBytes));
        status != cudaSuccess) {
      return status;
    }
  }
  return cudaSuccess;
}

}  // namespace winnow::expert_parallel
