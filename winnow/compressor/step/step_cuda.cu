// Steps on CUDA, in one launch. The first blocks have a sequence each: they compute the windows
// that need the state, and then write the new tokens into it. The other blocks have a team for
// every new token, which computes the window that the token completes from new tokens alone.
#include "winnow/compressor/step/step_impl.h"
#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/runtime.h"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::step", "cuda"};

struct KernelParams {
  KernelProblem problem;
  const std::int32_t* state_slots;
  Rows<float*> state;
  int states, ring;
  bool wide;  // rows are floats, not as kv
  Rows<void*> rows;
};

// The new tokens of a sequence; none where it is left out.
struct NewTokens {
  int begin, count, state;
  std::int64_t position;  // of the first

  __device__ void read(const KernelParams& params, int sequence) {
    const KernelProblem& p = params.problem;
    state = static_cast<const volatile std::int32_t*>(params.state_slots)[sequence];
    position = static_cast<const volatile std::int32_t*>(p.first_position)[sequence];
    begin = read_clamped(p.cu_seqlens, sequence, p.tokens);
    const int end = read_clamped(p.cu_seqlens, sequence + 1, p.tokens);
    const bool taken = state >= 0 && state < params.states && position >= 0;
    count = taken ? max(end - begin, 0) : 0;
  }
};

// kv of the token at that position; its gate with the bias is series * d behind it.
__device__ __forceinline__ float* place_of(const KernelParams& params, const NewTokens& tokens,
                                           std::int64_t position) {
  return params.state.data + tokens.state * params.state.stride0 +
         position % params.ring * params.state.stride1;
}

// Loads from the new tokens, and from the state what stands before them.
template <class T, bool kAligned>
struct StateLoader {
  struct Raw {
    Pack<float> kv, gate;
  };

  const KernelParams& params;
  const NewTokens& tokens;
  std::int64_t begin;             // the position of slot 0
  int column;                     // the thread's first
  SlotLoader<T, kAligned> token;  // as if all tokens of the window were new

  __device__ __forceinline__ StateLoader(const KernelParams& given, const NewTokens& of_sequence,
                                         std::int64_t w, int first_column)
      : params(given),
        tokens(of_sequence),
        begin((w + 1) * given.problem.ratio - given.problem.slots()),
        column(first_column),
        token(given.problem, of_sequence.begin + w * given.problem.ratio - of_sequence.position,
              first_column) {}
  __device__ __forceinline__ Raw fetch(int from, int j) const {
    const KernelProblem& p = params.problem;
    const std::int64_t position = begin + from + j;
    if (position < tokens.position) {
      const float* place = place_of(params, tokens, position) + column +
                           (from + j < token.own ? 0 : (p.series - 1) * p.d);
      return {Pack<float>::load<kAligned>(place),
              Pack<float>::load<kAligned>(place + p.series * p.d)};
    }
    const auto raw = token.fetch(from, j);
    float kv[kColumns], gate[kColumns];
    token.kv(raw, kv);
    token.gate(raw, from, j, gate);
    return {Pack<float>::of(kv), Pack<float>::of(gate)};
  }
  __device__ __forceinline__ void kv(const Raw& raw, float (&kv)[kColumns]) const {
    raw.kv.to_floats(kv);
  }
  __device__ __forceinline__ void gate(const Raw& raw, int, int, float (&gate)[kColumns]) const {
    raw.gate.to_floats(gate);
  }
};

// Window w, where `inside`, into the row of its last token. The whole block calls it.
template <class T, bool kAligned, class Loader>
__device__ __forceinline__ void compute_window(const KernelParams& params, const Thread& thread,
                                               const NewTokens& tokens, const Loader& loader,
                                               std::int64_t w, bool inside, Exchange& exchange) {
  const KernelProblem& p = params.problem;
  const int column = thread.lane * kColumns;
  const Factors<kAligned> factors(p, w * p.ratio, column);
  Sums sums = Sums::of_none();
  if (inside) add_range(loader, Range(p, thread.group), w == 0 ? p.slots() - p.ratio : 0, sums);
  add_groups(p.team, thread, exchange, sums);
  float row[kColumns];
  finish(p, thread, factors, exchange, sums, row);
  if (!inside || thread.group != 0) return;
  const std::int64_t token = tokens.begin + (w + 1) * p.ratio - 1 - tokens.position;
  store_columns<T, kAligned>(params.rows.data, token * params.rows.stride0 + column, params.wide,
                             row);
}

// Writes the last of the new tokens into the state.
template <class T, bool kAligned>
__device__ __forceinline__ void keep(const KernelParams& params, const NewTokens& tokens) {
  const KernelProblem& p = params.problem;
  const int columns = p.series * p.d, packs = columns / kColumns;
  const int first = max(tokens.count - params.ring, 0);
  for (int i = static_cast<int>(threadIdx.x); i < (tokens.count - first) * packs; i += kThreads) {
    const int token = first + i / packs, column = i % packs * kColumns;
    const std::int64_t position = tokens.position + token, at = tokens.begin + token;
    float kv[kColumns], gate[kColumns], bias[kColumns];
    const auto load = [&](const Rows<const void*>& rows, float(&x)[kColumns]) {
      Pack<T>::template load<kAligned>(static_cast<const T*>(rows.data) + at * rows.stride0 +
                                       column)
          .to_floats(x);
    };
    load(p.kv, kv);
    load(p.gate, gate);
    Pack<float>::load<kAligned>(p.position_bias.data +
                                position % p.ratio * p.position_bias.stride0 + column)
        .to_floats(bias);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) gate[c] = __fadd_rn(gate[c], bias[c]);
    float* place = place_of(params, tokens, position) + column;
    Pack<float>::of(kv).template store<kAligned>(place);
    Pack<float>::of(gate).template store<kAligned>(place + columns);
  }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    step_kernel(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED(exchange, Exchange);
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
    const std::int64_t first = tokens.position / p.ratio;
    const std::int64_t complete = (tokens.position + tokens.count) / p.ratio - first;
    // A window has tokens of up to two windows' length, so that two can need the state.
    const int most = static_cast<int>(min(complete, std::int64_t{2}));
    for (int i = 0; i < most; i += windows) {
      const std::int64_t w = first + i + thread.window;
      const StateLoader<T, kAligned> loader(params, tokens, w, column);
      compute_window<T, kAligned>(params, thread, tokens, loader, w,
                                  i + thread.window < most && column < p.d, exchange);
    }
    __syncthreads();  // the state has been read
    keep<T, kAligned>(params, tokens);
    return;
  }
  const int token = (block - p.n) * windows + thread.window;
  NewTokens tokens;
  tokens.read(params, place_before(p.cu_seqlens, p.n, token));
  const int at = token - tokens.begin;
  const std::int64_t position = tokens.position + at, w = position / p.ratio;
  const bool taken = at >= 0 && at < tokens.count && (position + 1) % p.ratio == 0 &&
                     w >= tokens.position / p.ratio + 2;
  if (!__syncthreads_or(taken)) return;
  const SlotLoader<T, kAligned> loader(p, std::int64_t{token} + 1 - p.ratio, column);
  compute_window<T, kAligned>(params, thread, tokens, loader, w, taken && column < p.d, exchange);
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
      params.rows};
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
