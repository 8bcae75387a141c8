// Top-k sparse MLA attention, backward, sm90: the fused kernel, 64 heads of a query at a time.
//
// A persistent block of two warpgroups takes items (query, 64 heads) in turn. Q and dO of an item
// and one tile of 64 chosen rows stay in shared memory, dQ stays in registers:
//
//   score    S = Q K^T, dP = dO K^T, chunk by chunk as the rows come; P and dS into shared memory;
//            its half of dQ += dS K; copies the rows of the next tile into what dQ is done with,
//            and Q and dO of the next item into what dkv is done with; delta of the next item
//   reduce   its half of dQ += dS K; then in chunks of 64 columns P^T dO + dS^T Q, each added to
//            the f32 accumulator of dkv in memory
//
// Every tile adds 64 rows of 2304 bytes to memory, and those reductions take longer than all the
// products together: the kernel is built to never let them rest. `reduce` has two accumulators, one
// that is multiplied while the other is added to memory, and adds the last chunk of a tile while
// the next P and dS are waited for, or beside their first products. The rows of a tile are free as
// soon as dQ has them, long before its reductions end: the next tile is copied and scored
// meanwhile, and waits in the registers of `score` until P and dS are free.
//
//   score    | dQ (t) | copy (t+1) | S dP P dS (t+1) |  (wait)  | dQ (t+1) | copy (t+2) ...
//   reduce   | dQ (t) |  P^T dO + dS^T Q (t), reductions        | dQ (t+1) | P^T dO + dS^T Q ...
//
// dkv is added to in one of two ways (backward_fused_drain_sm90.cuh). With f32 sums the
// accumulator's columns are permuted within each 16, so that what a thread holds of a row lies
// side by side: columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of lane q of a quad at 4 q. finish_kernel
// (backward_fused_steps_sm90.cuh) brings them in order. The entries of each query
// come ordered by key range and all valid from prepare_kernel; before them come the rows of its
// ranges, where it has some (backward_sources_sm90.cuh).
//
// Q, dO and K are copied by cp.async, and between the copies and wgmma stands nothing but the
// mbarrier on which the copies arrive, as in forward_sm90.cuh: a proxy fence would wait for all the
// copies that the thread has under way. P and dS, which stmatrix writes, do have theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/registers.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/sparse_mla/backward/backward_fused_drain_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_items_sm90.cuh"
#include "winnow/sparse_mla/gather_sm90.cuh"

namespace winnow::sparse_mla::backward_fused_sm90_detail {

using namespace winnow::device;

inline constexpr int kThreads = 256;  // score, reduce: 255 registers each
inline constexpr int kWarps = 4;      // of a warpgroup
inline constexpr int kValueChunks = 8;
// dQ: `score` holds columns 0 to 255 and 512 to 543, `reduce` 256 to 511 and 544 to 575.
inline constexpr int kHalfChunks = 4;
inline constexpr int kRopeColumns = 32;

// Shared memory.
template <int kDim>
struct Layout {
  static constexpr int kChunks = kDim / kChunkColumns;  // of a row: 9 or 8; V is the first 8

  Chunk q[kChunks];
  Chunk d_out[kValueChunks];
  Chunk k[kChunks];
  Chunk p, ds;  // [64 heads][64 rows of the tile]

  // Who arrives -> who waits.
  Barrier k_full[kChunks];  // score's copies -> score
  Barrier q_full[kChunks];  // the same of Q and dO
  Barrier q_free[kChunks];  // reduce -> score, once an item
  Barrier k_free;           // reduce -> score: dQ is done
  Barrier scores;           // score -> reduce: P and dS are there
  Barrier scores_free;      // reduce -> score

  // Rows of the accumulator for the entries of a tile. Those that are not valid have the block's
  // waste row: predicates would cost more than these few additions.
  alignas(16) std::int32_t targets[2][kTileRows];  // [tiles]
  float scales[2][kTileRows];  // of these rows, with integer sums; they come with the tile's rows
  alignas(16) TailItem tail[2];
  float delta[kHeads];  // of the next item
};

template <int kDim>
struct Plan : Shared<Layout<kDim>> {
  static_assert(kDim == 576 || kDim == 512);
  using Memory = Layout<kDim>;
  static constexpr int kChunks = Memory::kChunks;
  static_assert(offsetof(Memory, k_full) % 1024 == 0, "only chunks stand before the barriers");
  static_assert(sizeof(Memory) <= 232448, "227 KB is what a block can have");

  WINNOW_PLACE(q)
  WINNOW_PLACE(d_out)
  WINNOW_PLACE(k)
  WINNOW_PLACE(p)
  WINNOW_PLACE(ds)
  WINNOW_PLACE(k_full)
  WINNOW_PLACE(q_full)
  WINNOW_PLACE(q_free)
  WINNOW_PLACE(k_free)
  WINNOW_PLACE(scores)
  WINNOW_PLACE(scores_free)
  WINNOW_PLACE(targets)
  WINNOW_PLACE(scales)
  WINNOW_PLACE(tail)
  WINNOW_PLACE(delta)
};

// What a thread of `score` knows of its two heads: lane / 4 of the warp's 16, and 8 further.
struct HeadState {
  float lse2[2];  // with the sink, in base 2; +inf where P is 0
  float delta[2];
  bool live[2];  // false: padding, or a sink of +inf; P and dS are 0 whatever Q and K hold
};

template <bool kFixed>
__device__ __forceinline__ bool head_is_live(const KernelParams& params, std::int64_t query,
                                             int head) {
  if constexpr (kFixed) return __ldg(params.lse2 + query * kHeads + head) < infinity();
  if (head >= params.h_q) return false;
  return params.attn_sink == nullptr ||
         __ldg(params.attn_sink + head * params.attn_sink_stride) != infinity();
}

// --- score: copies ------------------------------------------------------------------------------

// Copies chunk `chunk` of 64 heads of Q or dO; heads that are not live become zeros.
__device__ __forceinline__ void copy_heads(const KernelParams& params, std::uint32_t destination,
                                           const char* query, std::int64_t head_stride,
                                           int first_head, std::uint32_t live, int chunk,
                                           int thread, std::uint64_t policy) {
  GatherRows rows;
  rows.valid = live;
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    const std::int64_t head = live >> pass & 1 ? first_head + 16 * pass + thread / 8 : 0;
    rows.source[pass] = query + head * head_stride + (thread & 7) * 16;
  }
  gather_chunk(destination, rows, chunk, thread, policy);
}

// Copies Q and dO of an item; of the item before, `reduce` is done with a chunk when it says so.
template <int kDim, bool kFixed, class Params>
__device__ __forceinline__ void load_heads(const Params& params, Plan<kDim> shared,
                                           std::uint32_t number, std::uint32_t parity, int thread) {
  using P = Plan<kDim>;
  Item item;
  if (!locate(params, shared.tail(), number, item)) return;
  const std::uint64_t policy = policy_evict_first();
  std::uint32_t live = 0;
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    const int head = item.first_head + 16 * pass + thread / 8;
    live |= static_cast<std::uint32_t>(head_is_live<kFixed>(params, item.query, head)) << pass;
  }
#pragma unroll 1
  for (int chunk = 0; chunk < P::kChunks; ++chunk) {
    shared.q_free()[chunk].wait(parity ^ 1, "gather", chunk);
    copy_heads(params, shared.q()[chunk].address, params.q + item.query * params.q_stride0,
               params.q_stride1, item.first_head, live, chunk, thread, policy);
    if (chunk < kValueChunks) {
      copy_heads(params, shared.d_out()[chunk].address,
                 params.d_out + item.query * params.d_out_stride0, params.d_out_stride1,
                 item.first_head, live, chunk, thread, policy);
    }
    shared.q_full()[chunk].arrive_cp_async();
  }
}

// delta = dot(out, d_out) of the item that comes next is formed in 16 steps, between the tiles of
// this one while copies are under way, and waits in shared memory. A quad has two heads; steps
// take 64 columns of the one and of the other in turn.
inline constexpr int kDeltaSteps = 16, kDeltaBatch = 4;

__device__ __forceinline__ Place<float> delta_place(Place<float[kHeads]> deltas, int warp, int lane,
                                                    int r) {
  return deltas[16 * warp + lane / 4 + 8 * r];
}

// Steps [first, first + kSteps) of them, those that there are.
template <int kDim, int kSteps, class Params>
__device__ __forceinline__ void add_to_delta(const Params& params, Plan<kDim> shared,
                                             std::uint32_t number, int first, int warp, int lane) {
  if constexpr (kHasRanges<Params>) return;  // delta is always there
  using P = Plan<kDim>;
  Item item;
  if (params.delta != nullptr || !locate(params, shared.tail(), number, item)) return;
  uint4 out[kSteps][2], d_out[kSteps][2];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = first + i;
    const int head = item.first_head + 16 * warp + lane / 4 + 8 * (step & 1);
    const bool exists = step < kDeltaSteps && head < params.h_q;
    const int column = step / 2 * 128 + 16 * (lane & 3);  // bytes
    const char* const out_row =
        params.out + item.query * params.out_stride0 + head * params.out_stride1 + column;
    const char* const d_out_row =
        params.d_out + item.query * params.d_out_stride0 + head * params.d_out_stride1 + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      out[i][half] = exists ? load_once(out_row + 64 * half) : uint4{};
      d_out[i][half] = exists ? load_once(d_out_row + 64 * half) : uint4{};
    }
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = first + i;
    float sum = quad_sum(dot_bf16x8(out[i][0], d_out[i][0]) + dot_bf16x8(out[i][1], d_out[i][1]));
    if ((lane & 3) != 0 || step >= kDeltaSteps) continue;
    const Place<float> at = delta_place(shared.delta(), warp, lane, step & 1);
    if (step >= 2) sum += at.load();
    at.store(sum);
  }
}

// Where the entries of an item's next tile are.
template <class Params>
struct ListPlace {
  const std::int32_t* list;  // the first of them

  __device__ __forceinline__ void begin(const Params& params, const Item& item) {
    list = params.kv.indices + item.query * params.kv.indices_stride + item.first_tile * kTileRows;
  }
  __device__ __forceinline__ void advance() { list += kTileRows; }
  __device__ __forceinline__ auto entries(const Params&, int) const {
    return [from = list](int row, bool counts) { return counts ? __ldg(from + row) : -1; };
  }
};
// With ranges, which are looked at anew for each tile: registers are scarce.
template <class Params>
struct RangePlace {
  std::uint32_t query;

  __device__ __forceinline__ void begin(const Params&, const Item& item) { query = item.query; }
  __device__ __forceinline__ void advance() {}
  // `left` of the query's entries are those from the tile on.
  __device__ __forceinline__ auto entries(const Params& params, int left) const {
    const RangedEntries rows(params.query_ranges + query,
                             params.kv.indices + query * params.kv.indices_stride);
    return [rows, first = query_entries(params.kv, query) - left](int row, bool counts) {
      return rows.load(first + row, counts);
    };
  }
};

// Copies the rows of one tile after the other, in the order of the products and a tile ahead.
template <int kDim, bool kFixed, class Params>
struct Gather {
  using P = Plan<kDim>;
  using EntryPlace = std::conditional_t<kHasRanges<Params>, RangePlace<Params>, ListPlace<Params>>;

  const Params& params;
  const P shared;
  const int thread = threadIdx.x & 127;
  // The tile that is copied next.
  std::uint32_t number = 0;          // of its item
  int left = 0;                      // tiles of the item from this one on; 0: there is none
  int entries = 0;                   // the same of entries
  bool first = true;                 // it is the first of its item
  EntryPlace place;                  // of its entries
  std::int32_t next[kGatherPasses];  // the entries that this thread copies; -1: past the last
  GatherRows rows;

  __device__ __forceinline__ Gather(const Params& kernel_params, P shared_memory)
      : params(kernel_params), shared(shared_memory) {
    find();
    fetch();
  }

  // The first item from `number` on that has tiles.
  __device__ __forceinline__ void find() {
    Item item;
    for (; locate(params, shared.tail(), number, item); ++number) {
      left = item.end() - item.first_tile;
      if (left <= 0) {
        count_item();
        continue;
      }
      entries = item.entries - item.first_tile * kTileRows;
      place.begin(params, item);
      return;
    }
    left = 0;
  }
  // Loaded by each thread for itself: between the reductions of `reduce`, shuffles take long.
  __device__ __forceinline__ void fetch() {
    if (left == 0) return;
    const auto entry = place.entries(params, entries);
#pragma unroll
    for (int pass = 0; pass < kGatherPasses; ++pass) {
      const int row = 16 * pass + thread / 8;
      next[pass] = entry(row, row < entries);
    }
  }
  // Counts an item that this block begins or has nothing to do for.
  __device__ __forceinline__ void count_item() {
    if (params.step == nullptr || number == 0 || number >= params.rounds) return;
    if (thread != 0) return;
    reduce_add<1>(params.step);
  }
  // Keeps the blocks in step: the entries of each query come in the order of their rows, so blocks
  // that began an item together use the same rows of the cache and of the accumulator at the same
  // time, from L2. Those ahead wait for the others, for at most kPatience: nothing but speed
  // depends on it.
  __device__ __forceinline__ void keep_step() {
    count_item();
    if (params.step == nullptr || number == 0 || number >= params.rounds) return;
    constexpr long long kPatience = 150'000;  // clocks, the time of about 14 tiles
    const long long start = clock64();
    std::uint32_t begun;
    do {
      begun = ld_relaxed_gpu(params.step);
    } while (begun < number * gridDim.x && clock64() - start < kPatience);
    __syncwarp();
  }
  // Before the copies: where the rows are, and the list of them for `reduce`, in the buffer of the
  // tile's parity.
  __device__ __forceinline__ void begin(std::uint32_t parity) {
    if (left == 0) return;
    if (first) keep_step();
    const std::int32_t waste = params.waste_row + static_cast<std::int32_t>(blockIdx.x);
    rows.valid = 0;
#pragma unroll
    for (int pass = 0; pass < kGatherPasses; ++pass) {
      const bool valid = next[pass] >= 0;
      rows.source[pass] =
          params.kv.kv + (valid ? next[pass] : 0) * params.kv.kv_stride + (thread & 7) * 16;
      rows.valid |= static_cast<std::uint32_t>(valid) << pass;
      if ((thread & 7) == 0) {
        const int row = 16 * pass + thread / 8;
        const std::int32_t target = valid ? next[pass] : waste;
        shared.targets()[parity][row].store(target);
        if constexpr (kFixed) {
          cp_async_word_zfill(shared.scales()[parity][row].address,
                              &params.row_states[target].scale, true);
        }
      }
    }
  }
  __device__ __forceinline__ void copy(int first, int end) {
    if (left == 0) return;
    const std::uint64_t policy = policy_evict_normal();
#pragma unroll
    for (int chunk = first; chunk < end; ++chunk) {
      gather_chunk(shared.k()[chunk].address, rows, chunk, thread, policy);
      shared.k_full()[chunk].arrive_cp_async();
    }
  }
  // After the copies of a tile.
  __device__ __forceinline__ void advance() {
    if (left == 0) return;
    place.advance();
    entries -= kTileRows;
    first = --left == 0;
    if (first) {
      ++number;
      find();
    }
    fetch();
  }
  // Q and dO of the item whose first tile is copied, the `parity`-th of those that have tiles.
  __device__ __forceinline__ void copy_heads(std::uint32_t parity) {
    if (left > 0) load_heads<kDim, kFixed>(params, shared, number, parity, thread);
  }
};

// --- score: products ----------------------------------------------------------------------------

template <bool kFixed>
__device__ __forceinline__ HeadState load_head_state(const KernelParams& params, const Item& item,
                                                     Place<float[kHeads]> deltas, int warp,
                                                     int lane) {
  const std::int64_t query = item.query;
  HeadState state;
  __syncwarp();  // a quad's delta is written by one of its lanes
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = item.first_head + 16 * warp + lane / 4 + 8 * r;
    state.live[r] = head_is_live<kFixed>(params, query, head);
    state.lse2[r] = infinity();
    state.delta[r] = 0.0f;
    if (state.live[r]) {
      if constexpr (kFixed) {
        state.lse2[r] = __ldg(params.lse2 + query * kHeads + head);
      } else {
        float lse2 = __ldg(params.lse + query * params.lse_stride + head) * kLog2e;
        if (params.attn_sink != nullptr) {
          lse2 = log2_add(lse2, __ldg(params.attn_sink + head * params.attn_sink_stride) * kLog2e);
        }
        state.lse2[r] = lse2 == negative_infinity() ? infinity() : lse2;
      }
      if (params.delta != nullptr) {
        state.delta[r] = __ldg(params.delta + query * params.delta_stride + head);
      } else {
        state.delta[r] = delta_place(deltas, warp, lane, r).load();
      }
    }
  }
  return state;
}

// Queues S = Q K^T and dP = dO K^T of a tile as its chunks come, and of an item's first tile as
// those of Q and dO do. One commit group.
template <int kDim>
__device__ __forceinline__ void multiply_scores(Plan<kDim> shared, std::uint32_t k_parity,
                                                bool first, std::uint32_t q_parity, float (&s)[32],
                                                float (&dp)[32]) {
  using P = Plan<kDim>;
  const std::uint64_t base = descriptor_k_major(shared.base);
#pragma unroll
  for (int chunk = 0; chunk < P::kChunks; ++chunk) {
    shared.k_full()[chunk].wait(k_parity, "score", chunk);
    if (first) shared.q_full()[chunk].wait(q_parity, "score", 10 + chunk);
    const std::uint32_t q = shared.offset(shared.q()[chunk]), k = shared.offset(shared.k()[chunk]);
    wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      wgmma_m64n64k16<Major::K, Major::K>(s, descriptor_offset(base, q + 32 * k16),
                                          descriptor_offset(base, k + 32 * k16),
                                          chunk > 0 || k16 > 0);
      if (chunk < kValueChunks) {
        wgmma_m64n64k16<Major::K, Major::K>(
            dp, descriptor_offset(base, shared.offset(shared.d_out()[chunk]) + 32 * k16),
            descriptor_offset(base, k + 32 * k16), chunk > 0 || k16 > 0);
      }
    }
    wgmma_commit();
  }
}

// P = exp2(S - lse2) and dS = P (dP - delta) scale, as A fragments; 0 past the last entry and
// where the head is not live, whatever S and dP are.
__device__ __forceinline__ void weigh(const KernelParams& params, const HeadState& state,
                                      int entries, int lane, float (&s)[32], float (&dp)[32],
                                      std::uint32_t (&p)[16], std::uint32_t (&ds)[16]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int r = i / 2 % 2;
    s[i] = ex2(fmaf(s[i], params.scale_log2, -state.lse2[r]));
    dp[i] = s[i] * params.scale * (dp[i] - state.delta[r]);
  }
  if (__any_sync(kFullWarp, entries < kTileRows || !state.live[0] || !state.live[1])) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const bool keep = 8 * (i / 4) + 2 * (lane & 3) + i % 2 < entries && state.live[i / 2 % 2];
      s[i] = keep ? s[i] : 0.0f;
      dp[i] = keep ? dp[i] : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    ds[i] = pack_bf16(dp[2 * i], dp[2 * i + 1]);
  }
}

// Stores columns of dQ: d[4 j + 2 r + e] is column first_column + 8 j + 2 (lane % 4) + e of head
// lane / 4 + 8 r of the warp's 16. Heads that exist but are not live get 0.
template <int kDim, bool kFixed, int kCount>
__device__ __forceinline__ void store_dq(const KernelParams& params, const Item& item,
                                         int first_column, int warp, int lane,
                                         const float (&d)[kCount]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int block_head = 16 * warp + lane / 4 + 8 * r, head = item.first_head + block_head;
    const bool exists = head < params.h_q;
    const bool live = head_is_live<kFixed>(params, item.query, head);
    char* const row = params.dq + item.query * params.dq_stride0 + head * params.dq_stride1;
    if (params.dq_f32 || item.part >= 0) {
      if (!exists) continue;
      float* const to =
          (item.part < 0
               ? reinterpret_cast<float*>(row)
               : params.dq_parts + (std::int64_t{item.part} * kHeads + block_head) * kDim) +
          first_column + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const float2 pair{live ? d[4 * j + 2 * r] : 0.0f, live ? d[4 * j + 2 * r + 1] : 0.0f};
        *reinterpret_cast<float2*>(to + 8 * j) = pair;
      }
      continue;
    }
    // A quad holds 32 columns as 4 blocks of 8, two columns a lane; transposed, each lane has one
    // block, 16 bytes.
    char* const to = row + (first_column + 8 * (lane & 3)) * 2;
#pragma unroll
    for (int part = 0; part < kCount / 16; ++part) {
      std::uint32_t w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int at = 4 * (4 * part + b) + 2 * r;
        w[b] = live ? pack_bf16(d[at], d[at + 1]) : 0u;
      }
      quad_transpose(w, lane);
      if (exists) store_streaming(to + 32 * part * 2, w[0], w[1], w[2], w[3]);
    }
  }
}

// What the query adds to d_sink: -exp(sink - lse') delta, 0 if it sees nothing.
__device__ __forceinline__ void store_sink_share(const KernelParams& params, const Item& item,
                                                 int warp, int lane, const HeadState& state) {
  if (params.sink_share == nullptr || (lane & 3) != 0 || item.first_tile > 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = item.first_head + 16 * warp + lane / 4 + 8 * r;
    if (head >= params.h_q) continue;
    const float sink = __ldg(params.attn_sink + head * params.attn_sink_stride);
    const bool counts = item.entries > 0 && sink != infinity() && sink != negative_infinity();
    params.sink_share[std::int64_t{item.query} * params.h_q + head] =
        counts ? -ex2(sink * kLog2e - state.lse2[r]) * state.delta[r] : 0.0f;
  }
}

template <int kCount>
__device__ __forceinline__ void clear(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = 0.0f;
}

template <int kDim, bool kFixed, class Params>
__device__ __forceinline__ void score_role(const Params& params, Plan<kDim> shared) {
  using P = Plan<kDim>;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x & 31;
  // Parities of the tiles and of the items with tiles that are done, those of the barriers, whether
  // the tile is its item's first, and the steps of the next item's delta that are done: in one
  // register.
  constexpr std::uint32_t kTile = 1, kItem = 2, kFirst = 4, kStep = 8;
  std::uint32_t progress = 0;
  Gather<kDim, kFixed, Params> gather(params, shared);
  gather.begin(0);
  gather.copy(0, P::kChunks);
  gather.copy_heads(0);
  gather.advance();
#pragma unroll 1
  for (int step = 0; step < kDeltaSteps; step += kDeltaBatch) {
    add_to_delta<kDim, kDeltaBatch>(params, shared, 0, step, warp, lane);
  }
  Item item;
  for (std::uint32_t number = 0; locate(params, shared.tail(), number, item); ++number) {
    const HeadState state = load_head_state<kFixed>(params, item, shared.delta(), warp, lane);
    int left = item.end() - item.first_tile;
    if (left > 0) progress |= kFirst;
    int entries = item.entries - item.first_tile * kTileRows;  // from this tile on
    float dq[128], dq_rope[16];
    clear(dq);
    clear(dq_rope);
#pragma unroll 1
    for (; left > 0; --left, entries -= kTileRows) {
      std::uint32_t p[16], ds[16];
      {
        float s[32], dp[32];
        multiply_scores(shared, progress & kTile, progress & kFirst, (progress & kItem) / kItem, s,
                        dp);
        wgmma_wait<0>();
        wgmma_pin(s);
        wgmma_pin(dp);
        weigh(params, state, entries, lane, s, dp, p, ds);
      }
      // Queued before P and dS are handed over: both only read the registers of dS.
      const std::uint64_t base = descriptor_mn_major(shared.base);
      wgmma_pin(ds);
      wgmma_fence();
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        wgmma_m64n256k16<Major::MN>(
            dq, ds[4 * k16], ds[4 * k16 + 1], ds[4 * k16 + 2], ds[4 * k16 + 3],
            descriptor_offset(base, shared.offset(shared.k()[0]) + 2048 * k16), true);
        if constexpr (kDim == 576) {
          wgmma_m64n32k16<Major::MN>(
              dq_rope, ds[4 * k16], ds[4 * k16 + 1], ds[4 * k16 + 2], ds[4 * k16 + 3],
              descriptor_offset(base, shared.offset(shared.k()[8]) + 2048 * k16), true);
        }
      }
      wgmma_commit();
      shared.scores_free().wait(progress & kTile ^ kTile, "score", 20);
      // Step k16 of a fragment stands at its step 0, bits 5 and 6 exchanged with those of k16.
      const std::uint32_t at = fragment_address(shared.p().address, warp, lane, 0);
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        const std::uint32_t to = at ^ 32 * k16;
        stmatrix_x4(to, p[4 * k16], p[4 * k16 + 1], p[4 * k16 + 2], p[4 * k16 + 3]);
        stmatrix_x4(to + (shared.ds().address - shared.p().address), ds[4 * k16], ds[4 * k16 + 1],
                    ds[4 * k16 + 2], ds[4 * k16 + 3]);
      }
      fence_proxy_async_shared();  // each writer, before the arrival that lets wgmma read
      shared.scores().arrive_warp();
      gather.begin(progress & kTile ^ kTile);
      wgmma_wait<0>();
      wgmma_pin(dq);
      wgmma_pin(dq_rope);
      wgmma_pin(ds);
      gather.copy(0, kHalfChunks);
      shared.k_free().wait(progress & kTile, "score", 21);
      gather.copy(kHalfChunks, P::kChunks);
      if (left > 1) {
        gather.advance();
        if (progress < kDeltaSteps * kStep) {
          add_to_delta<kDim, 1>(params, shared, number + 1, progress / kStep, warp, lane);
          progress += kStep;
        }
      }
      progress = (progress ^ kTile) & ~kFirst;
    }
    // Anew, and not kept meanwhile: registers are scarce.
    number = forget(number);
    locate(params, shared.tail(), number, item);
    store_dq<kDim, kFixed>(params, item, 0, warp, lane, dq);
    if constexpr (kDim == 576) store_dq<kDim, kFixed>(params, item, 512, warp, lane, dq_rope);
    store_sink_share(params, item, warp, lane, state);
    if (item.first_tile < item.end()) {
      progress ^= kItem;
      gather.copy_heads((progress & kItem) / kItem);
      gather.advance();
    }
    __syncwarp();  // all lanes have read this item's delta, also where it has no tiles
#pragma unroll 1
    for (; progress < kDeltaSteps * kStep; progress += kDeltaBatch * kStep) {
      add_to_delta<kDim, kDeltaBatch>(params, shared, number + 1, progress / kStep, warp, lane);
    }
    progress %= kStep;
  }
}

// --- reduce -------------------------------------------------------------------------------------

// Queues d = P^T dO + dS^T Q for the 64 columns of a chunk; those past the values have no P^T dO.
// One commit group.
template <bool kValues, int kDim>
__device__ __forceinline__ void multiply_chunk(Plan<kDim> shared, std::uint64_t base, int chunk,
                                               float (&d)[32]) {
  wgmma_fence();
  if constexpr (kValues) {
    const std::uint32_t p = shared.offset(shared.p());
    const std::uint32_t d_out = shared.offset(shared.d_out()[chunk]);
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      wgmma_m64n64k16<Major::MN, Major::MN>(d, descriptor_offset(base, p + 2048 * k16),
                                            descriptor_offset(base, d_out + 2048 * k16), k16 > 0);
    }
  }
  const std::uint32_t ds = shared.offset(shared.ds()), q = shared.offset(shared.q()[chunk]);
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    wgmma_m64n64k16<Major::MN, Major::MN>(d, descriptor_offset(base, ds + 2048 * k16),
                                          descriptor_offset(base, q + 2048 * k16),
                                          kValues || k16 > 0);
  }
  wgmma_commit();
}

template <int kDim, class Drain, class Params>
struct Reduce {
  using P = Plan<kDim>;
  const Params& params;
  const P shared;
  const int warp, lane;
  Drain drain;                 // of the tile that is being reduced
  float dq[128], dq_rope[16];  // columns 256 to 511, 544 to 575

  __device__ __forceinline__ Reduce(const Params& kernel_params, P shared_memory)
      : params(kernel_params),
        shared(shared_memory),
        warp(static_cast<int>(threadIdx.x % 128 / 32)),
        lane(static_cast<int>(threadIdx.x % 32)),
        drain(params.waste_row + static_cast<int>(blockIdx.x)) {}

  // One tile. Chunks alternate between the accumulators, the first goes to `a`; the last
  // one of the tile before is still in `b`.
  __device__ __forceinline__ void tile(std::uint32_t parity, bool last, float (&a)[32],
                                       float (&b)[32]) {
    // The chunk of the tile before is added beside the first products, or while there are none.
    const bool early = !__all_sync(kFullWarp, shared.scores().try_wait(parity));
    if (early) drain.template add<kDim>(params, P::kChunks - 1, lane, b);
    shared.scores().wait(parity, "reduce", 0);
    const std::uint64_t base = descriptor_mn_major(shared.base);
    const std::uint64_t ds =
        descriptor_offset(descriptor_k_major(shared.base), shared.offset(shared.ds()));
    wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      wgmma_m64n256k16<Major::K, Major::MN>(
          dq, descriptor_offset(ds, 32 * k16),
          descriptor_offset(base, shared.offset(shared.k()[kHalfChunks]) + 2048 * k16), true);
      if constexpr (kDim == 576) {
        wgmma_m64n32k16<Major::K, Major::MN>(
            dq_rope, descriptor_offset(ds, 32 * k16),
            descriptor_offset(base, shared.offset(shared.k()[8]) + 2 * kRopeColumns + 2048 * k16),
            true);
      }
    }
    wgmma_commit();
    multiply_chunk<true>(shared, base, 0, a);
    if (!early) drain.template add<kDim>(params, P::kChunks - 1, lane, b);
    drain.load(shared.targets()[parity], shared.scales()[parity], warp, lane);
    wgmma_wait<1>();
    wgmma_pin(dq);
    wgmma_pin(dq_rope);
    shared.k_free().arrive_warp();
    const auto step = [&]<bool kLast>(int chunk, float(&done)[32], float(&following)[32]) {
      wgmma_wait<0>();
      wgmma_pin(done);
      if (last) shared.q_free()[chunk].arrive_warp();
      multiply_chunk<!kLast || P::kChunks == kValueChunks>(shared, base, chunk + 1, following);
      drain.template add<kDim>(params, chunk, lane, done, 0, 1);
      if constexpr (kLast) {
        // The last product ends long before the reductions do: P and dS are free.
        wgmma_wait<0>();
        wgmma_pin(following);
        shared.scores_free().arrive_warp();
        if (last) shared.q_free()[chunk + 1].arrive_warp();
      }
      drain.template add<kDim>(params, chunk, lane, done, 1, 2);
    };
    // Pairs of chunks, then those that are left.
    constexpr int kPaired = (P::kChunks - 2) / 2 * 2;
#pragma unroll(Drain::kLooped ? 1 : kPaired)
    for (int chunk = 0; chunk < kPaired; chunk += 2) {
      step.template operator()<false>(chunk, a, b);
      step.template operator()<false>(chunk + 1, b, a);
    }
    if constexpr (P::kChunks % 2 == 1) {
      step.template operator()<false>(kPaired, a, b);
      step.template operator()<true>(kPaired + 1, b, a);
    } else {
      step.template operator()<true>(kPaired, a, b);
    }
  }

  __device__ __forceinline__ void run() {
    float acc0[32] = {}, acc1[32] = {};
    bool swapped = false;  // an odd number of chunks ends in the accumulator where it began
    std::uint32_t tiles_done = 0;
    Item item;
    for (std::uint32_t number = 0; locate(params, shared.tail(), number, item); ++number) {
      clear(dq);
      clear(dq_rope);
#pragma unroll 1
      for (int left = item.end() - item.first_tile; left > 0; --left, ++tiles_done) {
        if (!swapped) {
          tile(tiles_done & 1, left == 1, acc0, acc1);
        } else {
          tile(tiles_done & 1, left == 1, acc1, acc0);
        }
        swapped = P::kChunks % 2 == 1 && !swapped;
      }
      store_dq<kDim, Drain::kFixed>(params, item, 64 * kHalfChunks, warp, lane, dq);
      if constexpr (kDim == 576) {
        store_dq<kDim, Drain::kFixed>(params, item, 512 + kRopeColumns, warp, lane, dq_rope);
      }
    }
    if (!swapped) {
      drain.template add<kDim>(params, P::kChunks - 1, lane, acc1);
    } else {
      drain.template add<kDim>(params, P::kChunks - 1, lane, acc0);
    }
  }
};

// Params: KernelParams, or WithRanges of them.
template <int kDim, class Drain, class Params>
__global__ void __launch_bounds__(kThreads, 1) fused_kernel(const __grid_constant__ Params params) {
  using P = Plan<kDim>;
  std::byte* const memory = dynamic_shared<1024>();
  const P shared{shared_address(memory)};
  if (threadIdx.x == 0) {
    if (shared.base % 1024 != 0) __trap();  // the swizzle is one of address bits
    for (int chunk = 0; chunk < P::kChunks; ++chunk) {
      shared.k_full()[chunk].init(kGatherThreads);
      shared.q_full()[chunk].init(kGatherThreads);
      shared.q_free()[chunk].init(kWarps * kWarpArrival);
    }
    shared.k_free().init(kWarps * kWarpArrival);
    shared.scores().init(kWarps * kWarpArrival);
    shared.scores_free().init(kWarps * kWarpArrival);
    fence_mbarrier_init();
    TailItem(&tail)[2] = reinterpret_cast<Layout<kDim>*>(memory)->tail;
    for (int which = 0; which < 2; ++which) tail[which] = tail_item(params, which);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    score_role<kDim, Drain::kFixed>(params, shared);
  } else {
    Reduce<kDim, Drain, Params>(params, shared).run();
  }
}

}  // namespace winnow::sparse_mla::backward_fused_sm90_detail
