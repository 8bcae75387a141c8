// Steps on CUDA, in one launch. The first blocks have a sequence each: they compute the windows
// that need the state, and then write the new tokens into it. The other blocks have a team for
// every new token, which computes the window that the token completes from new tokens alone.
#include <cuda_runtime.h>

#include "winnow/cache/write_row.cuh"
#include "winnow/compressor/step/step_impl.h"
#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/runtime.h"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::step", "cuda"};

using sparse_mla::CacheFormat;

enum class Stored { nowhere, fp8_584, bf16, pages };

struct KernelParams {
  KernelProblem problem;
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

// kv of a token in the state, by its place in the ring; its gate with the bias is series * d behind
// it.
__device__ __forceinline__ float* place_of(const KernelParams& params, int state, int place) {
  return params.state.data + state * params.state.stride0 + place * params.state.stride1;
}

// Loads from the new tokens, and from the state what stands before them. There is no branch between
// loads here either: of a slot in the state they are kv and the gate with its bias, of a new token
// kv, the gate, and the bias.
template <class T, bool kAligned>
struct StateLoader {
  static constexpr bool kNarrow = sizeof(T) < sizeof(float);
  struct Raw {
    Pack<float> first, second, bias;
  };

  int ring, columns, series;      // the columns of all series, and of those before the own one
  int place, fresh;               // slot 0 in the ring, below 0: behind its end; the first new slot
  const float* state;             // the thread's columns of the first place
  std::int64_t stride;            // between places
  SlotLoader<T, kAligned> token;  // as if all tokens of the window were new

  __device__ __forceinline__ StateLoader(const KernelParams& params, const NewTokens& tokens,
                                         unsigned w, int column)
      : ring(params.ring),
        columns(params.problem.series * params.problem.d),
        series((params.problem.series - 1) * params.problem.d),
        state(place_of(params, tokens.state, 0) + column),
        stride(params.state.stride1),
        token(params.problem, tokens.token(w * params.problem.ratio), column) {
    const unsigned end = (w + 1) * params.problem.ratio;
    place = static_cast<int>((end - 1) % ring) + 1 - params.problem.slots();
    fresh = params.problem.slots() - static_cast<int>(end - tokens.position);
  }
  __device__ __forceinline__ bool is_new(int from, int j) const { return from + j >= fresh; }
  __device__ __forceinline__ Raw fetch(int from, int j) const {
    const int at = place + from + j;
    const float* kept =
        state + (at < 0 ? at + ring : at) * stride + (from + j < token.own ? 0 : series);
    const bool is_fresh = is_new(from, j);
    const float* bias = token.biases.walk.at(from, j, token.own);
    if constexpr (kAligned && kNarrow) {  // a pack of kv's type has half the words of one of floats
      const auto load = [&](const void* mine, const void* theirs) {
        return *static_cast<const uint2*>(is_fresh ? mine : theirs);
      };
      const uint2 a = load(token.kv_walk.at(from, j, token.own), kept),
                  b = load(token.gate_walk.at(from, j, token.own), kept + 2),
                  c = load(bias, kept + columns), d = load(bias + 2, kept + columns + 2);
      return {of_words(a, b), of_words(c, d)};
    } else if constexpr (kAligned) {
      const float* kv = token.kv_walk.at(from, j, token.own);
      const float* gate = token.gate_walk.at(from, j, token.own);
      return {Pack<float>::load<true>(is_fresh ? kv : kept),
              Pack<float>::load<true>(is_fresh ? gate : kept + columns),
              Pack<float>::load<true>(bias)};
    } else {
      if (!is_fresh) {
        return {Pack<float>::load<false>(kept), Pack<float>::load<false>(kept + columns)};
      }
      const auto raw = token.fetch(from, j);
      float kv[kColumns], gate[kColumns];
      raw.kv.to_floats(kv);
      raw.gate.to_floats(gate);
      return {Pack<float>::of(kv), Pack<float>::of(gate), Pack<float>::load<false>(bias)};
    }
  }
  __device__ __forceinline__ void kv(const Raw& raw, int from, int j, float (&kv)[kColumns]) const {
    raw.first.to_floats(kv);
    if constexpr (kAligned && kNarrow) {
      if (is_new(from, j)) narrow(raw.first.words.x, raw.first.words.y).to_floats(kv);
    }
  }
  __device__ __forceinline__ void gate(const Raw& raw, int from, int j,
                                       float (&gate)[kColumns]) const {
    raw.second.to_floats(gate);
    if (!is_new(from, j)) return;
    float bias[kColumns];
    if constexpr (kAligned && kNarrow) {
      raw.second.to_floats(bias);
      narrow(raw.first.words.z, raw.first.words.w).to_floats(gate);
    } else {
      raw.bias.to_floats(bias);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) gate[c] = __fadd_rn(gate[c], bias[c]);
  }

 private:
  static __device__ __forceinline__ Pack<float> of_words(uint2 a, uint2 b) {
    return {
        {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(b.x), __uint_as_float(b.y)}};
  }
  static __device__ __forceinline__ Pack<T> narrow(float x, float y) {
    return {{__float_as_uint(x), __float_as_uint(y)}};
  }
};

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

// Window w, where `inside`, into the row of its last token. The whole block calls it.
template <class T, bool kAligned, class Loader>
__device__ __forceinline__ void compute_window(const KernelParams& params, const Thread& thread,
                                               const NewTokens& tokens, const Loader& loader,
                                               unsigned w, bool inside, Exchange& exchange,
                                               BlockSlots& slots) {
  const KernelProblem& p = params.problem;
  const int column = thread.lane * kColumns;
  const std::int64_t token = tokens.token((w + 1) * p.ratio - 1);
  const bool stored = params.stored != Stored::nowhere;
  const bool leads = thread.lane == 0 && thread.group == 0;
  std::int64_t slot = -1;
  if (stored && leads && inside) slot = cache::read_slot(params.slots, token);
  const Factors<kAligned> factors(p, std::int64_t{w} * p.ratio, column);
  Sums sums = Sums::of_none();
  if (inside) add_range(loader, Range(p, thread.group), w == 0 ? p.slots() - p.ratio : 0, sums);
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

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    step_kernel(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED(exchange, Exchange);
  WINNOW_BLOCK_SHARED(slots, BlockSlots);
  const KernelProblem& p = params.problem;
  const Thread thread(p.team);
  const int block = static_cast<int>(blockIdx.x), windows = p.team.windows();
  const int column = thread.lane * kColumns;
  if (block < p.n) {
    WINNOW_BLOCK_SHARED(shared, NewTokens);
    if (threadIdx.x == 0) shared.read(params, block);
    __syncthreads();  // what the block does hangs on one reading, whoever rewrites the lists
    const NewTokens tokens = shared;
    if (tokens.count == 0) return;
    const unsigned first = tokens.position / p.ratio;
    const unsigned complete = (tokens.position + tokens.count) / p.ratio - first;
    // The last of the new tokens, which the state keeps: those of the first round are on their way
    // while the windows are computed.
    const int kept_from = max(tokens.count - params.ring, 0);
    const int packs = (tokens.count - kept_from) * (p.series * p.d / kColumns);
    int pack = static_cast<int>(threadIdx.x);
    Kept<T, kAligned> kept;
    kept.load(params, tokens, kept_from, min(pack, packs - 1));
    // A window has tokens of up to two windows' length, so that two can need the state.
    const int most = static_cast<int>(min(complete, 2u));
    for (int i = 0; i < most; i += windows) {
      const unsigned w = first + i + thread.window;
      const StateLoader<T, kAligned> loader(params, tokens, w, column);
      compute_window<T, kAligned>(params, thread, tokens, loader, w,
                                  i + thread.window < most && column < p.d, exchange, slots);
    }
    __syncthreads();  // the state has been read
    while (pack < packs) {
      kept.store(params, tokens, kept_from, pack);
      pack += kThreads;
      if (pack < packs) kept.load(params, tokens, kept_from, pack);
    }
    return;
  }
  const int token = (block - p.n) * windows + thread.window;
  NewTokens tokens;
  tokens.read(params, place_before(p.cu_seqlens, p.n, token));
  const int at = token - tokens.begin;
  const unsigned position = tokens.position + at, w = position / p.ratio;
  const bool taken = at >= 0 && at < tokens.count && (position + 1) % p.ratio == 0 &&
                     w >= tokens.position / p.ratio + 2;
  if (!__syncthreads_or(taken)) return;
  const SlotLoader<T, kAligned> loader(p, std::int64_t{token} + 1 - p.ratio, column);
  compute_window<T, kAligned>(params, thread, tokens, loader, w, taken && column < p.d, exchange,
                              slots);
}

template <class T>
void launch(const StepParams& params, const Packed& lists, const std::int32_t* state_slots,
            cudaStream_t stream) {
  const Problem& problem = params.problem;
  const KernelParams kernel = {
      kernel_problem_of(problem, lists),
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
  kRuntime.launch(aligned ? step_kernel<T, true> : step_kernel<T, false>,
                  static_cast<unsigned>(n + others), kThreads, 0, stream, kernel);
}

}  // namespace

void step_cuda(const StepParams& params, const Packed& lists, const std::int32_t* state_slots,
               void* stream) {
  with_elements(params.problem.dtype, [&]<class T>(T) {
    launch<T>(params, lists, state_slots, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace winnow::compressor
