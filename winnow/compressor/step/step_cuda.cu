// Steps on CUDA, in one launch. The first blocks have a sequence each: they compute the windows
// that need the state, and then write the new tokens into it. The other blocks have a team for
// every new token, which computes the window that the token completes from new tokens alone. Slots
// come through shared memory, so that those of a large window are under way while others are added.
#include <algorithm>

#include <cuda_runtime.h>

#include "winnow/cache/write_row.cuh"
#include "winnow/compressor/step/step_impl.h"
#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/cluster.cuh"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::step", "cuda"};

using sparse_mla::CacheFormat;

enum class Stored { nowhere, fp8_584, bf16, pages };

// Blocks of a cluster, where a window has one. They share its columns: a block has as many as there
// are lanes.
constexpr int kParts = kColumns;
constexpr int kStages = 4;

struct KernelParams {
  KernelProblem problem;
  device::FastDivmod by_ratio, by_ring, by_packs;  // packs: of kColumns columns of a token
  int blocks;                                      // of a cluster
  int works;                                       // sequences, and windows of new tokens alone
  const std::int32_t* state_slots;
  Rows<float*> state;
  int states, ring;
  bool wide;         // rows are floats, not as kv
  Rows<void*> rows;  // may be absent
  Stored stored;     // where rows are stored besides
  Slots slots;
  sparse_mla::CacheView<std::uint8_t> cache;
  indexer::KeyPages pages;
};

// The new tokens of a sequence; none where it is left out.
struct NewTokens {
  int begin, count, state;
  unsigned position;  // of the first; that of the last is below 2^32, too

  __device__ void read(const KernelParams& params, int sequence) {
    const KernelProblem& p = params.problem;
    state = static_cast<const volatile std::int32_t*>(params.state_slots)[sequence];
    const int first = static_cast<const volatile std::int32_t*>(p.first_position)[sequence];
    begin = read_clamped(p.cu_seqlens, sequence, p.tokens);
    const int end = read_clamped(p.cu_seqlens, sequence + 1, p.tokens);
    const bool taken = state >= 0 && state < params.states && first >= 0;
    position = static_cast<unsigned>(max(first, 0));
    count = taken ? max(end - begin, 0) : 0;
  }
  // The token at that position.
  __device__ __forceinline__ int token(unsigned at) const {
    return begin + static_cast<int>(at - position);
  }
};

// Windows w and on of the new tokens of a sequence: `windows` of them.
struct alignas(8) Work {
  NewTokens tokens;
  unsigned w;
  int windows;

  // Those that need the state.
  __device__ void of_sequence(const KernelParams& params, int sequence) {
    tokens.read(params, sequence);
    w = params.by_ratio.divide(tokens.position).quotient;
    // A window has tokens of up to two windows' length, so that two can need the state.
    const unsigned end = params.by_ratio.divide(tokens.position + tokens.count).quotient;
    windows = static_cast<int>(min(end - w, 2u));
  }
  // The one whose tokens are all new, and the last of them is among the tokens from i * ratio up to
  // (i + 1) * ratio. There is one at most, and the first of those tokens is of its sequence.
  __device__ void of_new_tokens(const KernelParams& params, std::int64_t i) {
    const KernelProblem& p = params.problem;
    const std::int64_t first = i * p.ratio;
    const int token = static_cast<int>(min(first, std::int64_t{p.tokens}));
    tokens.read(params, place_before(p.cu_seqlens, p.n, token));
    const int at = token - tokens.begin;
    const auto of_token = params.by_ratio.divide(tokens.position + at);
    w = of_token.quotient;
    const int last = at + p.ratio - 1 - static_cast<int>(of_token.remainder);
    windows = first < p.tokens && at >= 0 && last < tokens.count &&
              w >= params.by_ratio.divide(tokens.position).quotient + 2;
  }
};

// kv of a token in the state, by its place in the ring; its gate with the bias is series * d behind
// it.
__device__ __forceinline__ float* place_of(const KernelParams& params, int state, int place) {
  return params.state.data + state * params.state.stride0 + place * params.state.stride1;
}

// Loads a window whose slots a thread loads at once: those that stand in the state, which are kv
// and the gate with its bias, and new tokens. Nothing that is loaded is looked at before all loads
// are under way.
template <class T, bool kAligned>
struct DirectLoader {
  static constexpr bool kNarrow = sizeof(T) < sizeof(float);
  // Of a slot of the state kv and the gate. Of a new token of f32 the same, and the bias; of a
  // narrower one kv and the gate, and the bias.
  struct Raw {
    uint4 first, second, third;
  };

  int ring, columns, own;  // the columns of all series; the first slot of the window's own tokens
  int place, fresh;        // slot 0 in the ring, below 0: behind its end; the first new slot
  const float* state;      // the thread's columns of the first place, for slots before own,
  int series;              // and how much further they are for others
  StrideOf<kAligned> stride;  // between places
  Walk<const T, StrideOf<kAligned>> kv_walk, gate_walk;
  Biases<kAligned> biases;

  __device__ __forceinline__ DirectLoader(const KernelParams& params, const NewTokens& tokens,
                                          unsigned w, int column)
      : ring(params.ring),
        columns(params.problem.series * params.problem.d),
        own(params.problem.slots() - params.problem.ratio),
        state(place_of(params, tokens.state, 0) + column),
        series((params.problem.series - 1) * params.problem.d),
        stride(static_cast<StrideOf<kAligned>>(params.state.stride1)),
        biases(params.problem, column, 0) {
    const KernelProblem& p = params.problem;
    const int token = tokens.token(w * p.ratio);
    kv_walk = slots_of<T, kAligned>(p, p.kv, token, column);
    gate_walk = slots_of<T, kAligned>(p, p.gate, token, column);
    const unsigned end = (w + 1) * p.ratio;
    place = static_cast<int>(params.by_ring.divide(end - 1).remainder) + 1 - p.slots();
    fresh = p.slots() - static_cast<int>(end - tokens.position);
  }
  __device__ __forceinline__ bool is_new(int from, int j) const { return from + j >= fresh; }
  __device__ __forceinline__ Raw fetch(int from, int j) const {
    Raw raw = {};
    if (is_new(from, j)) {
      const Pack<T> kv = Pack<T>::template load<kAligned>(kv_walk.at(from, j, own)),
                    gate = Pack<T>::template load<kAligned>(gate_walk.at(from, j, own));
      const Pack<float> bias = Pack<float>::load<kAligned>(biases.walk.at(from, j, own));
      if constexpr (kNarrow) {
        raw.first = {kv.words.x, kv.words.y, gate.words.x, gate.words.y};
        raw.second = bits_of(bias);
      } else {
        raw.first = bits_of(kv);
        raw.second = bits_of(gate);
        raw.third = bits_of(bias);
      }
    } else {
      const int at = place + from + j;
      const float* const kept =
          state + (at < 0 ? at + ring : at) * stride + (from + j < own ? 0 : series);
      raw.first = bits_of(Pack<float>::load<kAligned>(kept));
      raw.second = bits_of(Pack<float>::load<kAligned>(kept + columns));
    }
    return raw;
  }
  __device__ __forceinline__ void kv(const Raw& raw, int from, int j, float (&kv)[kColumns]) const {
    if (kNarrow && is_new(from, j)) {
      Pack<Narrow>{{raw.first.x, raw.first.y}}.to_floats(kv);
    } else {
      to_floats(raw.first, kv);
    }
  }
  __device__ __forceinline__ void gate(const Raw& raw, int from, int j,
                                       float (&gate)[kColumns]) const {
    to_floats(raw.second, gate);
    if (!is_new(from, j)) return;
    float other[kColumns];
    if constexpr (kNarrow) {
      Pack<Narrow>{{raw.first.z, raw.first.w}}.to_floats(other);
    } else {
      to_floats(raw.third, other);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) gate[c] = __fadd_rn(gate[c], other[c]);
  }

 private:
  using Narrow = std::conditional_t<kNarrow, T, __nv_bfloat16>;
  static __device__ __forceinline__ void to_floats(const uint4& words, float (&x)[kColumns]) {
    x[0] = __uint_as_float(words.x);
    x[1] = __uint_as_float(words.y);
    x[2] = __uint_as_float(words.z);
    x[3] = __uint_as_float(words.w);
  }
  static __device__ __forceinline__ uint4 bits_of(const Pack<float>& pack) {
    const float4& x = pack.words;
    return {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)};
  }
};

// How often a thread goes through kSlotsAtOnce slots of a window.
WINNOW_HOST_DEVICE inline int rounds_of(int slots, const Team& team) {
  const int of_group = (slots + team.groups() - 1) >> team.groups_log;
  return (of_group + kSlotsAtOnce - 1) / kSlotsAtOnce;
}

// Slots on their way to the threads that add them up: one column for each thread.
struct Stage {
  float kv[kSlotsAtOnce][kThreads], gate[kSlotsAtOnce][kThreads];
};

// Copies one column of a window to stages, where new tokens are made what the state would have of
// them.
template <class T>
struct ColumnCopier {
  int ring, columns, own, place, fresh, series;  // as in DirectLoader
  const float* state;
  std::int64_t stride;
  Walk<const T, std::int64_t> kv_walk, gate_walk;
  Biases<false> biases;

  __device__ __forceinline__ ColumnCopier(const KernelParams& params, const NewTokens& tokens,
                                          unsigned w, int column)
      : ring(params.ring),
        columns(params.problem.series * params.problem.d),
        own(params.problem.slots() - params.problem.ratio),
        series((params.problem.series - 1) * params.problem.d),
        state(place_of(params, tokens.state, 0) + column),
        stride(params.state.stride1),
        biases(params.problem, column, 0) {
    const KernelProblem& p = params.problem;
    const int token = tokens.token(w * p.ratio);
    kv_walk = slots_of<T, false>(p, p.kv, token, column);
    gate_walk = slots_of<T, false>(p, p.gate, token, column);
    const unsigned end = (w + 1) * p.ratio;
    place = static_cast<int>(params.by_ring.divide(end - 1).remainder) + 1 - p.slots();
    fresh = p.slots() - static_cast<int>(end - tokens.position);
  }
  // Begins to copy slots [first, end) of those from `from` on.
  __device__ __forceinline__ void copy(int from, int first, int end, Stage& stage) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int begin = max(from, first), kept_end = min(min(from + kSlotsAtOnce, end), fresh);
    int at = place + begin;
    if (at < 0) at += ring;
    const float* kept = state + at * stride;
    const std::int64_t around = ring * stride;
    for (int slot = begin; slot < kept_end; ++slot, ++at, kept += stride) {
      if (at == ring) kept -= around;
      const float* const source = kept + (slot < own ? 0 : series);
      device::cp_async_word_zfill(device::shared_address(&stage.kv[slot - from][thread]), source,
                                  true);
      device::cp_async_word_zfill(device::shared_address(&stage.gate[slot - from][thread]),
                                  source + columns, true);
    }
    for (int slot = max(begin, fresh); slot < min(from + kSlotsAtOnce, end); ++slot) {
      stage.kv[slot - from][thread] = number_at(kv_walk.at(slot, 0, own));
      stage.gate[slot - from][thread] =
          __fadd_rn(number_at(gate_walk.at(slot, 0, own)), *biases.walk.at(slot, 0, own));
    }
  }
};

// Loads from a stage.
struct StageLoader {
  struct Raw {};  // slots are read where they are used
  const Stage& stage;

  __device__ __forceinline__ Raw fetch(int, int) const { return {}; }
  __device__ __forceinline__ void kv(Raw, int, int j, float (&kv)[1]) const {
    kv[0] = stage.kv[j][threadIdx.x];
  }
  __device__ __forceinline__ void gate(Raw, int, int j, float (&gate)[1]) const {
    gate[0] = stage.gate[j][threadIdx.x];
  }
};

// The sums of the thread's slots of a window from `first` on, as add_range() has them. All but one
// of the stages are under way while one is added.
template <class T>
__device__ __forceinline__ SumsOf<1> sums_of_column(const ColumnCopier<T>& copier, Stage* stages,
                                                    const Range& range, int first) {
  SumsOf<1> sums = SumsOf<1>::of_none();
  int written = 0, read = 0;
  const auto copy = [&](int from) {
    copier.copy(from, first, range.end, stages[written]);
    device::cp_async_commit();
    written = (written + 1) % kStages;
  };
  for (int i = 0; i < kStages - 1; ++i) copy(range.begin + i * kSlotsAtOnce);
#pragma unroll 1
  for (int from = range.begin; from < range.end; from += kSlotsAtOnce) {
    copy(from + (kStages - 1) * kSlotsAtOnce);
    device::cp_async_wait<kStages - 1>();
    const StageLoader loader{stages[read]};
    read = (read + 1) % kStages;
    if (from >= first && from + kSlotsAtOnce <= range.end) {
      add_slots<true>(loader, from, first, range.end, sums);
    } else if (max(from, first) < range.end) {
      add_slots<false>(loader, from, first, range.end, sums);
    }
  }
  return sums;
}

// Writes a row into the cache or the pages, where `inside`: the columns of a thread as kv's type T,
// or as floats, has them. The whole warp calls it.
template <class T>
__device__ __forceinline__ void store(const KernelParams& params, int column, std::int64_t slot,
                                      bool inside, float (&row)[kColumns]) {
  if (!params.wide) Pack<T>::of(row).to_floats(row);
  if (params.stored == Stored::pages) {
    inside = inside && params.pages.holds(slot);
    const int d = params.problem.d;
    cache::Share<std::uint8_t, kColumns> f8;
    const float scale = d == 128
                            ? cache::quantise_key<32>(row, params.pages.power_of_two, f8.elements)
                            : cache::quantise_key<16>(row, params.pages.power_of_two, f8.elements);
    if (!inside) return;
    const cache::KeyPlace place(params.pages.pages, slot, d);
    *reinterpret_cast<cache::Share<std::uint8_t, kColumns>*>(place.row + column) = f8;
    if (column == 0) *place.scale = scale;
    return;
  }
  inside = inside && params.cache.holds(slot);
  const uint2 words = Pack<__nv_bfloat16>::of(row).words;
  const cache::Share<std::uint32_t, kColumns / 2> brain{{words.x, words.y}};
  const auto at = static_cast<std::uint32_t>(inside ? slot : 0);
  if (params.stored == Stored::bf16) {
    cache::LatentPlace<CacheFormat::bf16>(params.cache, at).write(column, inside, brain);
  } else {
    cache::LatentPlace<CacheFormat::fp8_584>(params.cache, at).write(column, inside, brain);
  }
}

// The slots of the windows of a block. Those that are stored have 64 columns at least.
using BlockSlots = std::int64_t[kThreads * kColumns / 64];

// Window w, where `inside`, into the row of its last token. The whole block calls it. What
// load_meanwhile() loads is under way while the row is finished.
template <class T, bool kAligned, class Function>
__device__ __forceinline__ void compute_window(const KernelParams& params, const Thread& thread,
                                               const NewTokens& tokens, unsigned w, bool inside,
                                               Exchange& exchange, BlockSlots& slots,
                                               const Function& load_meanwhile) {
  const KernelProblem& p = params.problem;
  const int column = thread.lane * kColumns;
  const std::int64_t token = tokens.token((w + 1) * p.ratio - 1);
  const bool stored = params.stored != Stored::nowhere;
  const bool leads = thread.lane == 0 && thread.group == 0;
  std::int64_t slot = -1;
  if (stored && leads && inside) slot = cache::read_slot(params.slots, token);
  const Factors<kAligned> factors(p, std::int64_t{w} * p.ratio, column);
  Sums sums = Sums::of_none();
  if (inside) {
    const DirectLoader<T, kAligned> loader(params, tokens, w, column);
    const Range range(p, thread.group);
    add_part(loader, range, w == 0 ? loader.own : 0, range.begin, sums);
  }
  load_meanwhile();
  add_groups(p.team, thread, exchange, sums);
  float row[kColumns];
  finish(p, thread, factors, exchange, sums, row);
  const bool written = inside && thread.group == 0;
  if (written && params.rows.present()) {
    store_columns<T, kAligned>(params.rows.data, token * params.rows.stride0 + column, params.wide,
                               row);
  }
  if (!stored) return;
  // All threads of a window have one reading of its slot, whoever rewrites it. Where a block has
  // windows one after the other, their sums' barriers are between two uses of this place.
  if (leads) slots[thread.window] = slot;
  __syncthreads();
  store<T>(params, column, slots[thread.window], written, row);
}

// What the state keeps of a new token: kColumns columns of it.
template <class T, bool kAligned>
struct Kept {
  Pack<T> kv, gate;
  Pack<float> bias;

  // Of pack i of the tokens from `first` on.
  __device__ __forceinline__ void load(const KernelParams& params, const NewTokens& tokens,
                                       int first, int i) {
    const KernelProblem& p = params.problem;
    const auto of_pack = params.by_packs.divide(static_cast<unsigned>(i));
    const int token = first + static_cast<int>(of_pack.quotient),
              column = static_cast<int>(of_pack.remainder) * kColumns;
    const std::int64_t at = tokens.begin + token;
    const auto load_from = [&](const Rows<const void*>& rows) {
      return Pack<T>::template load<kAligned>(static_cast<const T*>(rows.data) + at * rows.stride0 +
                                              column);
    };
    kv = load_from(p.kv);
    gate = load_from(p.gate);
    bias = Pack<float>::load<kAligned>(p.position_bias.data +
                                       params.by_ratio.divide(tokens.position + token).remainder *
                                           p.position_bias.stride0 +
                                       column);
  }
  __device__ __forceinline__ void store(const KernelParams& params, const NewTokens& tokens,
                                        int first, int i) const {
    const KernelProblem& p = params.problem;
    const int columns = p.series * p.d;
    const auto of_pack = params.by_packs.divide(static_cast<unsigned>(i));
    float row[kColumns], logits[kColumns], biases[kColumns];
    kv.to_floats(row);
    gate.to_floats(logits);
    bias.to_floats(biases);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) logits[c] = __fadd_rn(logits[c], biases[c]);
    const unsigned position = tokens.position + first + of_pack.quotient;
    float* place = place_of(params, tokens.state,
                            static_cast<int>(params.by_ring.divide(position).remainder)) +
                   of_pack.remainder * kColumns;
    Pack<float>::of(row).template store<kAligned>(place);
    Pack<float>::of(logits).template store<kAligned>(place + columns);
  }
};

// Windows of which a thread loads all its slots at once. The first blocks have a sequence each, the
// others a team for each window of new tokens alone.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    step_kernel(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED(exchange, Exchange);
  WINNOW_BLOCK_SHARED(slots, BlockSlots);
  WINNOW_BLOCK_SHARED(shared, Work);
  const KernelProblem& p = params.problem;
  const Thread thread(p.team);
  const int block = static_cast<int>(blockIdx.x), windows = p.team.windows();
  const bool has_column = thread.lane * kColumns < p.d, keeps = block < p.n;
  Work work;
  int left = windows;  // of the block
  bool inside = has_column;
  if (keeps) {
    if (threadIdx.x == 0) shared.of_sequence(params, block);
    __syncthreads();  // what the block does hangs on one reading, whoever rewrites the lists
    work = shared;
    if (work.tokens.count == 0) return;
    left = work.windows;
    work.w += thread.window;
  } else {
    work.of_new_tokens(params, std::int64_t{block - p.n} * windows + thread.window);
    if (!__syncthreads_or(work.windows)) return;
    inside = inside && work.windows > 0;
  }
  const NewTokens& tokens = work.tokens;
  // The last of the new tokens, which the state keeps.
  const int kept_from = max(tokens.count - params.ring, 0);
  const int packs = (tokens.count - kept_from) * (p.series * p.d / kColumns);
  int pack = static_cast<int>(threadIdx.x);
  Kept<T, kAligned> kept;
  const auto load_first = [&] {
    if (keeps) kept.load(params, tokens, kept_from, min(pack, packs - 1));
  };
  if (left <= 0) load_first();
  for (; left > 0; left -= windows, work.w += windows) {
    compute_window<T, kAligned>(params, thread, tokens, work.w, inside && thread.window < left,
                                exchange, slots, load_first);
  }
  if (!keeps) return;
  __syncthreads();  // the state has been read
  while (pack < packs) {
    kept.store(params, tokens, kept_from, pack);
    pack += kThreads;
    if (pack < packs) kept.load(params, tokens, kept_from, pack);
  }
}

// ---- windows of many slots

// Stores x where `to` is in the shared memory of a block of the cluster.
__device__ __forceinline__ void store_in(int block, float2& to, float2 x) {
  device::st_shared_cluster(
      device::map_shared(device::shared_address(&to), static_cast<unsigned>(block)), x);
}

// Of one column, and the slots of a group.
struct alignas(16) ColumnSums {
  float2 largest_and_total, sum;
};

// What the state keeps of a new token, in one column.
template <class T>
struct KeptColumn {
  T kv, gate;
  float bias;
  float* place;

  __device__ __forceinline__ void load(const KernelParams& params, const NewTokens& tokens,
                                       int token, int column) {
    const KernelProblem& p = params.problem;
    const std::int64_t at = tokens.begin + token;
    const unsigned position = tokens.position + token;
    kv = static_cast<const T*>(p.kv.data)[at * p.kv.stride0 + column];
    gate = static_cast<const T*>(p.gate.data)[at * p.gate.stride0 + column];
    bias = p.position_bias
               .data[params.by_ratio.divide(position).remainder * p.position_bias.stride0 + column];
    place = place_of(params, tokens.state,
                     static_cast<int>(params.by_ring.divide(position).remainder)) +
            column;
  }
  __device__ __forceinline__ void store(int columns) const {
    place[0] = number_at(&kv);
    place[columns] = __fadd_rn(number_at(&gate), bias);
  }
};

// Windows of more slots than a thread loads at once. A cluster has some sequences and some windows
// of new tokens alone: its first block reads the lists for all. Each block has a part of the
// columns, and a thread has one of them; the first block makes rows of all blocks' sums. Sequences
// that complete windows are first.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    large_windows_kernel(const __grid_constant__ KernelParams params) {
  constexpr int kWorks = 32;
  WINNOW_BLOCK_SHARED(exchange, Exchange);
  WINNOW_BLOCK_SHARED(slot, std::int64_t);
  WINNOW_BLOCK_SHARED_ALIGNED(16, works, Work[kWorks]);
  WINNOW_BLOCK_SHARED_ALIGNED(16, column_sums, ColumnSums[kParts * kThreads]);
  const KernelProblem& p = params.problem;
  const Thread thread(p.team);
  const int blocks = params.blocks, rank = static_cast<int>(device::cluster_rank());
  const int cluster = static_cast<int>(blockIdx.x) / blocks,
            stride = static_cast<int>(gridDim.x) / blocks;
  const int lanes = p.team.lanes(), groups = p.team.groups(), own_thread = threadIdx.x;
  const bool leads = rank == 0;
  Stage* const stages = reinterpret_cast<Stage*>(device::dynamic_shared<16>());

  const auto compute_window = [&](const Work& work, unsigned w, const auto& load_meanwhile) {
    const Range range(p, thread.group);
    for (int part = rank; part < kParts; part += blocks) {
      const int column = part * lanes + thread.lane;
      SumsOf<1> sums = SumsOf<1>::of_none();
      if (column < p.d) {
        const ColumnCopier<T> copier(params, work.tokens, w, column);
        sums = sums_of_column(copier, stages, range, w == 0 ? copier.own : 0);
      }
      ColumnSums& to = column_sums[thread.group * kParts * lanes + column];
      store_in(0, to.largest_and_total, {sums.largest[0], sums.total[0]});
      store_in(0, to.sum, {sums.sum[0], 0});
    }
    load_meanwhile();
    const int column = thread.lane * kColumns;
    const std::int64_t token = work.tokens.token((w + 1) * p.ratio - 1);
    Factors<false> factors;
    if (leads) {
      factors = Factors<false>(p, std::int64_t{w} * p.ratio, column);
      if (own_thread == 0 && params.stored != Stored::nowhere) {
        slot = cache::read_slot(params.slots, token);
      }
    }
    device::cluster_arrive();
    device::cluster_wait();  // the sums of all blocks are there
    Sums sums;
    std::int64_t stored_at = -1;
    if (leads) {
      if (params.stored != Stored::nowhere) stored_at = slot;
      for (int group = 0; group < groups; ++group) {
        Sums of_group;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const ColumnSums& from = column_sums[group * kParts * lanes + column + c];
          of_group.largest[c] = from.largest_and_total.x;
          of_group.total[c] = from.largest_and_total.y;
          of_group.sum[c] = from.sum.x;
        }
        if (group == 0) {
          sums = of_group;
        } else {
          sums.add(of_group);
        }
      }
    }
    device::cluster_arrive();
    if (leads) {
      float row[kColumns];
      finish(p, thread, factors, exchange, sums, row);
      const bool written = thread.group == 0 && column < p.d;
      if (written && params.rows.present()) {
        store_columns<T, false>(params.rows.data, token * params.rows.stride0 + column, params.wide,
                                row);
      }
      if (params.stored != Stored::nowhere) store<T>(params, column, stored_at, written, row);
    }
    device::cluster_wait();  // the sums have been read
  };
  const auto process = [&](const Work& work, bool keeps) {
    const NewTokens& tokens = work.tokens;
    // The last of the new tokens, which the state keeps.
    const int from = max(tokens.count - params.ring, 0);
    const int end = keeps ? (tokens.count - from) * p.series : 0;
    const int first_column = rank * lanes + thread.lane;
    const auto column_of = [&](int i, int of_part) {
      return (p.series == 2 && i % 2 == 1 ? p.d : 0) + of_part;
    };
    const auto token_of = [&](int i) { return from + (p.series == 2 ? i / 2 : i); };
    KeptColumn<T> kept;
    const bool keeps_first = thread.group < end && first_column < p.d;
    const auto load_first = [&] {
      if (!keeps_first) return;
      kept.load(params, tokens, token_of(thread.group), column_of(thread.group, first_column));
    };
    if (work.windows == 0) load_first();
    for (int i = 0; i < work.windows; ++i) compute_window(work, work.w + i, load_first);
    const int columns = p.series * p.d;
    if (keeps_first) kept.store(columns);
    for (int part = rank; part < kParts; part += blocks) {
      const int column = part * lanes + thread.lane;
      for (int i = thread.group; column < p.d && i < end; i += groups) {
        if (i == thread.group && part == rank) continue;
        kept.load(params, tokens, token_of(i), column_of(i, column));
        kept.store(columns);
      }
    }
  };

  device::cluster_arrive();
  for (int first = cluster; first < params.works; first += kWorks * stride) {
    Work work = {};
    if (leads && own_thread < kWorks) {
      const std::int64_t i = first + std::int64_t{own_thread} * stride;
      if (i < p.n) {
        work.of_sequence(params, static_cast<int>(i));
      } else if (i < params.works) {
        work.of_new_tokens(params, i - p.n);
        if (work.windows == 0) work.tokens.count = 0;
      }
    }
    device::cluster_wait();  // all blocks run, and have done what they had
    if (leads && own_thread < kWorks) {
      constexpr int kPairs = sizeof(Work) / sizeof(float2);
      for (int block = 0; block < blocks; ++block) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          store_in(block, reinterpret_cast<float2*>(&works[own_thread])[i],
                   reinterpret_cast<const float2*>(&work)[i]);
        }
      }
    }
    device::cluster_arrive();
    device::cluster_wait();  // what is to be done is there
#pragma unroll 1
    for (int turn = 0; turn < 2 * kWorks; ++turn) {
      const int i = turn % kWorks;
      const Work& next = works[i];
      if (next.tokens.count == 0 || (next.windows > 0) != (turn < kWorks)) continue;
      process(next, first + std::int64_t{i} * stride < p.n);
    }
    device::cluster_arrive();
  }
  device::cluster_wait();
}

template <class T>
void launch(const StepParams& params, const Packed& lists, const std::int32_t* state_slots,
            cudaStream_t stream) {
  const Problem& problem = params.problem;
  const int ring = static_cast<int>(params.ring < INT32_MAX ? params.ring : INT32_MAX);
  KernelParams kernel = {
      kernel_problem_of(problem, lists),
      device::FastDivmod(static_cast<unsigned>(problem.ratio)),
      device::FastDivmod(static_cast<unsigned>(ring)),
      device::FastDivmod(static_cast<unsigned>(problem.series() * problem.d / kColumns)),
      1,
      0,
      state_slots,
      params.state.as<float>(),
      static_cast<int>(params.states < INT32_MAX ? params.states : INT32_MAX),
      ring,
      params.rows_dtype != problem.dtype,
      params.rows,
      params.pages.present()                     ? Stored::pages
      : !params.cache.present()                  ? Stored::nowhere
      : params.cache.format == CacheFormat::bf16 ? Stored::bf16
                                                 : Stored::fp8_584,
      params.slots,
      cache_view(params.cache),
      params.pages};
  const bool aligned = aligned_inputs(problem) && aligned_rows(params.state, sizeof(float)) &&
                       aligned_rows(params.rows, size_of(params.rows_dtype));
  const std::int64_t n = lists.cu_seqlens.size(0) - 1, windows = kernel.problem.team.windows();
  if (n == 0) return;
  // So few tokens complete no window but those of the first blocks.
  const std::int64_t neighbours = (problem.tokens + problem.ratio - 1) / problem.ratio;
  const std::int64_t others = neighbours <= 2 ? 0 : (neighbours + windows - 1) / windows;
  if (rounds_of(kernel.problem.slots(), kernel.problem.team) == 1) {
    kRuntime.launch(aligned ? step_kernel<T, true> : step_kernel<T, false>,
                    static_cast<unsigned>(n + others), kThreads, 0, stream, kernel);
    return;
  }
  kernel.works = static_cast<int>(n + others);
  constexpr int kBytes = kStages * sizeof(Stage);
  auto* const function = large_windows_kernel<T>;
  kRuntime.allow_shared_memory(function, kBytes);
  const bool clusters = kRuntime.attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  if (clusters) kernel.blocks = kParts;
  const int at_a_time = kRuntime.multiprocessors() * kBlocksOfSm / kernel.blocks;
  const auto blocks =
      static_cast<unsigned>(std::min(kernel.works, std::max(at_a_time, 1)) * kernel.blocks);
  if (!clusters) {
    kRuntime.launch(function, blocks, kThreads, kBytes, stream, kernel);
    return;
  }
  kRuntime.check(
      device::launch_clusters(function, kParts, blocks, kThreads, kBytes, stream, kernel),
      "launch");
}

}  // namespace

void step_cuda(const StepParams& params, const Packed& lists, const std::int32_t* state_slots,
               void* stream) {
  with_elements(params.problem.dtype, [&]<class T>(T) {
    launch<T>(params, lists, state_slots, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace winnow::compressor
