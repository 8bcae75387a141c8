// What the kernels of backward on CUDA have in common: their parameters, the windows that a block
// has, and where the slots of a window are. Included by backward_cuda.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/shared.cuh"

namespace winnow::compressor::cuda {

inline constexpr unsigned kStages = 2;

// How the windows of a call are shared out. A warp has all slots of some neighbouring columns: its
// team is that of these columns. Blocks have some of a window's columns, and windows in turn.
struct Shares {
  int warps_log = 0;  // of a block that have the same window
  int blocks = 1;     // that have the columns of a window
  int parts = 1;      // that windows are dealt out to: so many have the same columns
};

// What a window's norm needs: the gradient of x, a sum before the norm, is
// rstd * (gradient - x * part).
struct Norm {
  float rstd, part;
};

struct KernelParams {
  KernelProblem problem;
  Shares shares;
  int num_rows;
  bool wide_rows, wide_d_rows, wide_kv, wide_gate;  // floats, not as kv
  Rows<const void*> rows, d_rows;
  const float* rstd;
  Rows<void*> d_kv, d_gate;
  Rows<float*> d_position_bias;
  float* d_norm_weight;
  // Sums of each part: [parts, slots, d], then [parts, d].
  float *bias_parts, *norm_parts;
  Norm* norms;  // of each row; not for large windows
};

// ---- the windows of a block

// A window: its first own token, and the position of that.
struct alignas(16) Spot {
  enum Kind : std::int32_t { none, first, other };  // first: of its sequence
  std::int32_t token;
  Kind kind;
  std::int64_t position;
};

// The next windows of a block: those that its warps have at a time one after the other.
struct Course {
  static constexpr unsigned kWindows = 32;
  Spot spots[kWindows];
  Norm norms[kWindows];
};

template <class T, bool kAligned>
__device__ __forceinline__ Pack<T> load_pack(const Rows<const void*>& rows, int row, int column) {
  return Pack<T>::template load<kAligned>(static_cast<const T*>(rows.data) + row * rows.stride0 +
                                          column);
}
// Four neighbouring columns of a row. kAligned: it is of kv's type.
template <class T, bool kAligned>
__device__ __forceinline__ void load_columns(const Rows<const void*>& rows, int row, int column,
                                             bool wide, float (&x)[kColumns]) {
  if (!kAligned && wide) {
    load_pack<float, false>(rows, row, column).to_floats(x);
  } else {
    load_pack<T, kAligned>(rows, row, column).to_floats(x);
  }
}

// The windows of rows that a block goes through: of `1 << log` rows from `first` on, and of as many
// `stride` further on, again and again.
struct Rounds {
  int first, stride, log;
  __device__ __forceinline__ int row(int i) const {
    return first + (i >> log) * stride + (i & ((1 << log) - 1));
  }
};

__device__ __forceinline__ Spot find_spot(const KernelParams& params, int row) {
  const Place place = row < params.num_rows ? Windows().of_row(params.problem, row) : Place();
  return {place.token,
          !place.found        ? Spot::none
          : place.window == 0 ? Spot::first
                              : Spot::other,
          place.position};
}

// Finds the next windows. The whole block calls it, behind wait_for_kernel_before().
__device__ __forceinline__ void find_windows(const KernelParams& params, const Rounds& rounds,
                                             Course& course) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // the windows have been read
  if (thread < int{Course::kWindows}) {
    const int row = rounds.row(thread);
    course.spots[thread] = find_spot(params, row);
    if (params.problem.norm_weight != nullptr && row < params.num_rows) {
      course.norms[thread] = params.norms[row];
    }
  }
  __syncthreads();  // the windows are there
}

// ---- the slots of a window

// Where a thread's slots of windows are in a tensor: those from `begin` on.
template <class T, class Stride>
struct Slots {
  Walk<T, Stride> of_none;  // of a window whose first own token would be 0

  __device__ __forceinline__ Slots(T* data, std::int64_t stride, const KernelProblem& p, int begin,
                                   int column)
      : of_none(of_none.of(data + (begin - (p.slots() - p.ratio)) * stride + column, stride,
                           (p.series - 1) * p.d)) {}
  __device__ __forceinline__ Walk<T, Stride> of(const Spot& spot) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return {reinterpret_cast<T*>(reinterpret_cast<Byte*>(of_none.first) +
                                 std::int64_t{spot.token} * of_none.stride),
            of_none.stride, of_none.jump};
  }
};
template <bool kAligned, class T, class Pointer>
__device__ __forceinline__ Slots<T, StrideOf<kAligned>> slots_in(const Rows<Pointer>& rows,
                                                                 const KernelProblem& p, int begin,
                                                                 int column) {
  return {static_cast<T*>(rows.data), rows.stride0, p, begin, column};
}

// What no window of the sequence writes is 0. By the whole block.
template <class T, bool kAligned>
__device__ void clear_sequence(const KernelParams& params, int sequence) {
  const KernelProblem& p = params.problem;
  // Columns [first, first + count) of some tokens.
  const auto clear = [&](int token, int tokens, int first, int count) {
    const float zeros[kColumns] = {};
    const int step = static_cast<int>(blockDim.x) * kColumns;
    for (int i = static_cast<int>(threadIdx.x) * kColumns; i < tokens * count; i += step) {
      const std::int64_t at = token + i / count;
      const int column = first + i % count;
      store_columns<T, kAligned>(params.d_kv.data, at * params.d_kv.stride0 + column,
                                 params.wide_kv, zeros);
      store_columns<T, kAligned>(params.d_gate.data, at * params.d_gate.stride0 + column,
                                 params.wide_gate, zeros);
    }
  };
  const int begin = read_clamped(p.cu_seqlens, sequence, p.tokens);
  const int length = max(read_clamped(p.cu_seqlens, sequence + 1, p.tokens) - begin, 0);
  const int complete = length / p.ratio * p.ratio;
  clear(begin + complete, length - complete, 0, p.series * p.d);
  if (p.series == 2 && complete > 0) clear(begin + complete - p.ratio, p.ratio, 0, p.d);
}
template <class T, bool kAligned>
__device__ __forceinline__ void clear_sequences(const KernelParams& params) {
  for (int i = static_cast<int>(blockIdx.x); i < params.problem.n;
       i += static_cast<int>(gridDim.x)) {
    clear_sequence<T, kAligned>(params, i);
  }
}

}  // namespace winnow::compressor::cuda
