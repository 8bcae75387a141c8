// Top-k sparse MLA attention, forward, sm90: the kernel. Its items are (query, 64 heads); the third
// warpgroup copies the chosen rows by cp.async. The consumers are those of attention_sm90.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "winnow/sparse_mla/attention_sm90.cuh"
#include "winnow/sparse_mla/entry_order_sm90.cuh"
#include "winnow/sparse_mla/forward/forward_turns_sm90.cuh"
#include "winnow/sparse_mla/lse.cuh"
#include "winnow/sparse_mla/two_sources_sm90.cuh"

namespace winnow::sparse_mla::forward_sm90_detail {

// 216 + 216 + 72 registers on 3 x 128 threads are 64512 of the 65536.
inline constexpr int kGatherRegisters = 72;

struct KernelParams {
  GatherView kv;
  const char* q;
  std::int64_t q_stride0, q_stride1;  // bytes
  char* out;
  std::int64_t out_stride0, out_stride1;  // bytes
  float* max_logits;                      // may be null
  std::int64_t max_logits_stride0, max_logits_stride1;
  float* lse;  // may be null
  std::int64_t lse_stride0, lse_stride1;
  const float* attn_sink;  // may be null
  std::int64_t attn_sink_stride;
  LogitScale scale;
  int h_q;
  std::uint32_t head_blocks;  // s_q * head_blocks items, at most 2^30
  Rounds rounds;
  char* handed;          // handed_bytes() where parts of items are handed on
  RangeView ranges;      // of a dense problem
  int order_shift;       // of ordered entries: their ranges have 2^order_shift rows
  bool prefetch;         // rows of the next tile are asked for
  float lse_of_nothing;  // in the place of -inf
};

// The entries of a query: those of its list, as they are listed or put in order by ranges of rows,
// or in a dense problem its range of rows; or those of two sources.
enum class Entries { listed, ordered, range, two };

struct TwoParams : KernelParams {
  TwoSources sources;
};
template <Entries kEntries>
using ParamsOf = std::conditional_t<kEntries == Entries::two, TwoParams, KernelParams>;

// Shared memory: behind what attention_sm90.cuh has, the entries of a query in order. These and a
// place for P alone are too much for one block. kAsDecode: P has none either, as in decode, since
// the place decides where the products of a logit begin (group_in_order()), and so its last bits.
template <int kDim, Entries kEntries, bool kAsDecode>
using PlanOf = Plan<kDim, kDim == 576 && kEntries != Entries::ordered && !kAsDecode>;
template <class P>
inline constexpr int kSegment = (P::kBytes + 15) / 16 * 16;
template <Entries kEntries, class P>
inline constexpr int kTurns =
    kSegment<P> + (kEntries == Entries::ordered ? static_cast<int>(sizeof(EntrySegment)) : 0);
template <int kDim, Entries kEntries, bool kAsDecode>
inline constexpr int kSharedBytes =
    kTurns<kEntries, PlanOf<kDim, kEntries, kAsDecode>> + static_cast<int>(sizeof(Turns));
static_assert(kSharedBytes<576, Entries::listed, false> <= 232448);
static_assert(kSharedBytes<576, Entries::ordered, false> <= 232448);

// What is loaded of a query a turn ahead: how many entries it has; of two sources their limits.
template <Entries kEntries>
__device__ __forceinline__ int load_count(const ParamsOf<kEntries>& params, std::int64_t query,
                                          int lane) {
  if constexpr (kEntries == Entries::two) {
    return load_limits(params.sources, query, lane);
  } else if constexpr (kEntries == Entries::range) {
    const QueryRange range = query_range(params.kv, params.ranges, query);
    return range.end - range.begin;
  } else {
    return query_entries(params.kv, query);
  }
}

// The `count` entries of a query: where they come from, and below which row they are visible. The
// same as QueryEntries, of one source.
template <Entries kEntries>
struct OneSource {
  using Row = std::conditional_t<kEntries == Entries::range, RowEntries, const std::int32_t*>;
  static __device__ __forceinline__ Row row_of(const KernelParams& params, std::int64_t query) {
    if constexpr (kEntries == Entries::range) {
      const int begin = query_range(params.kv, params.ranges, query).begin;
      return RowEntries{begin, begin};
    } else {
      return params.kv.indices + query * params.kv.indices_stride;
    }
  }
  static __device__ __forceinline__ std::uint32_t visible_of(const KernelParams& params,
                                                             std::int64_t query) {
    if constexpr (kEntries == Entries::range) {
      return query_range(params.kv, params.ranges, query).end;
    } else {
      return visible_rows(params.kv, query);
    }
  }
  __device__ __forceinline__ OneSource(const KernelParams& params, std::int64_t query, int count)
      : params(params),
        row(row_of(params, query)),
        limit(visible_of(params, query)),
        count(count) {}

  __device__ __forceinline__ int tiles() const { return tile_count(count); }
  __device__ __forceinline__ TileEntries load(int tile, int lane) const {
    return load_tile(row, tile, count, lane);
  }
  __device__ __forceinline__ std::uint32_t visible(int) const { return limit; }
  __device__ __forceinline__ const GatherView& rows(int) const { return params.kv; }

  const KernelParams& params;
  Row row;
  std::uint32_t limit;
  int count;
};
template <Entries kEntries>
__device__ __forceinline__ auto entries_of_query(const ParamsOf<kEntries>& params,
                                                 std::int64_t query, int count) {
  if constexpr (kEntries == Entries::two) {
    return QueryEntries(params.sources, query, count);
  } else {
    return OneSource<kEntries>(params, query, count);
  }
}
// A tile of them alone.
template <Entries kEntries>
__device__ __forceinline__ TileEntries load_tile_of(const ParamsOf<kEntries>& params,
                                                    std::int64_t query, int count, int tile,
                                                    int lane) {
  if constexpr (kEntries == Entries::two) {
    return QueryEntries(params.sources, query, count).load(tile, lane);
  } else {
    return load_tile(OneSource<kEntries>::row_of(params, query), tile, count, lane);
  }
}

// --- gather warpgroup ---------------------------------------------------------------------------

// Asks L2 for the queries of an item that comes later.
template <int kDim>
__device__ __forceinline__ void prefetch_queries(const KernelParams& params, std::uint32_t item,
                                                 int thread) {
  const int head = static_cast<int>(item % params.head_blocks) * kHeads + thread;
  if (thread >= kHeads || head >= params.h_q) return;
  bulk_prefetch_l2(
      params.q + item / params.head_blocks * params.q_stride0 + head * params.q_stride1, kDim * 2);
}

// Asks L2 for rows of the next tile, before their places are free. A block and its neighbour, which
// has the query's other 64 heads, gather the same rows by four warps each: a block asks for half of
// them, a warp for a quarter of that half.
template <int kDim>
__device__ __forceinline__ void prefetch_rows(const KernelParams& params,
                                              const TileEntries& entries, int thread) {
  const std::int32_t entry = blockIdx.x & 1 ? entries.high : entries.low;
  const bool mine = ((thread ^ thread >> 5) & 3) == 0;
  if (!mine || static_cast<std::uint32_t>(entry) >= params.kv.s_kv) return;
  bulk_prefetch_l2(params.kv.kv + entry * params.kv.kv_stride, kDim * 2);
}

// Runs ahead of the consumers by what the slots allow, into the next item too.
template <Entries kEntries, class P>
__device__ __forceinline__ void gather_role(const ParamsOf<kEntries>& params, const Turns& turns,
                                            P shared) {
  constexpr int kDim = P::kDim;
  constexpr bool kOrdered = kEntries == Entries::ordered;
  const int thread = threadIdx.x - 2 * 128;
  const int lane = thread & 31;
  const std::uint64_t keep = policy_evict_last();
  const std::uint64_t once = policy_evict_first();
  std::uint32_t uses = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses = 0;

  constexpr int kOrderBarrier = 1;
  TileEntries next{-1, -1};  // loaded one tile ahead, where they are not ordered
  bool loaded = false;       // `next` is the first tile of the part that begins
  Part part = turns.part(params.rounds, 0);
  int count = load_count<kEntries>(params, part.item / params.head_blocks, lane);
  for (std::uint32_t turn = 0; turn < turns.count(); ++turn) {
    const std::uint32_t item = part.item;
    const std::int64_t query = item / params.head_blocks;
    const auto entries = entries_of_query<kEntries>(params, query, count);
    const int first = part.first, tiles = min(entries.tiles(), part.end);
    // The length of the next item is loaded long before it is needed.
    const bool goes_on = turn + 1 < turns.count();
    if (goes_on) part = turns.part(params.rounds, turn + 1);
    const std::int64_t next_query = part.item / params.head_blocks;
    count = goes_on ? load_count<kEntries>(params, next_query, lane) : 0;
    const bool looks_ahead = kEntries == Entries::two ? goes_on : count > 0;

    if (!kOrdered && !loaded && first < tiles) next = entries.load(first, lane);
    loaded = false;
    for (int tile = first; tile < tiles; ++tile) {
      if constexpr (kOrdered) {
        const int inside = tile % kSegmentTiles, from = (tile - inside) * kTileRows;
        const int inside_count = min(entries.count - from, kSegmentEntries);
        if (inside == 0) {  // items in order are whole
          order_segment<kOrderBarrier>(shared.base + kSegment<P>, entries.row + from, inside_count,
                                       params.order_shift, thread);
        }
        next = load_ordered_tile(shared.base + kSegment<P>, inside, inside_count, lane);
      }
      const std::uint64_t mask = tile_mask(next, entries.visible(tile));
      const GatherRows rows = gather_rows(entries.rows(tile), next, mask, thread);
      if (!kOrdered && tile + 1 < tiles) {
        next = entries.load(tile + 1, lane);
      } else if (!kOrdered && looks_ahead) {
        next = load_tile_of<kEntries>(params, next_query, count, part.first, lane);
        loaded = true;
      }
      if (tile % 2 == 0) {  // the parts of an item begin with even tiles
        load_tile_rows<0>(shared, uses & 1, rows, mask, thread, keep);
        uses ^= 1;
      } else {
        load_tile_rows<1>(shared, uses >> 1, rows, mask, thread, keep);
        uses ^= 2;
      }
      if (kEntries == Entries::listed && params.prefetch && (loaded || tile + 1 < tiles)) {
        prefetch_rows<kDim>(params, next, thread);
      }
      if (tile == first) {
        // After the first tile, not before: its slot is free before the last logits of the item
        // before.
        shared.q_free().wait((q_uses & 1) ^ 1, "gather", 0);
        const int first_head = static_cast<int>(item % params.head_blocks) * kHeads;
        const GatherRows heads =
            head_rows(params.q + query * params.q_stride0, params.q_stride1, first_head, thread,
                      [&](int, int head) { return head < params.h_q; });
        load_queries(shared, heads, thread, once);
        ++q_uses;
        if (goes_on) prefetch_queries<kDim>(params, part.item, thread);
      }
    }
  }
}

// --- consumers ---------------------------------------------------------------------------------

// Writes the consumer's half of the item's output, and lse (consumer 0) or max_logits (consumer 1).
template <int kConsumer>
__device__ __forceinline__ void store_item(const KernelParams& params, std::uint32_t item, int warp,
                                           int lane, const RowState& state, const Output& o) {
  const std::int64_t query = item / params.head_blocks;
  const int first_head = static_cast<int>(item % params.head_blocks) * kHeads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head + 16 * warp + lane / 4 + 8 * r;
    const bool exists = head < params.h_q;
    float sink = negative_infinity();
    if (params.attn_sink != nullptr && exists) {
      sink = __fmul_rn(__ldg(params.attn_sink + head * params.attn_sink_stride), kLog2e);
    }
    const float factor = output_factor(state.sum[r], state.reference[r], sink);
    if (exists && (lane & 3) == 0) {
      if (kConsumer == 0 && params.lse != nullptr) {
        params.lse[query * params.lse_stride0 + head * params.lse_stride1] =
            lse_of(state.reference[r], state.sum[r], params.lse_of_nothing);
      }
      if (kConsumer == 1 && params.max_logits != nullptr) {
        params.max_logits[query * params.max_logits_stride0 + head * params.max_logits_stride1] =
            state.top[r] * kLn2;
      }
    }
    store_output_row<kConsumer>(params.out + query * params.out_stride0 + head * params.out_stride1,
                                exists, r, factor, lane, o);
  }
}

// The turns of the block, as consumer_role() wants them.
template <Entries kEntries>
struct Work {
  const ParamsOf<kEntries>& params;
  const Turns& turns;

  __device__ __forceinline__ Part part(std::uint32_t turn) const {
    return turns.part(params.rounds, turn);
  }
  __device__ __forceinline__ int load(std::uint32_t turn, int lane) const {
    return load_count<kEntries>(params, part(turn).item / params.head_blocks, lane);
  }
  // Of the item, of which load() has given `count`; of two sources as many as fill their tiles.
  __device__ __forceinline__ int entries(std::uint32_t turn, int count) const {
    if constexpr (kEntries != Entries::two) return count;
    const std::int64_t query = part(turn).item / params.head_blocks;
    return entries_of_query<kEntries>(params, query, count).tiles() * kTileRows;
  }
  __device__ __forceinline__ int tiles(std::uint32_t turn, int entries) const {
    const Part mine = part(turn);
    return max(min(tile_count(entries), mine.end) - mine.first, 0);
  }
  __device__ __forceinline__ bool ends(std::uint32_t turn, int entries) const {
    const Part mine = part(turn);
    const int all = tile_count(entries);
    return all <= mine.end && (all > mine.first || mine.first == 0);
  }
  template <int kConsumer>
  __device__ __forceinline__ void take_over(std::uint32_t turn, int warp, int lane, RowState& state,
                                            Output& o) const {
    if (part(turn).first == 0) return;
    Handed<kConsumer>(params.handed, params.rounds.blocks, blockIdx.x - 1, warp, lane)
        .take(state, o);
  }
  template <int kConsumer>
  __device__ __forceinline__ void hand_on(int warp, int lane, const RowState& state,
                                          const Output& o) const {
    Handed<kConsumer>(params.handed, params.rounds.blocks, blockIdx.x, warp, lane).give(state, o);
  }
  template <int kConsumer>
  __device__ __forceinline__ void store(std::uint32_t turn, int warp, int lane,
                                        const RowState& state, const Output& o) const {
    store_item<kConsumer>(params, part(turn).item, warp, lane, state, o);
  }
};

// --- a consumer's items -------------------------------------------------------------------------

// The role of consumer kConsumer: the block's turns, each an item or a part of one. Where another
// block has made the tiles before, their sums are taken over; where another goes on, handed on. The
// steps of the consumer that owns tile t:
//
//   1. queue the logits Q K(t), group by group as the chunks come
//   2. when P(t-1) is handed over, queue P(t-1) V(t-1) behind them
//   3. with the logits there and while P V runs: mask, maxima, reference
//   4. as P V is done: release this consumer's half of V(t-1), in two parts
//   5. exponentials: P(t)
//   6. queue P(t) V(t), hand P(t) over meanwhile; when it is done release this consumer's half of
//      V(t)
//
// So the exponentials of one consumer run while the other multiplies:
//
//   gather       K(0) Q  K(1)                 K(2)               K(3)               K(4)
//   consumer 0     QK 0 | max | exp | PV 0 |     QK 2 |  PV 1 + max | exp | PV 2 |     QK 4 | ...
//   consumer 1             QK 1 |     PV 0 + max | exp | PV 1 |     QK 3 |  PV 2 + max | exp | ...
template <int kConsumer, class P, Entries kEntries>
__device__ __forceinline__ void consumer_role(const Work<kEntries>& work, const LogitScale& scale,
                                              P shared) {
  constexpr int kOther = 1 - kConsumer;
  const int thread = threadIdx.x & 127;
  const int warp = thread >> 5;
  const int lane = thread & 31;
  std::uint32_t own_uses = 0, other_uses = 0;  // of the slots: the parity of their barriers
  std::uint32_t q_uses = 0;                    // items with tiles

  const auto scores = [&]<int kGroup>(int tile, float(&s)[32]) {
    shared.full()[kConsumer][kGroup].wait(own_uses & 1, "consumer", 10 * kConsumer + kGroup);
    // The queries come between tiles 0 and 1, in groups of the same chunks as those of slot 0; the
    // groups of slot 1 hold other chunks, so consumer 1 waits for all of them.
    if (tile == kConsumer && (kConsumer == 0 || kGroup == P::kFirstGroup)) {
#pragma unroll
      for (int group = P::kApart && kConsumer == 1 ? 0 : kGroup;
           group < (kConsumer == 0 ? kGroup + 1 : P::kAllGroups); ++group) {
        shared.q_full()[group].wait(q_uses & 1, "consumer", 10 * kConsumer + group);
      }
    }
    multiply_scores<kGroup>(shared, kConsumer, s);
  };

  int count = work.load(0, lane);  // a turn ahead
  for (std::uint32_t turn = 0; turn < work.turns.count(); ++turn) {
    const int entries = work.entries(turn, count);
    const int tiles = work.tiles(turn, entries);
    const bool ends = work.ends(turn, entries);
    if (turn + 1 < work.turns.count()) count = work.load(turn + 1, lane);

    RowState state{
        {kNoReference, kNoReference}, {0, 0}, {negative_infinity(), negative_infinity()}};
    Output o;
#pragma unroll
    for (int i = 0; i < 64; ++i) o[0][i] = o[1][i] = 0;
    if (tiles > 0) work.template take_over<kConsumer>(turn, warp, lane, state, o);

    // kBefore: there is a tile before it.
    const auto own_tile = [&]<bool kBefore>(int tile) {
      float s[32];
      std::uint32_t p[16];
      if constexpr (P::kApart) scores.template operator()<kRopeGroup>(tile, s);
      scores.template operator()<0>(tile, s);
      scores.template operator()<1>(tile, s);
      scores.template operator()<2>(tile, s);
      scores.template operator()<3>(tile, s);
      const auto mask = shared.mask()[kConsumer].load();
      // Whether all logits count as they are: known before they come, since loads take long while
      // products run.
      const bool plain = ~mask == 0 && scale.sign == 1.0f;
      if constexpr (kBefore) {
        multiply_other_values<true>(shared, kConsumer, other_uses & 1, warp, lane, state, o);
        ++other_uses;
      }
      wgmma_wait<kBefore ? 2 : 0>();  // the logits are there; P V may still run
      wgmma_pin(s);
      if constexpr (P::kApart) {
        shared.empty()[kConsumer][kRopeGroup].arrive_warp();
      }
      if (tile + 2 >= tiles) shared.q_free().arrive_warp();

      if (!plain) hide_logits(scale, mask, lane, s);
      float factors[2];
      // The other slot is released before the exponentials, and the half that P V has left first
      // before the maxima: it is refilled while they are taken.
      if constexpr (kBefore) {
        wgmma_wait<1>();  // the first half of P V
        release_group<2>(shared, kOther);
      }
      float top[2];
      thread_maxima(scale, s, top);
      const bool raised = raise_exceeded(top, state, factors);
      if constexpr (kBefore) {
        wgmma_wait<0>();  // the second half of P V
        release_group<3>(shared, kOther);
        wgmma_pin(o[0]);
        wgmma_pin(o[1]);
      }
      softmax_weights(scale, s, p, state);
      // The other consumer gets P, where it has a place of its own, between the halves of P V of
      // this tile, so that the first half runs while the fence waits for the stores; else behind
      // it, which was measured to be faster with P in the slot.
      const auto store = [&] { store_probabilities(shared, kConsumer, warp, lane, p); };
      const auto hand = [&] { hand_over<true>(shared, kConsumer, warp, lane, state); };
      if (raised) rescale(o, factors);
      if constexpr (P::kApart) store();
      multiply_own_values(shared, kConsumer, p, o, [&] {
        if constexpr (P::kApart) hand();
      });
      if constexpr (!P::kApart) store(), hand();
      release_values<0>(shared, kConsumer, o);
      wgmma_pin(p);
      ++own_uses;
    };
    if constexpr (kConsumer == 0) {
      if (tiles > 0) own_tile.template operator()<false>(0);
    }
    for (int tile = kConsumer == 0 ? 2 : 1; tile < tiles; tile += 2) {
      own_tile.template operator()<true>(tile);
    }
    if (tiles > 0) {
      if (kConsumer == 1 && tiles == 1) shared.q_free().arrive_warp();  // it had no use for Q
      if ((tiles - 1) % 2 != kConsumer) {
        multiply_other_values<true>(shared, kConsumer, other_uses & 1, warp, lane, state, o);
        release_values<2>(shared, kOther, o);
        ++other_uses;
      }
      if (!ends) work.template hand_on<kConsumer>(warp, lane, state, o);
      // From the maxima of threads to those of rows.
      state.top[0] = quad_max(state.top[0]);
      state.top[1] = quad_max(state.top[1]);
      merge_consumers<true>(shared, kConsumer, q_uses & 1, warp, lane, state);
      ++q_uses;
    }
    if (ends) work.template store<kConsumer>(turn, warp, lane, state, o);
  }
}

template <int kDim, Entries kEntries, bool kAsDecode>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ParamsOf<kEntries> params) {
  using P = PlanOf<kDim, kEntries, kAsDecode>;
  std::byte* const memory = dynamic_shared<1024>();
  const P shared{shared_address(memory)};
  Turns& turns = *reinterpret_cast<Turns*>(memory + kTurns<kEntries, P>);
  if (threadIdx.x == 0) {
    init_barriers(shared, [](int, int group) { return copied_group_arrivals(group); });
    fence_mbarrier_init();
    turns.plan(params.rounds);
  }
  __syncthreads();

  // Each role is one branch, as setmaxnreg wants it.
  const Work<kEntries> work{params, turns};
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_inc<kConsumerRegisters>();
    consumer_role<0>(work, params.scale, shared);
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kConsumerRegisters>();
    consumer_role<1>(work, params.scale, shared);
  } else {
    setmaxnreg_dec<kGatherRegisters>();
    gather_role<kEntries>(params, turns, shared);
  }
}

}  // namespace winnow::sparse_mla::forward_sm90_detail
