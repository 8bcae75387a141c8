// One window on CUDA: its sum, and the row that is made of it. Shared by the kernels, which so give
// bitwise the same rows. Included by .cu files.
//
// A team of threads has a window: `lanes` threads have neighbouring columns, and `groups` of so
// many threads have a range of its slots each. How many groups there are depends on the shape of a
// window alone, and the lanes' sums have one order however many lanes there are. Products and sums
// are written so that the compiler has no choice how to contract them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "winnow/compressor/problem.h"
#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"

namespace winnow::compressor::cuda {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kBlocksOfSm = 2;
inline constexpr int kColumns = 4;      // of a thread, neighbours
inline constexpr int kSlotsAtOnce = 8;  // that a thread loads before it uses one of them

// The logarithms of what are powers of two.
struct Team {
  int lanes_log = 0, groups_log = 0;
  WINNOW_HOST_DEVICE int lanes() const { return 1 << lanes_log; }
  WINNOW_HOST_DEVICE int groups() const { return 1 << groups_log; }
  WINNOW_HOST_DEVICE int threads_log() const { return lanes_log + groups_log; }
  WINNOW_HOST_DEVICE int threads() const { return 1 << threads_log(); }
  WINNOW_HOST_DEVICE int windows() const { return kThreads >> threads_log(); }  // of a block
};

// The logarithm of the power of two from which on `of_each` at a time are at least `count`.
inline int log_above(std::int64_t count, std::int64_t of_each) {
  return std::bit_width(static_cast<std::uint64_t>((count + of_each - 1) / of_each - 1));
}

inline Team team_of(const Problem& problem) {
  constexpr int kThreadsLog = std::bit_width(unsigned{kThreads}) - 1;
  Team team;
  team.lanes_log = log_above(problem.d, kColumns);
  team.groups_log =
      std::min(log_above(problem.slots(), kSlotsAtOnce), kThreadsLog - team.lanes_log);
  return team;
}

// What the kernels know of a call.
struct KernelProblem {
  Team team;
  int tokens = 0, n = 0, ratio = 1, d = 0, series = 1, pairs = 0;
  std::int64_t positions = 0;  // rows of cos
  bool hadamard = false;
  float eps = 0, inverse_d = 1;
  Rows<const void*> kv, gate;
  Rows<const float*> position_bias, cos, sin;
  const float* norm_weight = nullptr;
  const std::int32_t *cu_seqlens = nullptr, *cu_rows = nullptr, *first_position = nullptr;

  WINNOW_HOST_DEVICE int slots() const { return series * ratio; }
};

// `lists`: what says where the sequences are, on the device; some may be absent.
inline KernelProblem kernel_problem_of(const Problem& p, const Packed& lists) {
  const auto list_of = [](const ConstTensorView& view) {
    return view.present() ? static_cast<const std::int32_t*>(view.data()) : nullptr;
  };
  return {.team = team_of(p),
          .tokens = static_cast<int>(p.tokens),
          .n = static_cast<int>(lists.cu_seqlens.size(0) - 1),
          .ratio = static_cast<int>(p.ratio),
          .d = static_cast<int>(p.d),
          .series = static_cast<int>(p.series()),
          .pairs = static_cast<int>(p.pairs),
          .positions = p.positions,
          .hadamard = p.hadamard,
          .eps = static_cast<float>(p.eps),
          .inverse_d = 1 / static_cast<float>(p.d),
          .kv = p.kv,
          .gate = p.gate,
          .position_bias = p.position_bias.as<const float>(),
          .cos = p.cos.as<const float>(),
          .sin = p.sin.as<const float>(),
          .norm_weight = static_cast<const float*>(p.norm_weight),
          .cu_seqlens = list_of(lists.cu_seqlens),
          .cu_rows = list_of(lists.cu_rows),
          .first_position = list_of(lists.first_position)};
}

// Whether threads can move their columns of these rows at once, and the rows of a window are near
// enough for offsets of 32 bits. The kernels are compiled for both.
template <class Pointer>
bool aligned_rows(const Rows<Pointer>& rows, std::int64_t element_bytes) {
  constexpr std::int64_t kNear = INT32_MAX / (2 * kMostRatio * std::int64_t{sizeof(double)});
  const auto multiple = [](std::int64_t bytes) { return bytes % 16 == 0; };
  return multiple(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.data))) &&
         multiple(rows.stride0 * element_bytes) && multiple(rows.stride1 * element_bytes) &&
         rows.stride0 < kNear && rows.stride0 > -kNear;
}
inline bool aligned_inputs(const Problem& p) {
  const std::int64_t bytes = size_of(p.dtype);
  const Rows<const void*> norm_weight{p.norm_weight};
  return aligned_rows(p.kv, bytes) && aligned_rows(p.gate, bytes) &&
         aligned_rows(p.position_bias, sizeof(float)) && aligned_rows(norm_weight, sizeof(float));
}
template <bool kAligned>
using StrideOf = std::conditional_t<kAligned, int, std::int64_t>;

// ---- elements

// function(T()) for the dtype of kv and gate.
template <class Function>
void with_elements(DType dtype, const Function& function) {
  if (dtype == DType::f16) {
    function(__half());
  } else if (dtype == DType::bf16) {
    function(__nv_bfloat16());
  } else {
    function(float());
  }
}

// The columns of a thread, as they are in memory.
template <class T>
struct Pack {
  uint2 words;

  template <bool kAligned>
  static __device__ __forceinline__ Pack load(const T* from) {
    const auto* bits = reinterpret_cast<const unsigned short*>(from);
    if constexpr (kAligned) return {*reinterpret_cast<const uint2*>(bits)};
    return {{bits[0] | unsigned{bits[1]} << 16, bits[2] | unsigned{bits[3]} << 16}};
  }
  template <bool kAligned>
  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kAligned) {
      *reinterpret_cast<uint2*>(to) = words;
    } else {
      auto* bits = reinterpret_cast<unsigned short*>(to);
      bits[0] = static_cast<unsigned short>(words.x);
      bits[1] = static_cast<unsigned short>(words.x >> 16);
      bits[2] = static_cast<unsigned short>(words.y);
      bits[3] = static_cast<unsigned short>(words.y >> 16);
    }
  }
  __device__ __forceinline__ void to_floats(float (&x)[kColumns]) const {
    const unsigned both[2] = {words.x, words.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        x[2 * i] = __uint_as_float(both[i] << 16);
        x[2 * i + 1] = __uint_as_float(both[i] & 0xffff0000u);
      } else {
        x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(both[i])));
        x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(both[i] >> 16)));
      }
    }
  }
  static __device__ __forceinline__ Pack of(const float (&x)[kColumns]) {
    const auto word = [](float a, float b) -> unsigned {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return device::pack_bf16(a, b);
      } else {
        return __half_as_ushort(__float2half_rn(a)) | unsigned{__half_as_ushort(__float2half_rn(b))}
                                                          << 16;
      }
    };
    return {{word(x[0], x[1]), word(x[2], x[3])}};
  }
};
template <>
struct Pack<float> {
  float4 words;

  template <bool kAligned>
  static __device__ __forceinline__ Pack load(const float* from) {
    if constexpr (kAligned) return {*reinterpret_cast<const float4*>(from)};
    return {{from[0], from[1], from[2], from[3]}};
  }
  template <bool kAligned>
  __device__ __forceinline__ void store(float* to) const {
    if constexpr (kAligned) {
      *reinterpret_cast<float4*>(to) = words;
    } else {
      to[0] = words.x;
      to[1] = words.y;
      to[2] = words.z;
      to[3] = words.w;
    }
  }
  __device__ __forceinline__ void to_floats(float (&x)[kColumns]) const {
    x[0] = words.x;
    x[1] = words.y;
    x[2] = words.z;
    x[3] = words.w;
  }
  static __device__ __forceinline__ Pack of(const float (&x)[kColumns]) {
    return {{x[0], x[1], x[2], x[3]}};
  }
};

// Stores the columns of a row as kv's type T, or as floats.
template <class T, bool kAligned>
__device__ __forceinline__ void store_columns(void* data, std::int64_t at, bool wide,
                                              const float (&x)[kColumns]) {
  if (wide) {
    Pack<float>::of(x).template store<kAligned>(static_cast<float*>(data) + at);
  } else {
    Pack<T>::of(x).template store<kAligned>(static_cast<T*>(data) + at);
  }
}

// ---- places

// A thread's place in its block.
struct Thread {
  int lane, group, window;
  __device__ explicit Thread(const Team& team) {
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread & (team.lanes() - 1);
    group = thread >> team.lanes_log & (team.groups() - 1);
    window = thread >> team.threads_log();
  }
};

// The numbers of a list are read as they are in memory while the kernel runs; each is read once and
// brought into its range before it is used, so that no number leads out of a tensor.
__device__ __forceinline__ int read_clamped(const std::int32_t* list, int at, int most) {
  return min(max(static_cast<const volatile std::int32_t*>(list)[at], 0), most);
}

// The last place in [0, n) whose number is at most `x`; 0 where none is.
__device__ __forceinline__ int place_before(const std::int32_t* list, int n, int x) {
  int low = 0, high = n - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (static_cast<const volatile std::int32_t*>(list)[middle] <= x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// A window of a sequence, whose own tokens are `token` and on; not found: there is none.
struct Place {
  bool found = false;
  int token = 0, window = 0;
  std::int64_t position = 0;  // of that token
};

// Finds the windows of rows that are asked for in rising order: the lists are read where a sequence
// begins.
class Windows {
 public:
  __device__ __forceinline__ Place of_row(const KernelProblem& p, int row) {
    if (row >= next_row_) read(p, row);
    Place place;
    place.window = row - row_;
    const std::int64_t first = std::int64_t{place.window} * p.ratio;
    // A list of rows that does not fit that of tokens gives windows that are not there.
    place.found = first + p.ratio <= tokens_;
    place.token = static_cast<int>(token_ + first);
    place.position = position_ + first;
    return place;
  }

 private:
  __device__ __forceinline__ void read(const KernelProblem& p, int row) {
    next_row_ = INT32_MAX;
    if (p.n == 0) return;
    const auto number = [](const std::int32_t* list, int at) {
      return static_cast<const volatile std::int32_t*>(list)[at];
    };
    const int i = place_before(p.cu_rows, p.n, row);
    row_ = read_clamped(p.cu_rows, i, row);
    if (i + 1 < p.n) next_row_ = number(p.cu_rows, i + 1);
    token_ = read_clamped(p.cu_seqlens, i, p.tokens);
    tokens_ = read_clamped(p.cu_seqlens, i + 1, p.tokens) - token_;
    if (p.first_position != nullptr) position_ = max(number(p.first_position, i), 0);
  }
  // The sequence: its rows, its tokens, and the position of the first one.
  int row_ = 0, next_row_ = 0, token_ = 0, tokens_ = 0, position_ = 0;
};

// ---- sums

// Powers of two stand for the exponentials: 2^(kLog2E * x) is e^x.
inline constexpr float kLog2E = 1.4426950408889634f;

// Of some slots, in each column of a thread: the largest gate, and the sums of the weights
// 2^(kLog2E * gate - reference()) and of their products with kv.
template <int kCount>
struct SumsOf {
  float largest[kCount], total[kCount], sum[kCount];

  static __device__ __forceinline__ SumsOf of_none() {
    SumsOf sums;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      sums.largest[c] = -INFINITY;
      sums.total[c] = sums.sum[c] = 0;
    }
    return sums;
  }
  // -inf counts as 0, so that weights beside it are 0 and not NaN.
  static __device__ __forceinline__ float reference(float largest) {
    return largest == -INFINITY ? 0.0f : __fmul_rn(largest, kLog2E);
  }
  static __device__ __forceinline__ float weight(float gate, float reference) {
    return device::ex2(fmaf(gate, kLog2E, -reference));
  }
  // What sums with the one largest gate are multiplied with for another.
  static __device__ __forceinline__ float scale(float from, float reference_of_to) {
    return device::ex2(__fsub_rn(__fmul_rn(from, kLog2E), reference_of_to));
  }
  __device__ __forceinline__ void add(const SumsOf& other) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const float both = fmaxf(largest[c], other.largest[c]), to = reference(both);
      const float mine = scale(largest[c], to), theirs = scale(other.largest[c], to);
      total[c] = fmaf(total[c], mine, __fmul_rn(other.total[c], theirs));
      sum[c] = fmaf(sum[c], mine, __fmul_rn(other.sum[c], theirs));
      largest[c] = both;
    }
  }
};
using Sums = SumsOf<kColumns>;

// The slots of a thread's group.
struct Range {
  int begin, end;
  __device__ Range(const KernelProblem& p, int group) {
    const int count = (p.slots() + p.team.groups() - 1) >> p.team.groups_log;
    begin = min(group * count, p.slots());
    end = min(begin + count, p.slots());
  }
  // Whether it is what a thread loads at once, and begins the window.
  __device__ __forceinline__ bool is_first_whole() const {
    return begin == 0 && end == kSlotsAtOnce;
  }
};

// Adds kSlotsAtOnce slots of a window, from `from` on, of which those of [first, end) count. Loader
// has a type Raw, of which it fetches one for a slot, and gives kv and the gate with its bias of
// it. All are under way before the first is used: there is no branch between them, and a slot that
// does not count is an end of the range instead, of weight 0. kWhole: all count.
template <bool kWhole, class Loader, int kCount>
__device__ __forceinline__ void add_slots(const Loader& loader, int from, int first, int end,
                                          SumsOf<kCount>& sums) {
  const auto place_of = [&](int j) {
    return kWhole ? j : min(max(from + j, first), end - 1) - from;
  };
  const auto counts = [&](int j) { return place_of(j) == j; };
  typename Loader::Raw raw[kSlotsAtOnce];
#pragma unroll
  for (int j = 0; j < kSlotsAtOnce; ++j) raw[j] = loader.fetch(from, place_of(j));
  float gate[kSlotsAtOnce][kCount], reference[kCount];
  const SumsOf<kCount> before = sums;
#pragma unroll
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    loader.gate(raw[j], from, place_of(j), gate[j]);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      if (!counts(j)) gate[j][c] = -INFINITY;
      sums.largest[c] = fmaxf(sums.largest[c], gate[j][c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    reference[c] = Sums::reference(sums.largest[c]);
    const float scale = Sums::scale(before.largest[c], reference[c]);
    sums.total[c] = __fmul_rn(sums.total[c], scale);
    sums.sum[c] = __fmul_rn(sums.sum[c], scale);
  }
#pragma unroll
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    float kv[kCount];
    loader.kv(raw[j], from, place_of(j), kv);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const float weight = Sums::weight(gate[j][c], reference[c]);
      sums.total[c] = __fadd_rn(sums.total[c], weight);
      sums.sum[c] = fmaf(weight, counts(j) ? kv[c] : 0.0f, sums.sum[c]);
    }
  }
}

// Adds up to kSlotsAtOnce slots of a range, from `from` on, but for those below `first`.
template <class Loader>
__device__ __forceinline__ void add_part(const Loader& loader, const Range& range, int first,
                                         int from, Sums& sums) {
  if (first == 0 && range.is_first_whole()) {  // offsets are the same in all threads
    sums = Sums::of_none();                    // as they are
    add_slots<true>(loader, 0, 0, kSlotsAtOnce, sums);
  } else if (from >= first && from + kSlotsAtOnce <= range.end) {
    add_slots<true>(loader, from, first, range.end, sums);
  } else if (max(from, first) < range.end) {
    add_slots<false>(loader, from, first, range.end, sums);
  }
}
template <class Loader>
__device__ __forceinline__ void add_range(const Loader& loader, const Range& range, int first,
                                          Sums& sums) {
  for (int from = range.begin; from < range.end; from += kSlotsAtOnce) {
    add_part(loader, range, first, from, sums);
  }
}

// Where the slots of a window are in rows of a tensor: `stride` bytes apart, those from `own` on
// another `jump` further. Stride: int for rows that are near enough to each other.
template <class T, class Stride>
struct Walk {
  T* first;
  Stride stride, jump;

  // Of rows that are `elements` of T apart.
  static __device__ __forceinline__ Walk of(T* first, std::int64_t elements, std::int64_t jump) {
    constexpr Stride kSize = sizeof(T);
    return {first, static_cast<Stride>(elements) * kSize, static_cast<Stride>(jump) * kSize};
  }
  // Slot from + j.
  __device__ __forceinline__ T* at(int from, int j, int own) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    const Stride offset = (from + j) * stride + (from + j < own ? Stride{0} : jump);
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(first) + offset);
  }
};

// The biases of a window's gates, for a thread's columns from `column` on, and slots from
// `skipped` on.
template <bool kAligned>
struct Biases {
  Walk<const float, StrideOf<kAligned>> walk;
  int own;

  __device__ __forceinline__ Biases(const KernelProblem& p, int column, int skipped)
      : own(p.slots() - p.ratio) {
    const Rows<const float*>& bias = p.position_bias;
    walk = walk.of(bias.data + skipped * bias.stride0 + column, bias.stride0,
                   (p.series - 1) * p.d - own * bias.stride0);
  }
  template <class T>
  __device__ __forceinline__ void add(const Pack<T>& gates, int from, int j,
                                      float (&gate)[kColumns]) const {
    float bias[kColumns];
    gates.to_floats(gate);
    Pack<float>::load<kAligned>(walk.at(from, j, own)).to_floats(bias);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) gate[c] = __fadd_rn(gate[c], bias[c]);
  }
};

// Where a window's slots are in kv or gate, for the columns from `column` on. A window that was
// found lies in the tensors, and its slots below `own`, which are of the window before, too, but
// for the first window: the caller leaves them out there. `token`: the first own one.
template <class T, bool kAligned>
__device__ __forceinline__ Walk<const T, StrideOf<kAligned>> slots_of(const KernelProblem& p,
                                                                      const Rows<const void*>& rows,
                                                                      std::int64_t token,
                                                                      int column) {
  const int own = p.slots() - p.ratio;
  return Walk<const T, StrideOf<kAligned>>::of(
      static_cast<const T*>(rows.data) + (token - own) * rows.stride0 + column, rows.stride0,
      (p.series - 1) * p.d);
}

// Loads from kv and gate.
template <class T, bool kAligned>
struct SlotLoader {
  struct Raw {
    Pack<T> kv, gate;
  };

  Walk<const T, StrideOf<kAligned>> kv_walk, gate_walk;
  Biases<kAligned> biases;
  int own;  // the first slot of the window's own tokens

  __device__ __forceinline__ SlotLoader(const KernelProblem& p, std::int64_t token, int column)
      : kv_walk(slots_of<T, kAligned>(p, p.kv, token, column)),
        gate_walk(slots_of<T, kAligned>(p, p.gate, token, column)),
        biases(p, column, 0),
        own(biases.own) {}
  __device__ __forceinline__ Raw fetch(int from, int j) const {
    return {Pack<T>::template load<kAligned>(kv_walk.at(from, j, own)),
            Pack<T>::template load<kAligned>(gate_walk.at(from, j, own))};
  }
  __device__ __forceinline__ void kv(const Raw& raw, int, int, float (&kv)[kColumns]) const {
    raw.kv.to_floats(kv);
  }
  __device__ __forceinline__ void gate(const Raw& raw, int from, int j,
                                       float (&gate)[kColumns]) const {
    biases.add(raw.gate, from, j, gate);
  }
};

// What the threads of a block exchange.
struct Exchange {
  union {
    Sums sums[kThreads];
    float columns[kThreads][kColumns];
  };
  float squares[kThreads];
};

// The sums of all groups, in all of them. The whole block calls it.
__device__ __forceinline__ void add_groups(const Team& team, const Thread& thread,
                                           Exchange& exchange, Sums& sums) {
  if (team.groups_log == 0) return;
  __syncthreads();
  exchange.sums[threadIdx.x] = sums;
  __syncthreads();
  const int first = (thread.window << team.threads_log()) + thread.lane;
  sums = exchange.sums[first];
  for (int group = 1; group < team.groups(); ++group) {
    sums.add(exchange.sums[first + group * team.lanes()]);
  }
}

__device__ __forceinline__ float add_lanes_of_warp(const Team& team, float x) {
  for (int distance = min(team.lanes(), 32) / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(device::kFullWarp, x, distance);
  }
  return x;
}

// The sum over the lanes of a group, in all of them: over the warps for each place in a warp, then
// over the places. The whole block calls it.
__device__ __forceinline__ float add_lanes(const Team& team, Exchange& exchange, float x) {
  if (team.lanes_log > 5) {
    const int first = static_cast<int>(threadIdx.x) & ~(team.lanes() - 1) | threadIdx.x % 32;
    __syncthreads();
    exchange.squares[threadIdx.x] = x;
    __syncthreads();
    x = exchange.squares[first];
    for (int i = 32; i < team.lanes(); i += 32) x += exchange.squares[first + i];
  }
  return add_lanes_of_warp(team, x);
}

// ---- the finished row

// The angles of the thread's pairs of columns.
struct Rotation {
  float cos[kColumns / 2], sin[kColumns / 2];  // (1, 0): the pair stays as it is

  Rotation() = default;
  __device__ Rotation(const KernelProblem& p, std::int64_t position, int column) {
    const int before = p.d - 2 * p.pairs;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      cos[i] = 1;
      sin[i] = 0;
    }
    if (p.positions > 0 && column + kColumns > before && column < p.d) {
      const std::int64_t at = min(max(position, std::int64_t{0}), p.positions - 1);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        const int pair = (column + 2 * i - before) / 2;
        if (column + 2 * i < before) continue;
        cos[i] = p.cos.data[at * p.cos.stride0 + pair];
        sin[i] = p.sin.data[at * p.sin.stride0 + pair];
      }
    }
  }
  // Turns each pair by its angle times `sign`.
  __device__ __forceinline__ void rotate(float sign, float (&row)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float a = row[2 * i], b = row[2 * i + 1], turned = sign * sin[i];
      row[2 * i] = fmaf(a, cos[i], -__fmul_rn(b, turned));
      row[2 * i + 1] = fmaf(a, turned, __fmul_rn(b, cos[i]));
    }
  }
};

// The thread's columns of the norm's weight.
template <bool kAligned>
__device__ __forceinline__ void load_norm(const KernelProblem& p, int column,
                                          float (&norm)[kColumns]) {
  if (p.norm_weight != nullptr && column < p.d) {
    Pack<float>::load<kAligned>(p.norm_weight + column).to_floats(norm);
  } else {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) norm[c] = 1;
  }
}

// What the thread's columns are multiplied with: loaded before the sums, so that they are there
// when the sums are.
template <bool kAligned>
struct Factors : Rotation {
  float norm[kColumns];

  __device__ Factors(const KernelProblem& p, std::int64_t position, int column)
      : Rotation(p, position, column) {
    load_norm<kAligned>(p, column, norm);
  }

  __device__ __forceinline__ void normalise(float inverse, float (&row)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) row[c] = __fmul_rn(row[c], __fmul_rn(inverse, norm[c]));
  }
};

__device__ __forceinline__ float hadamard_scale(const KernelProblem& p) {
  return rsqrtf(static_cast<float>(p.d));
}

// The butterflies of Sylvester's matrix among a thread's own columns.
__device__ __forceinline__ void transform_columns(float (&row)[kColumns]) {
#pragma unroll
  for (int half = 1; half < kColumns; half *= 2) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (c & half) continue;
      const float a = row[c], b = row[c + half];
      row[c] = a + b;
      row[c + half] = a - b;
    }
  }
}

// The product with Sylvester's matrix over sqrt(d), by butterflies. The whole block calls it.
__device__ __forceinline__ void transform(const KernelProblem& p, const Thread& thread,
                                          Exchange& exchange, float (&row)[kColumns]) {
  if (!p.hadamard) return;
  transform_columns(row);
  const int lanes = p.d / kColumns;  // a power of two, as d is
  for (int half = 1; half < lanes; half *= 2) {
    const bool upper = thread.lane & half;
    float others[kColumns];
    if (half < 32) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        others[c] = __shfl_xor_sync(device::kFullWarp, row[c], half);
      }
    } else {
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) exchange.columns[threadIdx.x][c] = row[c];
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) others[c] = exchange.columns[threadIdx.x ^ half][c];
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) row[c] = upper ? others[c] - row[c] : row[c] + others[c];
  }
  const float scale = hadamard_scale(p);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) row[c] *= scale;
}

// The same, but for the scale, of a row in shared memory, by a team of a warp.
__device__ __forceinline__ void transform_in_memory(const KernelProblem& p, float* row, int lane) {
  for (int half = 1; half < p.d; half *= 2) {
    __syncwarp();
    for (int i = lane; i < p.d / 2; i += p.team.lanes()) {
      float& low = row[i / half * 2 * half + i % half];
      float& high = *(&low + half);
      const float a = low, b = high;
      low = a + b;
      high = a - b;
    }
  }
  __syncwarp();
}

// 1 / sqrt(mean(sum^2) + eps).
__device__ __forceinline__ float norm_of(const KernelProblem& p, float squares) {
  return rsqrtf(fmaf(squares, p.inverse_d, p.eps));
}

// The parts of a row before its norm.
template <int kCount>
__device__ __forceinline__ void divide(const SumsOf<kCount>& sums, float (&row)[kCount]) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) row[c] = __fdividef(sums.sum[c], sums.total[c]);
}
__device__ __forceinline__ float squares_of(const float (&row)[kColumns]) {
  float squares = 0;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) squares = fmaf(row[c], row[c], squares);
  return squares;
}

// Norm, rotation and transform of a row, as far as the problem has them; returns what the norm
// multiplies it with, or 1. The whole block calls it.
template <bool kAligned>
__device__ __forceinline__ float finish(const KernelProblem& p, const Thread& thread,
                                        const Factors<kAligned>& factors, Exchange& exchange,
                                        float (&row)[kColumns]) {
  float rstd = 1;
  if (p.norm_weight != nullptr) {
    const float squares = thread.lane * kColumns < p.d ? squares_of(row) : 0.0f;
    rstd = norm_of(p, add_lanes(p.team, exchange, squares));
    factors.normalise(rstd, row);
  }
  if (p.pairs > 0) factors.rotate(1, row);
  transform(p, thread, exchange, row);
  return rstd;
}

}  // namespace winnow::compressor::cuda
