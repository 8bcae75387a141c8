// Steps on CUDA, in one launch. The first blocks have a sequence each: they compute the windows
// that need the state, and then write the new tokens into it. The other blocks have a team for
// every new token, which computes the window that the token completes from new tokens alone. Slots
// come through shared memory, so that those of a large window are under way while others are added.
// Where a large window needs the state, which few of a step's sequences complete, the blocks of a
// cluster have a part of its columns each: one SM would load it for longer than all the rest takes.
#include <algorithm>

#include <cuda_runtime.h>

#include "winnow/cache/write_row.cuh"
#include "winnow/compressor/step/step_impl.h"
#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/kernel_order.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/cluster.cuh"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::step", "cuda"};

using sparse_mla::CacheFormat;

enum class Stored { nowhere, fp8_584, bf16, pages };

constexpr int kMostStages = 3;

// Slots of a window on their way to the threads that add them up: 32 bytes for the columns of each
// thread. See WindowLoader.
struct Stage {
  uint4 first[kSlotsAtOnce][kThreads], second[kSlotsAtOnce][kThreads];
};

struct KernelParams {
  KernelProblem problem;
  int stages;
  int sequence_blocks;  // the first blocks: one for each sequence, in whole clusters if there are
                        // some
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

// Windows w and on of a sequence, which need the state: `windows` of them. A window has tokens of
// up to two windows' length, so that two can.
constexpr int kMostWindows = 2;
struct Work {
  NewTokens tokens;
  unsigned w;
  int windows;

  __device__ void read(const KernelParams& params, int sequence) {
    *this = {};
    if (sequence >= params.problem.n) return;
    tokens.read(params, sequence);
    w = tokens.position / params.problem.ratio;
    const unsigned end = (tokens.position + tokens.count) / params.problem.ratio;
    windows = static_cast<int>(min(end - w, unsigned{kMostWindows}));
  }
};

// kv of a token in the state, by its place in the ring; its gate with the bias is series * d behind
// it.
__device__ __forceinline__ float* place_of(const KernelParams& params, int state, int place) {
  return params.state.data + state * params.state.stride0 + place * params.state.stride1;
}

// Where slots of a window are in the state, for a thread's columns.
struct KeptSlots {
  int ring, columns, own;  // the columns of all series; the first slot of the window's own tokens
  int place, fresh;        // slot 0 in the ring, below 0: behind its end; the first new slot
  const float* state;      // the thread's columns of the first place, for slots before own,
  int series;              // and how much further they are for others
  std::int64_t stride;     // between places

  __device__ __forceinline__ KeptSlots(const KernelParams& params, const NewTokens& tokens,
                                       unsigned w, int column)
      : ring(params.ring),
        columns(params.problem.series * params.problem.d),
        own(params.problem.slots() - params.problem.ratio),
        state(place_of(params, tokens.state, 0) + column),
        series((params.problem.series - 1) * params.problem.d),
        stride(params.state.stride1) {
    const unsigned end = (w + 1) * params.problem.ratio;
    place = static_cast<int>((end - 1) % ring) + 1 - params.problem.slots();
    fresh = params.problem.slots() - static_cast<int>(end - tokens.position);
  }
  __device__ __forceinline__ bool is_new(int slot) const { return slot >= fresh; }
  // Its kv; its gate with the bias is `columns` further.
  __device__ __forceinline__ const float* at(int slot) const {
    const int at = place + slot;
    return state + (at < 0 ? at + ring : at) * stride + (slot < own ? 0 : series);
  }
};

template <bool kAligned>
__device__ __forceinline__ void copy_floats(void* to, const float* from) {
  if constexpr (kAligned) {
    device::cp_async(device::shared_address(to), from);
  } else {
    Pack<float>::load<false>(from).template store<true>(static_cast<float*>(to));
  }
}

// Loads slots of the state, which are kv and the gate with its bias, from a stage.
struct StateLoader {
  struct Raw {};  // slots are read where they are used
  const Stage& stage;

  __device__ __forceinline__ Raw fetch(int, int) const { return {}; }
  __device__ __forceinline__ void kv(Raw, int, int j, float (&kv)[kColumns]) const {
    to_floats(stage.first[j][threadIdx.x], kv);
  }
  __device__ __forceinline__ void gate(Raw, int, int j, float (&gate)[kColumns]) const {
    to_floats(stage.second[j][threadIdx.x], gate);
  }
  static __device__ __forceinline__ void to_floats(const uint4& words, float (&x)[kColumns]) {
    x[0] = __uint_as_float(words.x);
    x[1] = __uint_as_float(words.y);
    x[2] = __uint_as_float(words.z);
    x[3] = __uint_as_float(words.w);
  }
};

// Loads a window from new tokens, and from the state what stands before them, by way of a stage.
// There, a slot in the state is kv and the gate with its bias. A new token of f32 is kv and the
// gate. Of a narrower new token, two neighbouring threads have the first half of what they have of
// other slots together: kv of both, then the gates of both; the second half is the bias. So all
// copies have 16 bytes, none depends on a branch, and the threads of a warp wait for each other
// before they read a stage, and before it is written again.
template <class T, bool kAligned>
struct WindowLoader : KeptSlots {
  static constexpr bool kPairs = kAligned && sizeof(T) < sizeof(float);
  struct Raw {};  // slots are read where they are used

  Walk<const T, StrideOf<kAligned>> kv_walk, gate_walk;  // as if all tokens were new
  Biases<kAligned> biases;
  Stage* stage;  // of the slots that are looked at

  __device__ __forceinline__ WindowLoader(const KernelParams& params, const NewTokens& tokens,
                                          unsigned w, int column, Stage* stages)
      : KeptSlots(params, tokens, w, column), biases(params.problem, column, 0), stage(stages) {
    const KernelProblem& p = params.problem;
    const bool second = kPairs && threadIdx.x % 2 == 1;
    const int token = tokens.token(w * p.ratio);
    kv_walk = slots_of<T, kAligned>(p, second ? p.gate : p.kv, token,
                                    second ? column - kColumns : column);
    gate_walk = slots_of<T, kAligned>(p, p.gate, token, column);
  }
  // Whether kSlotsAtOnce slots from `from` on are in the state, one behind the other.
  __device__ __forceinline__ bool are_kept(int from) const {
    const int end = from + kSlotsAtOnce;
    return end <= fresh && (place + from >= 0 || place + end <= 0) && (from >= own || end <= own);
  }
  __device__ __forceinline__ void copy_kept(int from) const {
    const float* kept = at(from);
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j, kept += stride) {
      copy_floats<kAligned>(&stage->first[j][threadIdx.x], kept);
      copy_floats<kAligned>(&stage->second[j][threadIdx.x], kept + columns);
    }
  }
  // Begins to copy slots [first, end) of those from `from` on.
  __device__ __forceinline__ void copy(int from, int first, int end) const {
    const auto thread = threadIdx.x;
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j) {
      if (from + j < first || from + j >= end) continue;
      uint4 &one = stage->first[j][thread], &two = stage->second[j][thread];
      if (is_new(from + j)) {
        copy_new(from, j, one, two);
      } else {
        copy_floats<kAligned>(&one, at(from + j));
        copy_floats<kAligned>(&two, at(from + j) + columns);
      }
    }
  }
  __device__ __forceinline__ Raw fetch(int, int) const { return {}; }
  __device__ __forceinline__ void kv(Raw, int from, int j, float (&kv)[kColumns]) const {
    if (kPairs && is_new(from + j)) {
      half_of_pair(j, 0).to_floats(kv);
    } else {
      to_floats(stage->first[j][threadIdx.x], kv);
    }
  }
  __device__ __forceinline__ void gate(Raw, int from, int j, float (&gate)[kColumns]) const {
    float second[kColumns];
    to_floats(stage->second[j][threadIdx.x], second);
    if (kPairs && is_new(from + j)) {
      half_of_pair(j, 1).to_floats(gate);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) gate[c] = __fadd_rn(gate[c], second[c]);
    } else if (kAligned && is_new(from + j)) {
      biases.add(Pack<float>::of(second), from, j, gate);
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) gate[c] = second[c];
    }
  }

 private:
  // The thread's columns of what the first or the second of two neighbours has copied for both.
  __device__ __forceinline__ auto half_of_pair(int j, unsigned second) const {
    using Half = std::conditional_t<kPairs, Pack<T>, Pack<float>>;
    const uint4& both = stage->first[j][(threadIdx.x & ~1u) + second];
    return *(reinterpret_cast<const Half*>(&both) + (kPairs ? threadIdx.x % 2 : 0));
  }
  static __device__ __forceinline__ void to_floats(const uint4& words, float (&x)[kColumns]) {
    StateLoader::to_floats(words, x);
  }
  static __device__ __forceinline__ void put(uint4& to, const float (&x)[kColumns]) {
    to = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
          __float_as_uint(x[3])};
  }
  __device__ __forceinline__ void copy_new(int from, int j, uint4& one, uint4& two) const {
    const auto* const kv = kv_walk.at(from, j, own);
    if constexpr (kAligned) {
      device::cp_async(device::shared_address(&one), kv);
      device::cp_async(device::shared_address(&two),
                       kPairs ? static_cast<const void*>(biases.walk.at(from, j, own))
                              : gate_walk.at(from, j, own));
    } else {
      float x[kColumns];
      Pack<T>::template load<false>(kv).to_floats(x);
      put(one, x);
      biases.add(Pack<T>::template load<false>(gate_walk.at(from, j, own)), from, j, x);
      put(two, x);
    }
  }
};

// Until all but the last `pending` groups of copies are there, for this warp.
__device__ __forceinline__ void wait_for_copies(int pending) {
  if (pending == 0) {
    device::cp_async_wait<0>();
  } else if (pending == 1) {
    device::cp_async_wait<1>();
  } else {
    device::cp_async_wait<kMostStages - 1>();
  }
  __syncwarp();  // the copies of the warp are there
}

// How often a thread goes through kSlotsAtOnce slots of a window.
WINNOW_HOST_DEVICE inline int rounds_of(int slots, const Team& team) {
  const int of_group = (slots + team.groups() - 1) >> team.groups_log;
  return (of_group + kSlotsAtOnce - 1) / kSlotsAtOnce;
}

// The sums of the thread's slots of a window from `first` on, as add_range() has them.
template <class T, bool kAligned>
__device__ __forceinline__ Sums sums_of(const KernelParams& params, const Thread& thread,
                                        WindowLoader<T, kAligned>& loader, int first, bool inside) {
  const KernelProblem& p = params.problem;
  const Range range(p, thread.group);
  const int rounds = rounds_of(p.slots(), p.team), stages = params.stages;
  Stage* const begin = loader.stage;
  Stage* const end = begin + stages;
  Stage *written = begin, *read = begin;
  const auto advance = [&](Stage*& stage) {
    if (++stage == end) stage = begin;
  };
  const auto is_whole = [&](int from) { return from >= first && from + kSlotsAtOnce <= range.end; };
  const auto copy = [&](int round) {
    __syncwarp();
    if (inside && round < rounds) {
      const int from = range.begin + round * kSlotsAtOnce;
      loader.stage = written;
      if (is_whole(from) && loader.are_kept(from)) {
        loader.copy_kept(from);
      } else {
        loader.copy(from, first, range.end);
      }
    }
    device::cp_async_commit();
    advance(written);
  };
  for (int round = 0; round < stages - 1; ++round) copy(round);
  Sums sums = Sums::of_none();
  for (int round = 0; round < rounds; ++round) {
    copy(round + stages - 1);
    wait_for_copies(stages - 1);
    loader.stage = read;
    advance(read);
    const int from = range.begin + round * kSlotsAtOnce;
    if (!inside) continue;
    if (is_whole(from) && loader.are_kept(from)) {
      add_slots<true>(StateLoader{*loader.stage}, from, first, range.end, sums);
    } else if (is_whole(from)) {
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

// Window w, where `inside`, into the row of its last token: average(row) gives what the row is
// before its norm. The whole block calls it.
template <class T, bool kAligned, class Average>
__device__ __forceinline__ void compute_window(const KernelParams& params, const Thread& thread,
                                               const NewTokens& tokens, unsigned w, bool inside,
                                               Exchange& exchange, BlockSlots& slots,
                                               const Average& average) {
  const KernelProblem& p = params.problem;
  const int column = thread.lane * kColumns;
  const std::int64_t token = tokens.token((w + 1) * p.ratio - 1);
  const bool stored = params.stored != Stored::nowhere;
  const bool leads = thread.lane == 0 && thread.group == 0;
  std::int64_t slot = -1;
  if (stored && leads && inside) slot = cache::read_slot(params.slots, token);
  const Factors<kAligned> factors(p, std::int64_t{w} * p.ratio, column);
  float row[kColumns];
  average(row);
  finish(p, thread, factors, exchange, row);
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
    const int packs = p.series * p.d / kColumns, token = first + i / packs,
              column = i % packs * kColumns;
    const std::int64_t at = tokens.begin + token;
    const auto load_from = [&](const Rows<const void*>& rows) {
      return Pack<T>::template load<kAligned>(static_cast<const T*>(rows.data) + at * rows.stride0 +
                                              column);
    };
    kv = load_from(p.kv);
    gate = load_from(p.gate);
    bias = Pack<float>::load<kAligned>(
        p.position_bias.data + (tokens.position + token) % p.ratio * p.position_bias.stride0 +
        column);
  }
  __device__ __forceinline__ void store(const KernelParams& params, const NewTokens& tokens,
                                        int first, int i) const {
    const KernelProblem& p = params.problem;
    const int columns = p.series * p.d, packs = columns / kColumns;
    float row[kColumns], logits[kColumns], biases[kColumns];
    kv.to_floats(row);
    gate.to_floats(logits);
    bias.to_floats(biases);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) logits[c] = __fadd_rn(logits[c], biases[c]);
    const unsigned position = tokens.position + first + i / packs;
    float* place = place_of(params, tokens.state, static_cast<int>(position % params.ring)) +
                   i % packs * kColumns;
    Pack<float>::of(row).template store<kAligned>(place);
    Pack<float>::of(logits).template store<kAligned>(place + columns);
  }
};

// ---- large windows that need the state, by clusters

// Blocks of a cluster. Each has a part of the columns of all windows of their sequences: it adds up
// the slots, with a thread for one column of a group's slots, and sends the rows before their norm
// to the block whose sequence it is. Each block reads the lists of all: if somebody rewrites them,
// rows may be those of other windows, but no block waits for what the others do not do.
constexpr int kParts = 8;
constexpr int kRoundsAhead = 7;  // that are copied while one is added

// Columns of a part; even, as windows of so many slots have 16 lanes at least.
__device__ __forceinline__ int part_columns(const Team& team) {
  return team.lanes() * kColumns / kParts;
}

// The shared memory of such a block.
struct Part {
  float *kv, *gate;  // [slots, columns of a part], of a window; the gates with their biases
  float* rows;       // [kMostWindows, kParts parts], of its sequence's windows
  SumsOf<1>* sums;   // [groups, columns of a part]

  __device__ __forceinline__ explicit Part(const KernelProblem& p)
      : kv(reinterpret_cast<float*>(device::dynamic_shared<16>())),
        gate(kv + p.slots() * part_columns(p.team)),
        rows(gate + p.slots() * part_columns(p.team)),
        sums(reinterpret_cast<SumsOf<1>*>(rows + kMostWindows * kParts * part_columns(p.team))) {}
  static std::int64_t bytes(const KernelProblem& p) {
    const std::int64_t columns = p.team.lanes() * kColumns;
    return (2 * p.slots() * columns / kParts + kMostWindows * columns) *
               std::int64_t{sizeof(float)} +
           kThreads * kColumns / kParts * std::int64_t{sizeof(SumsOf<1>)};
  }
};

// Slots of a part, of one column.
struct PartLoader {
  struct Raw {};  // slots are read where they are used
  const float *column_of_kv, *column_of_gate;
  int columns;

  __device__ __forceinline__ Raw fetch(int, int) const { return {}; }
  __device__ __forceinline__ void kv(Raw, int from, int j, float (&kv)[1]) const {
    kv[0] = column_of_kv[(from + j) * columns];
  }
  __device__ __forceinline__ void gate(Raw, int from, int j, float (&gate)[1]) const {
    gate[0] = column_of_gate[(from + j) * columns];
  }
};

// Copies of the block's columns, from `begin` on. New tokens become what the state has of them.
template <class T>
struct PartCopier {
  const KernelProblem& p;
  Part part;
  int packs, inside, column, first;  // packs of kColumns columns; the first slot that counts
  KeptSlots kept;
  SlotLoader<T, true> fresh;

  __device__ __forceinline__ PartCopier(const KernelParams& params, const NewTokens& tokens,
                                        unsigned w, int begin)
      : p(params.problem),
        part(p),
        packs(part_columns(p.team) / kColumns),
        inside(static_cast<int>(threadIdx.x) % packs * kColumns),
        column(begin + inside),
        first(w == 0 ? p.slots() - p.ratio : 0),
        kept(params, tokens, w, column),
        fresh(p, tokens.token(w * p.ratio), column) {}
  // Slots [from, from + kSlotsAtOnce) of each group.
  __device__ __forceinline__ void copy(int round) const {
    const int rows = kThreads / packs, of_groups = p.team.groups() * kSlotsAtOnce;
    for (int i = static_cast<int>(threadIdx.x) / packs; i < of_groups; i += rows) {
      const Range range(p, i / kSlotsAtOnce);
      const int slot = range.begin + round * kSlotsAtOnce + i % kSlotsAtOnce;
      if (slot >= first && slot < range.end && column < p.d) copy_slot(slot);
    }
    device::cp_async_commit();
  }

 private:
  __device__ __forceinline__ void copy_slot(int slot) const {
    float* const kv = part.kv + slot * part_columns(p.team) + inside;
    float* const gate = part.gate + slot * part_columns(p.team) + inside;
    if (!kept.is_new(slot)) {
      const float* const from = kept.at(slot);
      copy_floats<true>(kv, from);
      copy_floats<true>(gate, from + kept.columns);
      return;
    }
    const auto raw = fresh.fetch(slot, 0);
    float x[kColumns];
    fresh.kv(raw, slot, 0, x);
    Pack<float>::of(x).template store<true>(kv);
    fresh.gate(raw, slot, 0, x);
    Pack<float>::of(x).template store<true>(gate);
  }
};

// Adds up the block's columns of a window while later slots come, and divides: the parts of a row
// before its norm, with the bits that add_range(), add_groups() and divide() give, sent to the
// block `leader`. The window is the `number`th of its sequence.
template <class T>
__device__ __forceinline__ void add_up_part(const KernelParams& params, const NewTokens& tokens,
                                            unsigned w, int number, int rank, int leader) {
  const KernelProblem& p = params.problem;
  const int columns = part_columns(p.team), thread = static_cast<int>(threadIdx.x);
  const int inside = thread & (columns - 1), group = thread / columns;  // beyond the groups: idle
  const int rounds = rounds_of(p.slots(), p.team);
  const PartCopier<T> copier(params, tokens, w, rank * columns);
  const Part& part = copier.part;
  for (int round = 0; round < kRoundsAhead; ++round) copier.copy(round);
  const bool adds = group < p.team.groups();
  const Range range(p, adds ? group : 0);
  const PartLoader loader{part.kv + inside, part.gate + inside, columns};
  SumsOf<1> own = SumsOf<1>::of_none();
  for (int round = 0; round < rounds; ++round) {
    copier.copy(round + kRoundsAhead);
    device::cp_async_wait<kRoundsAhead>();
    __syncthreads();  // the round is there
    if (!adds || rank * columns + inside >= p.d) continue;
    const int from = range.begin + round * kSlotsAtOnce;
    if (from >= copier.first && from + kSlotsAtOnce <= range.end) {
      add_slots<true>(loader, from, copier.first, range.end, own);
    } else if (max(from, copier.first) < range.end) {
      add_slots<false>(loader, from, copier.first, range.end, own);
    }
  }
  if (adds) part.sums[thread] = own;
  __syncthreads();  // the sums of all groups are there
  if (thread >= columns / 2) return;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const SumsOf<1>* const of_group = part.sums + 2 * thread + i;
    SumsOf<1> all = *of_group;
    for (int other = 1; other < p.team.groups(); ++other) all.add(of_group[other * columns]);
    float average[1];
    divide(all, average);
    pair[i] = average[0];
  }
  float* const row = part.rows + (number * kParts + rank) * columns + 2 * thread;
  device::st_shared_cluster(
      device::map_shared(device::shared_address(row), static_cast<unsigned>(leader)),
      {pair[0], pair[1]});
}

// kClusters: large windows that need the state are clusters', and all is aligned.
template <class T, bool kAligned, bool kClusters>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    step_kernel(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED_ALIGNED(16, exchange, Exchange);
  WINNOW_BLOCK_SHARED(slots, BlockSlots);
  WINNOW_BLOCK_SHARED(works, Work[kParts]);  // of the cluster's sequences; else of the block's
  const KernelProblem& p = params.problem;
  const Thread thread(p.team);
  const int block = static_cast<int>(blockIdx.x), windows = p.team.windows();
  const int rank = kClusters ? block % kParts : 0;
  const bool has_column = thread.lane * kColumns < p.d, keeps = block < params.sequence_blocks;
  NewTokens tokens;
  unsigned w;
  bool inside;
  int left = windows;  // of the block
  if (kClusters && keeps) device::cluster_arrive();
  device::wait_for_kernel_before();
  device::allow_next_kernel();
  if (keeps) {
    const int own_thread = static_cast<int>(threadIdx.x);
    if (own_thread < (kClusters ? kParts : 1)) {
      works[own_thread].read(params, block - rank + own_thread);
    }
    __syncthreads();  // what the block does hangs on one reading, whoever rewrites the lists
    tokens = works[rank].tokens;
    if (!kClusters && tokens.count == 0) return;
    left = works[rank].windows;
    w = works[rank].w + thread.window;
    inside = thread.window < left && has_column;
  } else {
    const int token = (block - params.sequence_blocks) * windows + thread.window;
    tokens.read(params, place_before(p.cu_seqlens, p.n, token));
    const int at = token - tokens.begin;
    const unsigned position = tokens.position + at;
    w = position / p.ratio;
    const bool taken = at >= 0 && at < tokens.count && (position + 1) % p.ratio == 0 &&
                       w >= tokens.position / p.ratio + 2;
    if (!__syncthreads_or(taken)) return;
    inside = taken && has_column;
  }
  // The last of the new tokens, which the state keeps: those of the first round are on their way
  // while the windows are computed.
  const int kept_from = max(tokens.count - params.ring, 0);
  const int packs = keeps ? (tokens.count - kept_from) * (p.series * p.d / kColumns) : 0;
  int pack = static_cast<int>(threadIdx.x);
  Kept<T, kAligned> kept;
  if (packs > 0) kept.load(params, tokens, kept_from, min(pack, packs - 1));
  if constexpr (kClusters) {
    if (keeps) {
      device::cluster_wait();  // all blocks run before one sends
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const bool is_one =
          lane < kParts * kMostWindows && lane % kMostWindows < works[lane / kMostWindows].windows;
      for (unsigned all = __ballot_sync(device::kFullWarp, is_one); all != 0; all &= all - 1) {
        const int i = __ffs(static_cast<int>(all)) - 1;
        const int leader = i / kMostWindows, number = i % kMostWindows;
        const Work& work = works[leader];
        add_up_part<T>(params, work.tokens, work.w + number, number, rank, leader);
      }
      device::cluster_sync();  // the rows of all blocks are there
    }
  }
  for (int number = 0; left > 0; left -= windows, w += windows, ++number) {
    const bool computes = inside && thread.window < left;
    const auto average = [&](float(&row)[kColumns]) {
      if constexpr (kClusters) {
        if (keeps) {
          __syncthreads();  // the slot of the window before has been read
          const Part part(p);
          const int columns = p.team.lanes() * kColumns;
          Pack<float>::load<true>(part.rows + number * columns + thread.lane * kColumns)
              .to_floats(row);
          return;
        }
      }
      WindowLoader<T, kAligned> loader(params, tokens, w, thread.lane * kColumns,
                                       reinterpret_cast<Stage*>(device::dynamic_shared<16>()));
      Sums sums = sums_of(params, thread, loader, w == 0 ? loader.own : 0, computes);
      add_groups(p.team, thread, exchange, sums);
      divide(sums, row);
    };
    compute_window<T, kAligned>(params, thread, tokens, w, computes, exchange, slots, average);
  }
  if (!keeps) return;
  if (!kClusters) __syncthreads();  // the state has been read
  while (pack < packs) {
    kept.store(params, tokens, kept_from, pack);
    pack += kThreads;
    if (pack < packs) kept.load(params, tokens, kept_from, pack);
  }
}

template <class T>
void launch(const StepParams& params, const Packed& lists, const std::int32_t* state_slots,
            cudaStream_t stream) {
  const Problem& problem = params.problem;
  KernelParams kernel = {kernel_problem_of(problem, lists),
                         1,
                         0,
                         state_slots,
                         params.state.as<float>(),
                         static_cast<int>(params.states < INT32_MAX ? params.states : INT32_MAX),
                         static_cast<int>(params.ring < INT32_MAX ? params.ring : INT32_MAX),
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
  const std::int64_t others =
      problem.tokens <= 2 * problem.ratio ? 0 : (problem.tokens + windows - 1) / windows;
  const int rounds = rounds_of(kernel.problem.slots(), kernel.problem.team);
  constexpr int kStatic = sizeof(Exchange) + sizeof(BlockSlots) + kParts * sizeof(Work) + 64;
  const int most = kRuntime.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStatic;
  if (rounds > 1) {  // as many stages as there is room for
    kernel.stages = std::clamp(most / int{sizeof(Stage)}, 1, std::min(rounds, kMostStages));
  }
  const std::int64_t part_bytes = Part::bytes(kernel.problem);
  const bool is_sm90 = kRuntime.attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  const bool clusters = aligned && rounds > 1 && part_bytes <= most && is_sm90;
  const auto in_clusters = [&](std::int64_t blocks) {
    return clusters ? (blocks + kParts - 1) / kParts * kParts : blocks;
  };
  kernel.sequence_blocks = static_cast<int>(in_clusters(n));
  std::int64_t bytes = kernel.stages * std::int64_t{sizeof(Stage)};
  if (clusters) bytes = others > 0 ? std::max(bytes, part_bytes) : part_bytes;
  auto* const function = clusters  ? step_kernel<T, true, true>
                         : aligned ? step_kernel<T, true, false>
                                   : step_kernel<T, false, false>;
  kRuntime.allow_shared_memory(function, static_cast<int>(bytes));
  const auto grid = static_cast<int>(in_clusters(n) + in_clusters(others));
  const auto shared = static_cast<std::size_t>(bytes);
  if (!is_sm90) {
    kRuntime.launch(function, grid, kThreads, shared, stream, kernel);
  } else if (clusters) {
    kRuntime.check(
        device::launch_clusters_early(function, kParts, grid, kThreads, shared, stream, kernel),
        "launch");
  } else {
    kRuntime.check(device::launch_early(function, grid, kThreads, shared, stream, kernel),
                   "launch");
  }
}

}  // namespace

void step_cuda(const StepParams& params, const Packed& lists, const std::int32_t* state_slots,
               void* stream) {
  with_elements(params.problem.dtype, [&]<class T>(T) {
    launch<T>(params, lists, state_slots, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace winnow::compressor
