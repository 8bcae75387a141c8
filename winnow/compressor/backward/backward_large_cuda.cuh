// Gradients of large windows on CUDA: of more than half of kLargeSlots slots. Blocks have
// kLargeColumns columns. Slots come to shared memory and gradients leave it in whole lines, by a
// thread for each piece of 16 bytes: a gradient takes the place of what it is the gradient of, and
// the thread that stores it copies what comes next there. Included by backward_cuda.cu.
#pragma once

#include "winnow/compressor/backward/backward_cuda.cuh"
#include "winnow/device/common/kernel_order.cuh"

namespace winnow::compressor::cuda {

inline constexpr int kLargeSlots = 128, kLargeColumns = 64, kColumnsOfWarp = kLargeColumns / kWarps;
inline constexpr int kGroupsOfWarp = kLargeSlots / kSlotsAtOnce;  // of lanes, with every 16th slot

struct LargeMemory {
  // Rows of 128 bytes: kLargeColumns columns of each slot, in pieces of 16 bytes.
  uint4 kv[kStages][kLargeSlots][8], gate[kStages][kLargeSlots][8];
  float4 biases[kSlotsAtOnce][kThreads];  // of the gates of each thread
  Course course;
};

// A piece has eight columns of two bytes.
template <bool kAligned, class T>
__device__ __forceinline__ void copy_piece(uint4& to, const T* from) {
  if constexpr (kAligned) {
    device::cp_async(device::shared_address(&to), from);
  } else {
    const uint2 low = Pack<T>::template load<false>(from).words,
                high = Pack<T>::template load<false>(from + kColumns).words;
    to = {low.x, low.y, high.x, high.y};
  }
}
template <bool kAligned, class T>
__device__ __forceinline__ void store_piece(T* to, const uint4& from) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = from;
  } else {
    Pack<T>{{from.x, from.y}}.template store<false>(to);
    Pack<T>{{from.z, from.w}}.template store<false>(to + kColumns);
  }
}

// The place of piece `piece` of a row: warps have neighbouring pieces and eight rows have different
// banks.
__device__ __forceinline__ int place_of_piece(int piece, int row) { return piece ^ (row & 7); }

// Four columns in each of the 16 lanes of the same parity.
struct Folding {
  int lane;

  // Which of the four columns fold() gives.
  __device__ __forceinline__ int column() const { return (lane & 2) + (lane >> 2 & 1); }
  // op over all lanes, of one column.
  template <class Op>
  __device__ __forceinline__ float fold(const float (&x)[kColumns], const Op& op) const {
    const bool high = lane & 2, odd = lane & 4;
    const auto meet = [&](float mine, float others, int distance) {
      return op(mine, __shfl_xor_sync(device::kFullWarp, others, distance));
    };
    const float even_column = meet(high ? x[2] : x[0], high ? x[0] : x[2], 2),
                odd_column = meet(high ? x[3] : x[1], high ? x[1] : x[3], 2);
    float all = meet(odd ? odd_column : even_column, odd ? even_column : odd_column, 4);
    all = meet(all, all, 8);
    return meet(all, all, 16);
  }
  // What the lanes have of one column each, of all four.
  __device__ __forceinline__ void spread(float own, float (&x)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      x[c] = __shfl_sync(device::kFullWarp, own, (lane & 1) | (c & 2) | (c & 1) << 2);
    }
  }
};

// One column of the gradient of a row, turned back. It stays as it is in memory until it is used:
// nothing waits for it where it is loaded.
template <class T, bool kAligned>
struct RowColumn {
  unsigned even = 0, odd = 0;  // bits of the pair of columns
  bool wide = false;
  float cos = 1, sin = 0;

  RowColumn() = default;
  __device__ __forceinline__ RowColumn(const KernelParams& params, const Spot& spot, int row,
                                       int column)
      : wide(!kAligned && params.wide_d_rows) {
    const KernelProblem& p = params.problem;
    const int first = column & ~1, pair = (first - (p.d - 2 * p.pairs)) / 2;
    const std::int64_t at = row * params.d_rows.stride0 + first;
    if (wide) {
      const auto* const rows = static_cast<const unsigned*>(params.d_rows.data) + at;
      even = rows[0];
      odd = rows[1];
    } else {
      const auto* const rows = static_cast<const unsigned short*>(params.d_rows.data) + at;
      even = rows[0];
      odd = rows[1];
    }
    if (p.positions > 0 && first >= p.d - 2 * p.pairs) {
      const std::int64_t place = min(max(spot.position, std::int64_t{0}), p.positions - 1);
      cos = p.cos.data[place * p.cos.stride0 + pair];
      sin = p.sin.data[place * p.sin.stride0 + pair];
    }
  }
  __device__ __forceinline__ float turned_back(int column) const {
    const float a = number(even), b = number(odd);
    return column % 2 == 0 ? fmaf(a, cos, b * sin) : fmaf(b, cos, -(a * sin));
  }

 private:
  __device__ __forceinline__ float number(unsigned bits) const {
    float both[kColumns];
    Pack<T>{{bits, 0}}.to_floats(both);
    return wide ? __uint_as_float(bits) : both[0];
  }
};

// The pieces that a thread copies and stores: piece `piece` of every 32nd row.
template <class T, bool kAligned>
class Mover {
 public:
  __device__ __forceinline__ Mover(const KernelParams& params, LargeMemory& shared,
                                   int first_column)
      : shared_(shared),
        slots_(params.problem.slots()),
        own_(params.problem.slots() - params.problem.ratio),
        column_(first_column + static_cast<int>(threadIdx.x) % 8 * 8),
        inside_(column_ < params.problem.d),
        kv_(slots_in<kAligned, const T>(params.problem.kv, params.problem, first(), column_)),
        gate_(slots_in<kAligned, const T>(params.problem.gate, params.problem, first(), column_)),
        d_kv_(slots_in<kAligned, T>(params.d_kv, params.problem, first(), column_)),
        d_gate_(slots_in<kAligned, T>(params.d_gate, params.problem, first(), column_)) {}

  // The slots of a window that count: from this one on; none where there is no window.
  __device__ __forceinline__ int first_of(const Spot& spot) const {
    return spot.kind == Spot::other ? 0 : spot.kind == Spot::first ? own_ : kLargeSlots;
  }
  // Stores the gradients of a window, and begins to copy the slots of another one to their place.
  __device__ __forceinline__ void move(const Spot& before, const Spot& next, unsigned stage) const {
    const auto d_kv_walk = d_kv_.of(before), d_gate_walk = d_gate_.of(before);
    const auto kv_walk = kv_.of(next), gate_walk = gate_.of(next);
    const int place = place_of_piece(static_cast<int>(threadIdx.x) % 8, first());
    const auto move_piece = [&](int k, bool stores, bool copies) {
      const int row = k * kRowsAtOnce, own = own_ - first();
      uint4 &kv = shared_.kv[stage][row + first()][place],
            &gate = shared_.gate[stage][row + first()][place];
      if (stores) {
        store_piece<kAligned>(d_kv_walk.at(0, row, own), kv);
        store_piece<kAligned>(d_gate_walk.at(0, row, own), gate);
      }
      if (copies) {
        copy_piece<kAligned>(kv, kv_walk.at(0, row, own));
        copy_piece<kAligned>(gate, gate_walk.at(0, row, own));
      }
    };
    const int from = inside_ ? first_of(before) : kLargeSlots,
              to = inside_ ? first_of(next) : kLargeSlots;
    if (from == 0 && to == 0 && slots_ == kLargeSlots) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) move_piece(k, true, true);
    } else {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int row = k * kRowsAtOnce + first();
        move_piece(k, row >= from && row < slots_, row >= to && row < slots_);
      }
    }
    device::cp_async_commit();
  }

 private:
  static constexpr int kRowsAtOnce = kThreads / 8, kPieces = kLargeSlots / kRowsAtOnce;
  static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x) / 8; }

  LargeMemory& shared_;
  int slots_, own_, column_;
  bool inside_;
  Slots<const T, StrideOf<kAligned>> kv_, gate_;
  Slots<T, StrideOf<kAligned>> d_kv_, d_gate_;
};

// Where kv, gate and their gradients have two bytes.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    large_windows_kernel(const __grid_constant__ KernelParams params) {
  static_assert(sizeof(T) == 2);
  auto& shared = *reinterpret_cast<LargeMemory*>(device::dynamic_shared<16>());
  const KernelProblem& p = params.problem;
  const int blocks = params.shares.blocks, block = static_cast<int>(blockIdx.x);
  const int part = block / blocks, stride = params.shares.parts;
  const int own_thread = static_cast<int>(threadIdx.x), warp = own_thread / 32;
  const Folding folding{own_thread % 32};
  const int lane = folding.lane, group = lane / 2;
  const int begin = block % blocks * kLargeColumns;  // the block's first column
  const int column = begin + warp * kColumnsOfWarp + lane % 2 * kColumns;
  const int own_column = column + folding.column();
  const bool has_column = column < p.d;
  const int slots = p.slots(), own = slots - p.ratio;
  const Mover<T, kAligned> mover(params, shared, begin);

  Course& course = shared.course;
  find_windows<T, kAligned>(params, {part, stride, 0}, course);
  Spot spot = course.spots[0];
  Norm norm = course.norms[0];
  const Spot no_window = {0, Spot::none, 0};
  mover.move(no_window, spot, 0);
  mover.move(no_window, course.spots[1], 1);
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    const int slot = j * kGroupsOfWarp + group;
    if (!has_column || slot >= slots) break;
    shared.biases[j][own_thread] =
        Pack<float>::load<kAligned>(p.position_bias.data +
                                    (slot < own ? slot : slot - own) * p.position_bias.stride0 +
                                    (slot < own ? 0 : (p.series - 1) * p.d) + column)
            .words;
  }
  const float weight = p.norm_weight != nullptr && has_column ? p.norm_weight[own_column] : 1;
  device::cp_async_wait<1>();
  __syncthreads();  // the slots of the first window are there

  float bias_sums[kSlotsAtOnce][kColumns] = {}, norm_sum = 0;
  // The thread's columns of its first slot in a stage.
  const int inside = (group * 8 + place_of_piece(warp, group)) * 16 + lane % 2 * 8;
  const auto pack_of = [&](uint4(&rows)[kLargeSlots][8], int j) -> Pack<T>& {
    return *reinterpret_cast<Pack<T>*>(reinterpret_cast<std::byte*>(&rows) + inside +
                                       j * (kGroupsOfWarp * 128));
  };
  unsigned turn = 0;
  for (int row = part; row < params.num_rows; row += stride, ++turn) {
    const unsigned stage = turn % kStages;
    const bool found = spot.kind != Spot::none && has_column;
    RowColumn<T, kAligned> row_column;
    if (found) row_column = RowColumn<T, kAligned>(params, spot, row, own_column);
    // function(j) for the thread's slots that count.
    const int first = has_column ? mover.first_of(spot) : kLargeSlots;
    const auto for_slots = [&](const auto& function) {
      if (first == 0 && slots == kLargeSlots) {
#pragma unroll
        for (int j = 0; j < kSlotsAtOnce; ++j) function(j);
      } else {
#pragma unroll
        for (int j = 0; j < kSlotsAtOnce; ++j) {
          const int slot = j * kGroupsOfWarp + group;
          if (slot >= first && slot < slots) function(j);
        }
      }
    };

    float weights[kSlotsAtOnce][kColumns], reference[kColumns];
    Sums sums = Sums::of_none();
    for_slots([&](int j) {
      float bias[kColumns];
      Pack<float>{shared.biases[j][own_thread]}.to_floats(bias);
      pack_of(shared.gate[stage], j).to_floats(weights[j]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weights[j][c] += bias[c];
        sums.largest[c] = fmaxf(sums.largest[c], weights[j][c]);
      }
    });
    folding.spread(folding.fold(sums.largest, [](float a, float b) { return fmaxf(a, b); }),
                   sums.largest);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) reference[c] = Sums::reference(sums.largest[c]);
    for_slots([&](int j) {
      float kv[kColumns];
      pack_of(shared.kv[stage], j).to_floats(kv);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weights[j][c] = Sums::weight(weights[j][c], reference[c]);
        sums.total[c] += weights[j][c];
        sums.sum[c] = fmaf(weights[j][c], kv[c], sums.sum[c]);
      }
    });
    // From here on a lane has one column, until it has what its four columns are multiplied with.
    const auto add = [](float a, float b) { return a + b; };
    const float scale = __fdividef(1, folding.fold(sums.total, add));
    const float sum = folding.fold(sums.sum, add) * scale;
    float gradient = row_column.turned_back(own_column);
    if (p.norm_weight != nullptr) {
      if (found) norm_sum = fmaf(gradient * norm.rstd, sum, norm_sum);
      gradient = norm.rstd * (gradient * weight - sum * norm.part);
    }
    float factors[kColumns], means[kColumns];
    folding.spread(sum, means);
    folding.spread(gradient * scale, factors);
    for_slots([&](int j) {
      Pack<T>& place = pack_of(shared.kv[stage], j);
      float kv[kColumns], of_kv[kColumns], of_gate[kColumns];
      place.to_floats(kv);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        of_kv[c] = weights[j][c] * factors[c];
        of_gate[c] = of_kv[c] * (kv[c] - means[c]);
        bias_sums[j][c] += of_gate[c];
      }
      place = Pack<T>::of(of_kv);
      pack_of(shared.gate[stage], j) = Pack<T>::of(of_gate);
    });
    const Spot before = spot;
    spot = course.spots[(turn + 1) % Course::kWindows];
    norm = course.norms[(turn + 1) % Course::kWindows];
    const unsigned after_next = (turn + 2) % Course::kWindows;
    if (after_next == 0) {
      find_windows<T, kAligned>(params, {row + 2 * stride, stride, 0}, course);
    }
    device::cp_async_wait<0>();
    __syncthreads();  // the gradients are there, and the slots of the next window
    mover.move(before, course.spots[after_next], stage);
  }
  device::cp_async_wait<0>();
  device::allow_next_kernel();
  clear_sequences<T, kAligned>(params);
  for (int j = 0; has_column && j < kSlotsAtOnce; ++j) {
    const int slot = j * kGroupsOfWarp + group;
    if (slot >= slots) break;
    *reinterpret_cast<float4*>(params.bias_parts + (std::int64_t{part} * slots + slot) * p.d +
                               column) = Pack<float>::of(bias_sums[j]).words;
  }
  if (p.norm_weight != nullptr && lane < kColumnsOfWarp && has_column) {
    params.norm_parts[std::int64_t{part} * p.d + own_column] = norm_sum;
  }
}

}  // namespace winnow::compressor::cuda
