// Gradients of compressed rows on CUDA. A warp has all slots of some neighbouring columns of a
// window, so that no other warp has a part in their sums: what a window's norm needs of all columns
// follows from its row, rstd and the gradient of the row, and is found first. Threads have kColumns
// columns of up to kSlotsAtOnce slots, which are copied to shared memory one window ahead and read
// once. Blocks have the same columns of windows in turn, and keep their share of the gradients that
// are sums over windows, which the last kernel adds in a fixed order.
#include <algorithm>
#include <bit>
#include <cstddef>

#include "winnow/compressor/backward/backward_cuda.cuh"
#include "winnow/compressor/backward/backward_impl.h"
#include "winnow/compressor/backward/backward_large_cuda.cuh"
#include "winnow/device/common/kernel_order.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/scratch.h"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::backward", "cuda"};

// Threads of a block, so that its stages have the same size for each type.
template <class T>
constexpr int kThreadsOf = sizeof(T) == 2 ? 256 : 128;
template <class T>
constexpr int kWarpsLog = std::bit_width(unsigned{kThreadsOf<T> / 32}) - 1;

// A block's dynamic shared memory.
template <class T>
struct alignas(16) SharedMemory {
  static constexpr int kThreads = kThreadsOf<T>;
  // The slots of a window on their way to the threads that hold them.
  struct Stage {
    Pack<T> kv[kSlotsAtOnce][kThreads], gate[kSlotsAtOnce][kThreads];
  };
  union {
    Stage stages[kStages];
    float4 sums[kSlotsAtOnce + 1][kThreads];  // in the end: over windows, of biases and the norm
  };
  float4 biases[kSlotsAtOnce][kThreads];  // of the gates of each thread
  Course course;
};

// Which of the slots that a thread holds count in a window: [first, end). Those from `own` on are
// of the window's own tokens.
struct Counted {
  int first, end;

  __device__ __forceinline__ Counted(int own, int count, const Spot& spot)
      : first(spot.kind == Spot::first ? max(own, 0) : 0),
        end(spot.kind != Spot::none ? count : 0) {}
  // function(j) for those slots.
  template <class Function>
  __device__ __forceinline__ void each(const Function& function) const {
    if (first == 0 && end == kSlotsAtOnce) {
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) function(j);
    } else if (first < end) {
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) {
        if (j >= first && j < end) function(j);
      }
    }
  }
};

// The thread's columns of the gradient of a row before its transform. `lanes` neighbours have the
// columns of slice `slice`. The whole warp calls it.
template <class T, bool kAligned>
__device__ __forceinline__ void load_gradient(const KernelParams& params, int row, int slice,
                                              int lanes, float (&gradient)[kColumns]) {
  const KernelProblem& p = params.problem;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1), columns = lanes * kColumns;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) gradient[c] = 0;
  if (!p.hadamard) {
    const int column = slice * columns + lane * kColumns;
    if (column < p.d) {
      load_columns<T, kAligned>(params.d_rows, row, column, params.wide_d_rows, gradient);
    }
    return;
  }
  // The matrix is symmetric, and made of blocks that are the matrix for the columns of a slice,
  // with the signs of the one for the numbers of slices. So the slices are added first.
  for (int i = 0; i * columns < p.d; ++i) {
    float loaded[kColumns];
    load_columns<T, kAligned>(params.d_rows, row, i * columns + lane * kColumns, params.wide_d_rows,
                              loaded);
    const float sign = __popc(i & slice) % 2 == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) gradient[c] = fmaf(sign, loaded[c], gradient[c]);
  }
  transform_columns(gradient);
  for (int half = 1; half < lanes; half *= 2) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float other = __shfl_xor_sync(device::kFullWarp, gradient[c], half);
      gradient[c] = lane & half ? other - gradient[c] : gradient[c] + other;
    }
  }
  const float scale = hadamard_scale(p);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) gradient[c] *= scale;
}

// Copies a thread's slots of windows to stages. Copies of 16 bytes go past L1: where a thread's
// columns have 8, the first of two neighbours copies kv of both, and the second the gates. So the
// threads of a warp wait for each other before they read a stage, and before it is written again.
template <class T, bool kAligned>
struct Copier {
  static constexpr bool kPairs = kAligned && sizeof(T) == 2;
  using Stage = typename SharedMemory<T>::Stage;

  int thread, own, count;
  bool second;
  Slots<const T, StrideOf<kAligned>> slots, gate_slots;  // the gates where there are no pairs

  __device__ __forceinline__ Copier(const KernelProblem& p, const Range& range, int slots_held,
                                    int column)
      : thread(static_cast<int>(threadIdx.x)),
        own(p.slots() - p.ratio - range.begin),
        count(slots_held),
        second(kPairs && thread % 2 == 1),
        slots(slots_in<kAligned, const T>(second ? p.gate : p.kv, p, range.begin,
                                          second ? column - kColumns : column)),
        gate_slots(slots_in<kAligned, const T>(p.gate, p, range.begin, column)) {}
  // Begins to copy a window.
  __device__ __forceinline__ void copy(const Spot& spot, Stage& stage) const {
    const auto walk = slots.of(spot), gate_walk = gate_slots.of(spot);
    Counted(own, count, spot).each([&](int j) {
      const T* const source = walk.at(0, j, own);
      if constexpr (kPairs) {
        copy_pack((second ? stage.gate : stage.kv)[j][thread & ~1], source);
      } else if constexpr (kAligned) {
        copy_pack(stage.kv[j][thread], source);
        copy_pack(stage.gate[j][thread], gate_walk.at(0, j, own));
      } else {
        stage.kv[j][thread] = Pack<T>::template load<false>(source);
        stage.gate[j][thread] = Pack<T>::template load<false>(gate_walk.at(0, j, own));
      }
    });
    device::cp_async_commit();
  }

 private:
  static __device__ __forceinline__ void copy_pack(Pack<T>& to, const T* from) {
    device::cp_async(device::shared_address(&to), from);
  }
};

// Where the gradients of a thread's slots go. kAligned: they are of kv's type.
template <class T, bool kAligned>
struct Gradients {
  Slots<T, StrideOf<kAligned>> slots;
  Slots<float, StrideOf<kAligned>> wide_slots;
  bool wide;

  __device__ __forceinline__ Gradients(const Rows<void*>& rows, bool are_wide,
                                       const KernelProblem& p, int begin, int column)
      : slots(slots_in<kAligned, T>(rows, p, begin, column)),
        wide_slots(slots_in<kAligned, float>(rows, p, begin, column)),
        wide(are_wide) {}
  // put(j, x) for the slots j of a window.
  __device__ __forceinline__ auto of(const Spot& spot, int own) const {
    return [this, own, walk = slots.of(spot), wide_walk = wide_slots.of(spot)](
               int j, const float(&x)[kColumns]) {
      if (!kAligned && wide) {
        Pack<float>::of(x).template store<false>(wide_walk.at(0, j, own));
      } else {
        Pack<T>::of(x).template store<kAligned>(walk.at(0, j, own));
      }
    };
  }
};

// op over the groups of a warp, in all of them.
template <class Op>
__device__ __forceinline__ void join_groups(const Team& team, float (&x)[kColumns], const Op& op) {
  for (int distance = team.lanes(); distance < 32; distance *= 2) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      x[c] = op(x[c], __shfl_xor_sync(device::kFullWarp, x[c], distance));
    }
  }
}

// Adds up what the warps of a block have, and writes it. The whole block calls it.
template <class T>
__device__ __forceinline__ void put_part(const KernelParams& params,
                                         const float4 (&sums)[kSlotsAtOnce + 1][kThreadsOf<T>]) {
  const KernelProblem& p = params.problem;
  const int block = static_cast<int>(blockIdx.x), blocks = params.shares.blocks;
  const std::int64_t part = block / blocks;
  // The threads of a window's warps; those of the block's next window come behind them.
  const int threads_log = 5 + params.shares.warps_log, threads = 1 << threads_log;
  for (int i = static_cast<int>(threadIdx.x); i < (kSlotsAtOnce + 1) * threads;
       i += kThreadsOf<T>) {
    const int j = i >> threads_log, thread = i & (threads - 1);
    const int slice = (block % blocks << params.shares.warps_log) + thread / 32;
    const int column = (slice * p.team.lanes() + (thread & (p.team.lanes() - 1))) * kColumns;
    const int group = thread % 32 >> p.team.lanes_log;
    const Range range(p, group);
    const int slot = range.begin + j;
    const bool of_norm = j == kSlotsAtOnce;
    if (column >= p.d || (of_norm ? p.norm_weight == nullptr || group > 0 : slot >= range.end)) {
      continue;
    }
    float4 sum = sums[j][thread];
    for (int other = thread + threads; other < kThreadsOf<T>; other += threads) {
      const float4 more = sums[j][other];
      sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
    }
    float* const row = of_norm ? params.norm_parts + part * p.d
                               : params.bias_parts + (part * p.slots() + slot) * p.d;
    *reinterpret_cast<float4*>(row + column) = sum;
  }
}

// What the norms of windows need: mean(row * d_row), as a rotation and a transform of both factors
// keep it. A warp has a row.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    prepare_norms(const __grid_constant__ KernelParams params) {
  device::allow_next_kernel();
  const KernelProblem& p = params.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) / 32;
  if (row >= params.num_rows) return;
  const float rstd = params.rstd[row];
  float product = 0;
#pragma unroll 4
  for (int column = lane * kColumns; column < p.d; column += 32 * kColumns) {
    float x[kColumns], gradient[kColumns];
    load_columns<T, kAligned>(params.rows, row, column, params.wide_rows, x);
    load_columns<T, kAligned>(params.d_rows, row, column, params.wide_d_rows, gradient);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) product = fmaf(x[c], gradient[c], product);
  }
  product = device::warp_sum(product);
  if (lane == 0) params.norms[row] = {rstd, rstd * product * p.inverse_d};
}

// Windows of any size. kGroups: the slots of a window may be those of several groups of lanes.
template <class T, bool kAligned, bool kGroups>
__global__ void __launch_bounds__(kThreadsOf<T>, 2)
    windows_kernel(const __grid_constant__ KernelParams params) {
  auto& shared = *reinterpret_cast<SharedMemory<T>*>(device::dynamic_shared<16>());
  const KernelProblem& p = params.problem;
  const Shares& shares = params.shares;
  const int block = static_cast<int>(blockIdx.x), part = block / shares.blocks;
  const int own_thread = static_cast<int>(threadIdx.x), warp = own_thread / 32;
  const int lanes = kGroups ? p.team.lanes() : 32, lane = own_thread & (lanes - 1);
  const int group = kGroups ? own_thread % 32 >> p.team.lanes_log : 0;
  const int warps = 1 << shares.warps_log, window = warp >> shares.warps_log;
  const int slice = block % shares.blocks * warps + (warp & (warps - 1));
  const int column = (slice * lanes + lane) * kColumns;
  const Range range(p, group);
  const int held = column < p.d ? range.end - range.begin : 0;  // slots
  const Copier<T, kAligned> copier(p, range, held, column);
  const int own = copier.own;
  const Gradients<T, kAligned> d_kv(params.d_kv, params.wide_kv, p, range.begin, column),
      d_gate(params.d_gate, params.wide_gate, p, range.begin, column);

  const int windows_log = kWarpsLog<T> - shares.warps_log;
  const int stride = shares.parts << windows_log, first = part << windows_log;
  Course& course = shared.course;
  device::wait_for_kernel_before();  // of the norms
  find_windows(params, {first, stride, windows_log}, course);
  copier.copy(course.spots[window], shared.stages[0]);
  const Biases<kAligned> biases(p, column, range.begin);
  for (int j = 0; j < held; ++j) {
    shared.biases[j][own_thread] = Pack<float>::load<kAligned>(biases.walk.at(0, j, own)).words;
  }
  float bias_sums[kSlotsAtOnce][kColumns] = {}, norm_sums[kColumns] = {};

  unsigned turn = 0;
  for (int first_row = first; first_row < params.num_rows; first_row += stride, ++turn) {
    const unsigned at = (turn << windows_log) % Course::kWindows,
                   next = (turn + 1 << windows_log) % Course::kWindows;
    const Spot spot = course.spots[at + window];
    const Norm norm = course.norms[at + window];
    if (next == 0) {
      find_windows(params, {first_row + stride, stride, windows_log}, course);
    }
    __syncwarp();  // the stage has been read
    copier.copy(course.spots[next + window], shared.stages[(turn + 1) % kStages]);
    if (spot.kind == Spot::none) continue;
    const Counted counted(own, held, spot);
    // Turned columns are those of the last pairs, which begin in the middle of a thread's at most.
    const bool turned = column + kColumns > p.d - 2 * p.pairs;
    Rotation rotation;
    if (turned) rotation = Rotation(p, spot.position, column);
    // It stays as it is in memory until it is used, so that nothing waits for it here.
    Pack<T> early;
    if (kAligned && !p.hadamard && column < p.d) {
      early = load_pack<T, true>(params.d_rows, first_row + window, column);
    }
    device::cp_async_wait<kStages - 1>();
    __syncwarp();
    const auto& stage = shared.stages[turn % kStages];

    float weights[kSlotsAtOnce][kColumns], reference[kColumns], scale[kColumns];
    Sums sums = Sums::of_none();
    counted.each([&](int j) {
      float bias[kColumns];
      Pack<float>{shared.biases[j][own_thread]}.to_floats(bias);
      stage.gate[j][own_thread].to_floats(weights[j]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weights[j][c] += bias[c];
        sums.largest[c] = fmaxf(sums.largest[c], weights[j][c]);
      }
    });
    if (kGroups) join_groups(p.team, sums.largest, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int c = 0; c < kColumns; ++c) reference[c] = Sums::reference(sums.largest[c]);
    counted.each([&](int j) {
      float kv[kColumns];
      stage.kv[j][own_thread].to_floats(kv);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weights[j][c] = Sums::weight(weights[j][c], reference[c]);
        sums.total[c] += weights[j][c];
        sums.sum[c] = fmaf(weights[j][c], kv[c], sums.sum[c]);
      }
    });
    if (kGroups) {
      join_groups(p.team, sums.total, [](float a, float b) { return a + b; });
      join_groups(p.team, sums.sum, [](float a, float b) { return a + b; });
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      scale[c] = __fdividef(1, sums.total[c]);  // makes the weights those of the softmax
      sums.sum[c] *= scale[c];
    }

    float gradient[kColumns];
    if (kAligned && !p.hadamard) {
      early.to_floats(gradient);
    } else {
      load_gradient<T, kAligned>(params, first_row + window, slice, lanes, gradient);
    }
    if (turned) rotation.rotate(-1, gradient);
    if (p.norm_weight != nullptr) {
      float weight[kColumns];
      load_norm<kAligned>(p, column, weight);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        norm_sums[c] = fmaf(gradient[c] * norm.rstd, sums.sum[c], norm_sums[c]);
        gradient[c] = norm.rstd * (gradient[c] * weight[c] - sums.sum[c] * norm.part);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) gradient[c] *= scale[c];

    const auto put_kv = d_kv.of(spot, own), put_gate = d_gate.of(spot, own);
    counted.each([&](int j) {
      float kv[kColumns], of_kv[kColumns], of_gate[kColumns];
      stage.kv[j][own_thread].to_floats(kv);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        of_kv[c] = weights[j][c] * gradient[c];
        of_gate[c] = of_kv[c] * (kv[c] - sums.sum[c]);
        bias_sums[j][c] += of_gate[c];
      }
      put_kv(j, of_kv);
      put_gate(j, of_gate);
    });
  }
  device::allow_next_kernel();
  clear_sequences<T, kAligned>(params);

  device::cp_async_wait<0>();
  __syncthreads();  // all stages have been read
#pragma unroll
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    shared.sums[j][own_thread] = Pack<float>::of(bias_sums[j]).words;
  }
  shared.sums[kSlotsAtOnce][own_thread] = Pack<float>::of(norm_sums).words;
  __syncthreads();  // the sums of all windows are there
  put_part<T>(params, shared.sums);
}

// Adds the parts. A block has 32 * kColumns sums, of which each of its warps adds a
// range of the parts.
template <int kWarpsOfSums>
__global__ void __launch_bounds__(32 * kWarpsOfSums)
    add_parts(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED_ALIGNED(16, sums, float[kWarpsOfSums][32 * kColumns]);
  const KernelProblem& p = params.problem;
  const int biases = p.slots() * p.d, all = biases + (p.norm_weight != nullptr ? p.d : 0);
  const int first = static_cast<int>(blockIdx.x) * 32 * kColumns;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int at = first + lane * kColumns, parts = params.shares.parts;
  const int of_range = (parts + kWarpsOfSums - 1) / kWarpsOfSums;
  const int begin = warp * of_range, end = min(begin + of_range, parts);
  const bool of_bias = at < biases;
  // Beyond the sums: the first ones again, which nobody writes.
  const float* from = of_bias    ? params.bias_parts + at
                      : at < all ? params.norm_parts + (at - biases)
                                 : params.bias_parts;
  const std::int64_t stride = of_bias ? biases : p.d;
  float4 sum = {0, 0, 0, 0};
  device::wait_for_kernel_before();  // with the parts
#pragma unroll 8
  for (int part = begin; part < end; ++part) {
    const float4 more = *reinterpret_cast<const float4*>(from + part * stride);
    sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
  }
  *reinterpret_cast<float4*>(&sums[warp][lane * kColumns]) = sum;
  __syncthreads();
  const int result = first + thread;
  if (thread >= 32 * kColumns || result >= all) return;
  float total = sums[0][thread];
#pragma unroll
  for (int i = 1; i < kWarpsOfSums; ++i) total += sums[i][thread];
  if (result >= biases) {
    params.d_norm_weight[result - biases] = total;
    return;
  }
  const int slot = result / p.d, column = result % p.d, before = p.slots() - p.ratio;
  const bool is_before = slot < before;
  params.d_position_bias.data[(is_before ? slot : slot - before) * params.d_position_bias.stride0 +
                              (is_before ? 0 : (p.series - 1) * p.d) + column] = total;
}

Team team_of_warp(const Problem& problem) {
  constexpr int kWarpLog = 5;
  Team team;
  team.groups_log = std::max(log_above(problem.slots(), kSlotsAtOnce),
                             kWarpLog - std::min(log_above(problem.d, kColumns), kWarpLog));
  team.lanes_log = kWarpLog - team.groups_log;
  return team;
}

// Each part has its windows one after the other, in blocks that run at a time where two of them fit
// on an SM.
template <class T>
Shares shares_of(const BackwardParams& params) {
  const int slices_log =
      log_above(params.problem.d, team_of_warp(params.problem).lanes() * kColumns);
  Shares shares;
  shares.warps_log = std::min(slices_log, kWarpsLog<T>);
  shares.blocks = 1 << (slices_log - shares.warps_log);
  const int windows_log = kWarpsLog<T> - shares.warps_log;
  const std::int64_t turns = (params.num_rows + (1 << windows_log) - 1) >> windows_log;
  const std::int64_t most = 2 * kRuntime.multiprocessors() / shares.blocks;
  shares.parts = static_cast<int>(std::max<std::int64_t>(std::min(turns, most), 1));
  return shares;
}

std::int64_t bias_bytes(const BackwardParams& params, const Shares& shares) {
  return device::scratch_bytes(shares.parts * params.problem.slots() * params.problem.d *
                               std::int64_t{sizeof(float)});
}

std::int64_t norm_bytes(const BackwardParams& params, const Shares& shares) {
  return device::scratch_bytes(shares.parts * params.problem.d * std::int64_t{sizeof(float)});
}

std::int64_t workspace_bytes(const BackwardParams& params, const Shares& shares) {
  return bias_bytes(params, shares) + norm_bytes(params, shares) +
         device::scratch_bytes(params.num_rows * std::int64_t{sizeof(Norm)});
}

// Behind a kernel that lets it in early, where GPUs can do that.
template <class Kernel>
void launch_behind(Kernel* kernel, int blocks, int threads, int bytes, cudaStream_t stream,
                   const KernelParams& params) {
  const auto count = static_cast<unsigned>(blocks);
  const auto shared = static_cast<std::size_t>(bytes);
  if (kRuntime.attribute(cudaDevAttrComputeCapabilityMajor) >= 9) {
    kRuntime.check(device::launch_early(kernel, count, threads, shared, stream, params), "launch");
  } else {
    kRuntime.launch(kernel, count, threads, shared, stream, params);
  }
}

template <class T>
void launch(const BackwardParams& params, const Packed& lists, void* workspace,
            cudaStream_t stream) {
  const Problem& problem = params.problem;
  const Shares shares = shares_of<T>(params);
  const Team team = team_of_warp(problem);
  const bool norm = problem.norm_weight != nullptr;
  const device::Scratch scratch(kRuntime, workspace, workspace_bytes(params, shares), stream);
  auto* const parts = static_cast<char*>(scratch.data());
  KernelParams kernel = {
      .problem = kernel_problem_of(problem, lists),
      .shares = shares,
      .num_rows = static_cast<int>(params.num_rows),
      .wide_rows = norm && params.rows_dtype != problem.dtype,
      .wide_d_rows = params.d_rows_dtype != problem.dtype,
      .wide_kv = params.d_kv_dtype != problem.dtype,
      .wide_gate = params.d_gate_dtype != problem.dtype,
      .rows = params.rows,
      .d_rows = params.d_rows,
      .rstd = static_cast<const float*>(params.rstd),
      .d_kv = params.d_kv,
      .d_gate = params.d_gate,
      .d_position_bias = params.d_position_bias.as<float>(),
      .d_norm_weight = static_cast<float*>(params.d_norm_weight),
      .bias_parts = reinterpret_cast<float*>(parts),
      .norm_parts = reinterpret_cast<float*>(parts + bias_bytes(params, shares)),
      .norms =
          reinterpret_cast<Norm*>(parts + bias_bytes(params, shares) + norm_bytes(params, shares)),
  };
  kernel.problem.team = team;
  const bool wide_gradients = kernel.wide_kv || kernel.wide_gate;
  const auto aligned_in = [](const auto& rows) { return aligned_rows(rows, sizeof(T)); };
  const bool aligned = aligned_inputs(problem) && team.lanes() > 1 && !wide_gradients &&
                       !kernel.wide_rows && !kernel.wide_d_rows && aligned_in(params.rows) &&
                       aligned_in(params.d_rows) && aligned_in(params.d_kv) &&
                       aligned_in(params.d_gate);
  auto* function = !aligned              ? windows_kernel<T, false, true>
                   : team.groups_log > 0 ? windows_kernel<T, true, true>
                                         : windows_kernel<T, true, false>;
  int bytes = sizeof(SharedMemory<T>);
  bool large = false;
  if constexpr (sizeof(T) == 2) {
    large = !wide_gradients && !problem.hadamard && team.groups() == kGroupsOfWarp &&
            problem.slots() > kLargeSlots / 2;
    if (large) {
      function = aligned ? large_windows_kernel<T, true> : large_windows_kernel<T, false>;
      bytes = sizeof(LargeMemory);
    }
  }
  if (norm && !large && kernel.num_rows > 0) {
    const int blocks = (kernel.num_rows + kWarps - 1) / kWarps;
    kRuntime.launch(aligned ? prepare_norms<T, true> : prepare_norms<T, false>,
                    static_cast<unsigned>(blocks), kThreads, 0, stream, kernel);
  }
  kRuntime.allow_all_shared_memory(function, bytes);
  const int blocks = shares.parts * shares.blocks;
  if (large) {
    kRuntime.launch(function, static_cast<unsigned>(blocks), kThreadsOf<T>,
                    static_cast<std::size_t>(bytes), stream, kernel);
  } else {
    launch_behind(function, blocks, kThreadsOf<T>, bytes, stream, kernel);
  }
  const auto sums = static_cast<int>(problem.slots() * problem.d + (norm ? problem.d : 0));
  constexpr int kSums = 32 * kColumns;  // of a block
  const int adding = (sums + kSums - 1) / kSums;
  if (shares.parts > 64) {  // few sums of many parts, or many of few
    launch_behind(add_parts<32>, adding, 32 * 32, 0, stream, kernel);
  } else {
    launch_behind(add_parts<8>, adding, 32 * 8, 0, stream, kernel);
  }
}

}  // namespace

std::int64_t backward_cuda_workspace_bytes(const BackwardParams& params) {
  std::int64_t bytes = 0;
  with_elements(params.problem.dtype,
                [&]<class T>(T) { bytes = workspace_bytes(params, shares_of<T>(params)); });
  return bytes;
}

void backward_cuda(const BackwardParams& params, const Packed& lists, void* workspace,
                   void* stream) {
  with_elements(params.problem.dtype, [&]<class T>(T) {
    launch<T>(params, lists, workspace, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace winnow::compressor
