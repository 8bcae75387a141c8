// Gradients of large windows on CUDA: of more than half of kLargeSlots slots. Blocks have
// kLargeColumns columns. Slots come to shared memory and gradients leave it in whole lines, by a
// thread for each piece of 16 bytes: a gradient takes the place of what it is the gradient of, and
// the thread that stores it copies what comes next there. Included by backward_cuda.cu.
#pragma once

#include "winnow/compressor/backward/backward_cuda.cuh"
#include "winnow/device/common/kernel_order.cuh"
#include "winnow/device/common/registers.cuh"
#include "winnow/device/common/warp.cuh"

namespace winnow::compressor::cuda {

inline constexpr int kLargeSlots = 128, kLargeColumns = 64, kColumnsOfWarp = kLargeColumns / kWarps;
inline constexpr int kGroupsOfWarp = kLargeSlots / kSlotsAtOnce;  // of lanes, with every 16th slot

// So many windows are found ahead: one half, while the other is gone through.
inline constexpr unsigned kLargeWindows = 32;

struct LargeMemory {
  // Rows of 128 bytes: kLargeColumns columns of each slot, in pieces of 16 bytes.
  uint4 kv[kStages][kLargeSlots][8], gate[kStages][kLargeSlots][8];
  float4 biases[kSlotsAtOnce][kThreads];  // of the gates of each thread
  float norm_weight[kLargeColumns];
  float products[2][kWarps];  // sums of row * d_row of each warp, by turns
  Spot spots[kLargeWindows];  // those of the block's windows, by their number
  float rstd[kLargeWindows];
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

// Two columns of a row and of its gradient, to be multiplied when they are there.
template <class T, bool kAligned>
struct RowProduct {
  uint2 loaded = {0, 0};

  __device__ __forceinline__ RowProduct(const KernelParams& params, int row) {
    const int column = 2 * (static_cast<int>(threadIdx.x) % kThreads);
    if (params.problem.norm_weight == nullptr || row >= params.num_rows) return;
    if (column >= params.problem.d) return;
    if constexpr (kAligned) {
      loaded = {pair(params.rows, row, column), pair(params.d_rows, row, column)};
    } else {
      loaded.x =
          __float_as_uint(fmaf(number(params.rows, row, column, params.wide_rows),
                               number(params.d_rows, row, column, params.wide_d_rows),
                               number(params.rows, row, column + 1, params.wide_rows) *
                                   number(params.d_rows, row, column + 1, params.wide_d_rows)));
    }
  }
  __device__ __forceinline__ float sum() const {
    if constexpr (!kAligned) return __uint_as_float(loaded.x);
    float x[kColumns], gradient[kColumns];
    Pack<T>{{loaded.x, 0}}.to_floats(x);
    Pack<T>{{loaded.y, 0}}.to_floats(gradient);
    return fmaf(x[0], gradient[0], x[1] * gradient[1]);
  }

 private:
  static __device__ __forceinline__ unsigned pair(const Rows<const void*>& rows, int row,
                                                  int column) {
    return *reinterpret_cast<const unsigned*>(static_cast<const T*>(rows.data) +
                                              (row * rows.stride0 + column));
  }
  static __device__ __forceinline__ float number(const Rows<const void*>& rows, int row, int column,
                                                 bool wide) {
    const std::int64_t at = row * rows.stride0 + column;
    if (wide) return static_cast<const float*>(rows.data)[at];
    float x[kColumns];
    Pack<T>{{static_cast<const unsigned short*>(rows.data)[at], 0}}.to_floats(x);
    return x[0];
  }
};

// Moves the pieces of a thread: one of every 32nd slot. Addresses are found anew for each window:
// kept, they took 20 registers, and what is loaded from local memory instead waits behind the
// copies, which took a third of the kernel's time.
template <class T, bool kAligned>
struct Mover {
  const KernelParams& params;
  LargeMemory& shared;
  int first_column;

  // The slots of a window that count: from this one on; none where there is no window.
  __device__ __forceinline__ int first_of(const Spot& spot) const {
    return spot.kind == Spot::other ? 0 : spot.kind == Spot::first ? own() : kLargeSlots;
  }
  // Stores the gradients of a window, and begins to copy the slots of another one to their place.
  __device__ __forceinline__ void move(const Spot& before, const Spot& next, unsigned stage) const {
    const KernelProblem& p = params.problem;
    const int thread = static_cast<int>(device::forget(threadIdx.x));
    const int first = thread / 8, piece = thread % 8, slots = p.slots();
    const int column = first_column + piece * 8;
    const auto d_kv_walk = walk<T>(params.d_kv, before, first, column),
               d_gate_walk = walk<T>(params.d_gate, before, first, column);
    const auto kv_walk = walk<const T>(p.kv, next, first, column),
               gate_walk = walk<const T>(p.gate, next, first, column);
    const int place = place_of_piece(piece, first);
    const auto move_piece = [&](int k, bool stores, bool copies) {
      const int row = k * kRowsAtOnce, own_row = own() - first;
      uint4 &kv = shared.kv[stage][row + first][place],
            &gate = shared.gate[stage][row + first][place];
      if (stores) {
        store_piece<kAligned>(d_kv_walk.at(0, row, own_row), kv);
        store_piece<kAligned>(d_gate_walk.at(0, row, own_row), gate);
      }
      if (copies) {
        copy_piece<kAligned>(kv, kv_walk.at(0, row, own_row));
        copy_piece<kAligned>(gate, gate_walk.at(0, row, own_row));
      }
    };
    const bool inside = column < p.d;
    const int from = inside ? first_of(before) : kLargeSlots,
              to = inside ? first_of(next) : kLargeSlots;
    if (from == 0 && to == 0 && slots == kLargeSlots) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) move_piece(k, true, true);
    } else {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int row = k * kRowsAtOnce + first;
        move_piece(k, row >= from && row < slots, row >= to && row < slots);
      }
    }
    device::cp_async_commit();
  }

 private:
  static constexpr int kRowsAtOnce = kThreads / 8, kPieces = kLargeSlots / kRowsAtOnce;
  __device__ __forceinline__ int own() const {
    return params.problem.slots() - params.problem.ratio;
  }
  // The slots of a window in a tensor, from slot `first` on.
  template <class Element, class Pointer>
  __device__ __forceinline__ auto walk(const Rows<Pointer>& rows, const Spot& spot, int first,
                                       int column) const {
    const std::int64_t token = std::int64_t{spot.token} + first - own();
    return Walk<Element, StrideOf<kAligned>>::of(
        static_cast<Element*>(rows.data) + (token * rows.stride0 + column), rows.stride0,
        (params.problem.series - 1) * params.problem.d);
  }
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
  const Mover<T, kAligned> mover{params, shared, begin};
  // The window of turn `turn` is that of `row`.
  const auto find = [&](unsigned turn, int row) {
    shared.spots[turn % kLargeWindows] = find_spot(params, row);
    if (p.norm_weight != nullptr && row < params.num_rows) {
      shared.rstd[turn % kLargeWindows] = params.rstd[row];
    }
  };
  const auto add_products = [&](unsigned turn, const RowProduct<T, kAligned>& product) {
    const float sum = device::warp_sum(product.sum());
    if (lane == 0) shared.products[turn % 2][warp] = sum;
  };

  if (own_thread < int{kLargeWindows}) {
    find(static_cast<unsigned>(own_thread), part + own_thread * stride);
  }
  add_products(0, RowProduct<T, kAligned>(params, part));
  __syncthreads();  // the windows are there
  const Spot no_window = {0, Spot::none, 0};
  for (unsigned stage = 0; stage < kStages; ++stage) {
    mover.move(no_window, shared.spots[stage], stage);
  }
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    const int slot = j * kGroupsOfWarp + group;
    if (!has_column || slot >= slots) break;
    shared.biases[j][own_thread] =
        Pack<float>::load<kAligned>(p.position_bias.data +
                                    (slot < own ? slot : slot - own) * p.position_bias.stride0 +
                                    (slot < own ? 0 : (p.series - 1) * p.d) + column)
            .words;
  }
  if (p.norm_weight != nullptr && has_column) {
    shared.norm_weight[own_column - begin] = p.norm_weight[own_column];
  }
  device::cp_async_wait<kStages - 1>();
  __syncthreads();  // the slots of the first window are there, and what is read with them

  float bias_sums[kSlotsAtOnce][kColumns] = {}, norm_sum = 0;
  unsigned turn = 0;
  for (int row = part; row < params.num_rows; row += stride, ++turn) {
    const unsigned stage = turn % kStages;
    const Spot& spot = shared.spots[turn % kLargeWindows];
    // Windows are found a turn before the first of them is copied.
    constexpr unsigned kHalf = kLargeWindows / 2;
    const unsigned ahead = kStages + 1, next_half = turn + ahead;
    if (next_half % kHalf == 0 && next_half >= kLargeWindows && own_thread < int{kHalf}) {
      find(next_half + own_thread, row + static_cast<int>(ahead + own_thread) * stride);
    }
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
    // The thread's columns of its first slot in a stage, found anew as well.
    const int thread = static_cast<int>(device::forget(threadIdx.x));
    const int first_slot = thread % 32 / 2;
    const int inside =
        (first_slot * 8 + place_of_piece(thread / 32, first_slot)) * 16 + thread % 2 * 8;
    const auto pack_of = [&](uint4(&rows)[kLargeSlots][8], int j) -> Pack<T>& {
      return *reinterpret_cast<Pack<T>*>(reinterpret_cast<std::byte*>(&rows) + inside +
                                         j * (kGroupsOfWarp * 128));
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
    const RowProduct<T, kAligned> next_product(params, row + stride);
    // From here on a lane has one column, until it has what its four columns are multiplied with.
    const auto add = [](float a, float b) { return a + b; };
    const float scale = __fdividef(1, folding.fold(sums.total, add));
    const float sum = folding.fold(sums.sum, add) * scale;
    float gradient = row_column.turned_back(own_column);
    if (p.norm_weight != nullptr) {
      const float rstd = shared.rstd[turn % kLargeWindows];
      float product = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) product += shared.products[turn % 2][i];
      const float weight = shared.norm_weight[thread / 32 * kColumnsOfWarp + thread % 2 * kColumns +
                                              Folding{thread % 32}.column()];
      if (found) norm_sum = fmaf(gradient * rstd, sum, norm_sum);
      gradient = rstd * (gradient * weight - sum * (rstd * product * p.inverse_d));
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
    add_products(turn + 1, next_product);
    device::cp_async_wait<kStages - 2>();
    __syncthreads();  // the gradients are there, the slots of the next window and its products
    mover.move(spot, shared.spots[(turn + kStages) % kLargeWindows], stage);
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
