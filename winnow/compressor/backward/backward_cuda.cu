// Gradients of compressed rows on CUDA. Threads have kColumns neighbouring columns of up to
// kSlotsAtOnce slots, which are copied to shared memory one window ahead and read once. Where a
// window is too large for a block, a cluster has it: each of its blocks has a part of the columns,
// and they exchange the two sums over all columns that the norm wants. Clusters have windows in
// turn, and keep their share of the gradients that are sums over windows, which a second kernel
// adds in a fixed order.
#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <tuple>

#include "winnow/compressor/backward/backward_impl.h"
#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/kernel_order.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/scratch.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/cluster.cuh"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::backward", "cuda"};
constexpr int kMostBlocks = 16, kPortableBlocks = 8;
constexpr int kStages = 2;

// Blocks of an SM, which has room for the stages of so many.
template <class T>
constexpr int kBlocks = sizeof(T) == 2 ? 2 : 1;

// How the windows of a call are shared out.
struct Shares {
  Team team;         // of one block
  int blocks = 1;    // of a cluster
  int clusters = 1;  // that have windows, and sums of their own: parts
};

struct KernelParams {
  KernelProblem problem;
  Shares shares;
  int num_rows;
  bool wide_rows, wide_kv, wide_gate;  // floats, not as kv
  Rows<const void*> d_rows;
  Rows<void*> d_kv, d_gate;
  Rows<float*> d_position_bias;
  float* d_norm_weight;
  // Sums of each cluster: [clusters, slots, d], then [clusters, d].
  float *bias_parts, *norm_parts;
};

// The slots of a window on their way to the threads that hold them.
template <class T>
struct Stage {
  Pack<T> kv[kSlotsAtOnce][kThreads], gate[kSlotsAtOnce][kThreads];
};

// A window that is to come: its first own token, and the position of that.
struct alignas(16) Spot {
  enum Kind : std::int32_t { none, first, other };  // first: of its sequence
  std::int32_t token;
  Kind kind;
  std::int64_t position;
};
// The next windows of a warp; where it has several teams, of each of them.
struct Course {
  static constexpr int kSpots = 16;
  Spot spots[kSpots];
};
WINNOW_HOST_DEVICE inline int threads_of_course(const Team& team) {
  return team.threads() < 32 ? team.threads() : 32;
}

// What the groups of a window exchange: of each thread.
struct Joint {
  float largest[kThreads][kColumns], total[kThreads][kColumns], sum[kThreads][kColumns];
};

// A block's dynamic shared memory. Behind it is what BlockMemory finds.
template <class T>
struct alignas(16) SharedMemory {
  union {
    Stage<T> stages[kStages];
    float4 gradients[kSlotsAtOnce][kThreads];  // of the biases, in the end
  };
  float4 biases[kSlotsAtOnce][kThreads];  // of the gates of each thread
  float2 warps[2][kWarps];                // sums over the columns of each, by turns
  float2 sums[2][kMostBlocks];            // the same of each block of the cluster; 0 beyond it
  std::uint64_t there[2];                 // barriers: the sums of all blocks are
};

// What depends on the team: lanes_of_block are the lanes of its windows, of one group each.
struct BlockMemory {
  float4 *norm_sums, *norm;  // of lanes_of_block: gradients of norm_weight; of the lanes: itself
  Joint* joint;              // where there are groups
  float4 *largest, *inverse, *sum;  // of lanes_of_block: of all groups, where there are some
  Course* courses;
  float* rows;  // of the block's windows, where there is a transform
  std::byte* end;

  WINNOW_HOST_DEVICE BlockMemory(std::byte* begin, const Team& team, bool hadamard) : end(begin) {
    const bool groups = team.groups_log > 0;
    const int lanes_of_block = kThreads >> team.groups_log, of_groups = groups ? lanes_of_block : 0;
    take(norm_sums, lanes_of_block);
    take(norm, team.lanes());
    take(joint, groups ? 1 : 0);
    take(largest, of_groups);
    take(inverse, of_groups);
    take(sum, of_groups);
    take(courses, kThreads / threads_of_course(team));
    take(rows, hadamard ? kThreads * kColumns : 0);
  }

 private:
  template <class T>
  WINNOW_HOST_DEVICE void take(T*& pointer, int count) {
    pointer = reinterpret_cast<T*>(end);
    end += count * sizeof(T);
  }
};

template <class T, bool kAligned>
__device__ __forceinline__ void load_columns(const void* data, std::int64_t at, bool wide,
                                             float (&x)[kColumns]) {
  if (wide) {
    Pack<float>::load<kAligned>(static_cast<const float*>(data) + at).to_floats(x);
  } else {
    Pack<T>::template load<kAligned>(static_cast<const T*>(data) + at).to_floats(x);
  }
}

// The slots that a thread holds: so many of a window, from `begin` on. Those from `own` on, counted
// from `begin`, are of the window's own tokens.
struct Held {
  int begin, count, own;

  // Of one slot.
  __device__ __forceinline__ Held(const KernelProblem& p, int slot)
      : begin(slot), count(1), own(p.slots() - p.ratio - slot) {}
  __device__ __forceinline__ Held(const KernelProblem& p, const Range& range)
      : begin(range.begin), count(range.end - range.begin), own(p.slots() - p.ratio - begin) {}
};

// Where a thread's slots of windows are in a tensor.
template <class T, class Stride>
struct Slots {
  Walk<T, Stride> of_none;  // of a window whose first own token would be 0

  __device__ __forceinline__ Slots(T* data, std::int64_t stride, const KernelProblem& p,
                                   const Held& held, int column)
      : of_none(of_none.of(data + (held.begin - (p.slots() - p.ratio)) * stride + column, stride,
                           (p.series - 1) * p.d)) {}
  __device__ __forceinline__ Walk<T, Stride> of(const Spot& spot) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return {reinterpret_cast<T*>(reinterpret_cast<Byte*>(of_none.first) +
                                 std::int64_t{spot.token} * of_none.stride),
            of_none.stride, of_none.jump};
  }
};

// Where the gradients of a thread's slots go. kAligned: they are of kv's type.
template <class T, bool kAligned>
struct Gradients {
  Slots<T, StrideOf<kAligned>> slots;
  Slots<float, StrideOf<kAligned>> wide_slots;
  bool wide;

  __device__ __forceinline__ Gradients(const Rows<void*>& rows, bool are_wide,
                                       const KernelProblem& p, const Held& held, int column)
      : slots(static_cast<T*>(rows.data), rows.stride0, p, held, column),
        wide_slots(static_cast<float*>(rows.data), rows.stride0, p, held, column),
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

// The thread's columns of the gradient of a row before its transform. The whole block calls it.
template <class T, bool kAligned>
__device__ __forceinline__ void load_gradient(const KernelParams& params, const Thread& thread,
                                              int row, int column, bool found, float* rows,
                                              float (&gradient)[kColumns]) {
  const KernelProblem& p = params.problem;
  const auto stride = static_cast<StrideOf<kAligned>>(params.d_rows.stride0);
  const std::int64_t begin = std::int64_t{row} * stride;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) gradient[c] = 0;
  if (!p.hadamard) {
    if (found) {
      load_columns<T, kAligned>(params.d_rows.data, begin + column, params.wide_rows, gradient);
    }
    return;
  }
  // The matrix is symmetric. Every block transforms the whole row.
  const int threads = p.team.threads(), first = static_cast<int>(threadIdx.x) & (threads - 1);
  float* whole = rows + thread.window * p.d;
  __syncthreads();
  for (int i = first * kColumns; found && i < p.d; i += threads * kColumns) {
    float loaded[kColumns];
    load_columns<T, kAligned>(params.d_rows.data, begin + i, params.wide_rows, loaded);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) whole[i + c] = loaded[c];
  }
  for (int half = 1; half < p.d; half *= 2) {
    __syncthreads();
    for (int i = first; i < p.d / 2; i += threads) {
      float& low = whole[i / half * 2 * half + i % half];
      float& high = *(&low + half);
      const float a = low, b = high;
      low = a + b;
      high = a - b;
    }
  }
  __syncthreads();
  const float scale = hadamard_scale(p);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) gradient[c] = found ? whole[column + c] * scale : 0.0f;
}

// Which of the slots that a thread holds count in a window: [first, end).
struct Counted {
  int first, end;

  __device__ __forceinline__ Counted(const Held& held, const Spot& spot)
      : first(spot.kind == Spot::first ? max(held.own, 0) : 0),
        end(spot.kind != Spot::none ? held.count : 0) {}
  __device__ __forceinline__ bool any() const { return first < end; }
  __device__ __forceinline__ bool all() const { return first == 0 && end == kSlotsAtOnce; }
  __device__ __forceinline__ bool operator()(int j) const { return j >= first && j < end; }
};

// function(j) for a thread's slots j that count.
template <class Function>
__device__ __forceinline__ void for_counted(const Counted& counted, const Function& function) {
  if (counted.all()) {
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j) function(j);
  } else if (counted.any()) {
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j) {
      if (counted(j)) function(j);
    }
  }
}

// Copies a thread's slots of windows to stages. Copies of 16 bytes go past L1: where a thread's
// columns have 8, the first of two neighbours copies kv of both, and the second the gates. So the
// threads of a warp wait for each other before they read a stage, and before it is written again.
template <class T, bool kAligned>
struct Copier {
  static constexpr bool kPairs = kAligned && sizeof(Pack<T>) == 8;

  const Held& held;
  int thread;
  bool second;
  Slots<const T, StrideOf<kAligned>> slots, gate_slots;  // the gates where there are no pairs

  __device__ __forceinline__ Copier(const KernelProblem& p, const Held& own_slots, int column)
      : held(own_slots),
        thread(static_cast<int>(threadIdx.x)),
        second(kPairs && thread % 2 == 1),
        slots(data(second ? p.gate : p.kv), second ? p.gate.stride0 : p.kv.stride0, p, held,
              second ? column - kColumns : column),
        gate_slots(data(p.gate), p.gate.stride0, p, held, column) {}
  // Begins to copy a window.
  __device__ __forceinline__ void copy(const Spot& spot, Stage<T>& stage) const {
    const auto walk = slots.of(spot), gate_walk = gate_slots.of(spot);
    for_counted(Counted(held, spot), [&](int j) {
      const T* const source = walk.at(0, j, held.own);
      if constexpr (kPairs) {
        copy_pack((second ? stage.gate : stage.kv)[j][thread & ~1], source);
      } else if constexpr (kAligned) {
        copy_pack(stage.kv[j][thread], source);
        copy_pack(stage.gate[j][thread], gate_walk.at(0, j, held.own));
      } else {
        stage.kv[j][thread] = Pack<T>::template load<false>(source);
        stage.gate[j][thread] = Pack<T>::template load<false>(gate_walk.at(0, j, held.own));
      }
    });
    device::cp_async_commit();
  }

 private:
  static __device__ __forceinline__ const T* data(const Rows<const void*>& rows) {
    return static_cast<const T*>(rows.data);
  }
  static __device__ __forceinline__ void copy_pack(Pack<T>& to, const T* from) {
    device::cp_async(device::shared_address(&to), from);
  }
};

// Makes sums those of all groups, in all of them, with the inverse of the total in its place, and
// the sum times that: each column is added by a few neighbouring threads. The whole block calls it.
__device__ __forceinline__ void join_groups(const Team& team, const Thread& thread,
                                            const BlockMemory& memory, Sums& sums) {
  Joint& joint = *memory.joint;
  const int own = static_cast<int>(threadIdx.x), threads = team.threads(), lanes = team.lanes();
  Pack<float>::of(sums.largest).template store<true>(joint.largest[own]);
  Pack<float>::of(sums.total).template store<true>(joint.total[own]);
  Pack<float>::of(sums.sum).template store<true>(joint.sum[own]);
  __syncthreads();
  constexpr int kEach = 4;  // groups of a thread
  const int parts_log = max(team.groups_log - 2, 0), parts = 1 << parts_log;
  const int part = own & (parts - 1), of_window = own & (threads - 1);
  const int columns = lanes * kColumns, begin = own - of_window + part * kEach * lanes;
  const int each = min(kEach, team.groups());
  for (int column = of_window >> parts_log; column < columns; column += threads >> parts_log) {
    const auto value = [&](const float(&values)[kThreads][kColumns], int i) {
      return (&values[begin][0])[i * columns + column];
    };
    float largest[kEach], most = -INFINITY, total = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      largest[i] = i < each ? value(joint.largest, i) : -INFINITY;
      most = fmaxf(most, largest[i]);
    }
    for (int distance = 1; distance < parts; distance *= 2) {
      most = fmaxf(most, __shfl_xor_sync(device::kFullWarp, most, distance));
    }
    const float reference = Sums::reference(most);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i >= each) continue;
      const float scale = Sums::scale(largest[i], reference);
      total = fmaf(value(joint.total, i), scale, total);
      sum = fmaf(value(joint.sum, i), scale, sum);
    }
    for (int distance = 1; distance < parts; distance *= 2) {
      total += __shfl_xor_sync(device::kFullWarp, total, distance);
      sum += __shfl_xor_sync(device::kFullWarp, sum, distance);
    }
    if (part != 0) continue;
    const int at = thread.window * columns + column;
    const float inverse = __fdividef(1, total);
    reinterpret_cast<float*>(memory.largest)[at] = most;
    reinterpret_cast<float*>(memory.inverse)[at] = inverse;
    reinterpret_cast<float*>(memory.sum)[at] = sum * inverse;
  }
  __syncthreads();  // the sums of all groups are there
  const int at = thread.window * lanes + thread.lane;
  Pack<float>{memory.largest[at]}.to_floats(sums.largest);
  Pack<float>{memory.inverse[at]}.to_floats(sums.total);
  Pack<float>{memory.sum[at]}.to_floats(sums.sum);
}

// Two sums over all columns of a window, in all of its threads. All blocks of the cluster call it.
// A block's sums for one turn are read before its threads meet in the next one, and another block
// sends those for the turn after that when it has got the next ones.
template <bool kGroups, class T>
__device__ __forceinline__ float2 add_columns(const KernelParams& params, SharedMemory<T>& shared,
                                              float2 x, unsigned window) {
  const unsigned turn = window % 2;
  const Team& team = params.problem.team;
  const auto add = [&x](float2 other) {
    x.x += other.x;
    x.y += other.y;
  };
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    if (distance >= team.lanes()) continue;
    add({__shfl_xor_sync(device::kFullWarp, x.x, distance),
         __shfl_xor_sync(device::kFullWarp, x.y, distance)});
  }
  if (team.lanes_log > 5) {
    constexpr int kMostWarps = kMostColumns / kColumns / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, of_group = team.lanes() / 32;
    if (threadIdx.x % 32 == 0) shared.warps[turn][warp] = x;
    const unsigned number = 1 + (threadIdx.x >> team.lanes_log);  // a barrier of the lanes alone
    if (team.lanes_log == 6) {
      device::bar_sync<64>(number);
    } else {
      device::bar_sync<kMostColumns / kColumns>(number);
    }
    const float2* const warps = &shared.warps[turn][warp & ~(of_group - 1)];
    x = warps[0];
#pragma unroll
    for (int i = 1; i < kMostWarps; ++i) {
      if (i < of_group) add(warps[i]);
    }
  }
  const int blocks = params.shares.blocks;
  if (!kGroups || blocks == 1) return x;
  const std::uint32_t own = device::shared_address(&shared.sums[turn][device::cluster_rank()]),
                      there = device::shared_address(&shared.there[turn]);
  if (threadIdx.x == 0) {
    device::mbarrier_arrive_expect(there, static_cast<unsigned>(blocks) * unsigned{sizeof(x)});
  }
  if (static_cast<int>(threadIdx.x) < blocks) {
    device::st_async_cluster(device::map_shared(own, threadIdx.x), x,
                             device::map_shared(there, threadIdx.x));
  }
  device::mbarrier_wait(there, window / 2 % 2, "columns", 0);
  x = shared.sums[turn][0];
#pragma unroll
  for (int block = 1; block < kPortableBlocks; ++block) add(shared.sums[turn][block]);
  for (int block = kPortableBlocks; block < blocks; ++block) add(shared.sums[turn][block]);
  return x;
}

// Zeros in columns [first, first + count) of some tokens, by the whole block.
template <class T, bool kAligned>
__device__ void clear(const KernelParams& params, int token, int tokens, int first, int count) {
  const float zeros[kColumns] = {};
  for (int i = static_cast<int>(threadIdx.x) * kColumns; i < tokens * count;
       i += kThreads * kColumns) {
    const int at = token + i / count, column = first + i % count;
    store_columns<T, kAligned>(params.d_kv.data, at * params.d_kv.stride0 + column, params.wide_kv,
                               zeros);
    store_columns<T, kAligned>(params.d_gate.data, at * params.d_gate.stride0 + column,
                               params.wide_gate, zeros);
  }
}

// What no window of the sequence writes.
template <class T, bool kAligned>
__device__ void clear_sequence(const KernelParams& params, int sequence) {
  const KernelProblem& p = params.problem;
  const int begin = read_clamped(p.cu_seqlens, sequence, p.tokens);
  const int length = max(read_clamped(p.cu_seqlens, sequence + 1, p.tokens) - begin, 0);
  const int complete = length / p.ratio * p.ratio;
  clear<T, kAligned>(params, begin + complete, length - complete, 0, p.series * p.d);
  if (p.series == 2 && complete > 0) {
    clear<T, kAligned>(params, begin + complete - p.ratio, p.ratio, 0, p.d);
  }
}

// Adds up what the teams of a block have, and writes it. The whole block calls it.
__device__ __forceinline__ void put_part(const KernelParams& params,
                                         const float4 (&bias_sums)[kSlotsAtOnce][kThreads],
                                         const float4* norm_sums) {
  const KernelProblem& p = params.problem;
  const Team& team = p.team;
  const int block = static_cast<int>(blockIdx.x), blocks = params.shares.blocks;
  const std::int64_t cluster = block / blocks;
  // The sum of every stride-th one, into the columns of a lane.
  const auto put = [&](const float4* sums, int lane, int stride, int end, float* row) {
    const int column = (block % blocks * team.lanes() + lane) * kColumns;
    if (column >= p.d) return;
    float4 sum = sums[0];
    for (int i = stride; i < end; i += stride) {
      sum = {sum.x + sums[i].x, sum.y + sums[i].y, sum.z + sums[i].z, sum.w + sums[i].w};
    }
    *reinterpret_cast<float4*>(row + column) = sum;
  };
  const int first = static_cast<int>(threadIdx.x);
  for (int i = first; i < kSlotsAtOnce * team.threads(); i += kThreads) {
    const int j = i >> team.threads_log(), thread = i & (team.threads() - 1);
    const Range range(p, thread >> team.lanes_log);
    const int slot = range.begin + j;
    if (slot >= range.end) continue;
    put(&bias_sums[j][thread], thread & (team.lanes() - 1), team.threads(), kThreads - thread,
        params.bias_parts + (cluster * p.slots() + slot) * p.d);
  }
  if (p.norm_weight == nullptr) return;
  for (int lane = first; lane < team.lanes(); lane += kThreads) {
    put(norm_sums + lane, lane, team.lanes(), (kThreads >> team.groups_log) - lane,
        params.norm_parts + cluster * p.d);
  }
}

// kGroups: windows may have several groups, and blocks be in clusters.
template <class T, bool kAligned, bool kGroups>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    backward_kernel(const __grid_constant__ KernelParams params) {
  auto& shared = *reinterpret_cast<SharedMemory<T>*>(device::dynamic_shared<16>());
  const KernelProblem& p = params.problem;
  const Shares& shares = params.shares;
  const BlockMemory memory(reinterpret_cast<std::byte*>(&shared + 1), p.team, p.hadamard);
  const int block = static_cast<int>(blockIdx.x), cluster = block / shares.blocks;
  const Thread thread(p.team);
  const int own_thread = static_cast<int>(threadIdx.x), windows = p.team.windows();
  const int lane = block % shares.blocks * p.team.lanes() + thread.lane, column = lane * kColumns;
  const int group = kGroups ? thread.group : 0;
  Held held(p, Range(p, group));
  if (column >= p.d) held.count = 0;
  const Copier<T, kAligned> copier(p, held, column);
  const Gradients<T, kAligned> d_kv(params.d_kv, params.wide_kv, p, held, column),
      d_gate(params.d_gate, params.wide_gate, p, held, column);

  const int stride = shares.clusters * windows, first = cluster * windows;
  const int of_course = threads_of_course(p.team);
  Spot* const spots = memory.courses[own_thread / of_course].spots;
  // Finds the windows of this turn and the next ones.
  const auto find = [&](int first_row) {
    __syncwarp();  // the windows have been read
    for (int i = own_thread % of_course; i < Course::kSpots; i += of_course) {
      const std::int64_t row = first_row + std::int64_t{i} * stride + thread.window;
      const Place place =
          row < params.num_rows ? Windows().of_row(p, static_cast<int>(row)) : Place();
      spots[i] = {place.token,
                  !place.found        ? Spot::none
                  : place.window == 0 ? Spot::first
                                      : Spot::other,
                  place.position};
    }
    __syncwarp();  // the windows are there
  };
  find(first);
  copier.copy(spots[0], shared.stages[0]);
  if (thread.window == 0 && group == 0) {
    float norm[kColumns];
    load_norm<kAligned>(p, column, norm);
    memory.norm[thread.lane] = Pack<float>::of(norm).words;
  }
  const Biases<kAligned> biases(p, column, held.begin);
  for (int j = 0; j < held.count; ++j) {
    shared.biases[j][own_thread] =
        Pack<float>::load<kAligned>(biases.walk.at(0, j, held.own)).words;
  }
  if (own_thread < 2 * kMostBlocks) {
    shared.sums[own_thread / kMostBlocks][own_thread % kMostBlocks] = {0, 0};
  }
  if (own_thread < 2) {
    device::mbarrier_init(device::shared_address(&shared.there[own_thread]), 1);
    device::fence_mbarrier_init();
  }
  __syncthreads();                                // norm_weight is there
  if (shares.blocks > 1) device::cluster_sync();  // all blocks run before one reaches another
  float bias_sums[kSlotsAtOnce][kColumns] = {};
  float4& norm_sum = memory.norm_sums[thread.window * p.team.lanes() + thread.lane];
  if (group == 0) norm_sum = {0, 0, 0, 0};

  unsigned window = 0;  // of the cluster's
  for (int first_row = first; first_row < params.num_rows; first_row += stride, ++window) {
    const unsigned turn = window % 2, next = (window + 1) % Course::kSpots;
    const Spot spot = spots[window % Course::kSpots];
    if (next == 0) find(first_row + stride);
    __syncwarp();  // the stage has been read
    copier.copy(spots[next], shared.stages[1 - turn]);
    const Counted counted(held, spot);
    const bool found = spot.kind != Spot::none && column < p.d;
    // Turned columns are those of the last pairs, which begin in the middle of a thread's at most.
    const bool turns = column + kColumns > p.d - 2 * p.pairs;
    Rotation rotation;
    if (turns) rotation = Rotation(p, spot.position, column);
    float gradient[kColumns];
    load_gradient<T, kAligned>(params, thread, first_row + thread.window, column, found,
                               memory.rows, gradient);
    device::cp_async_wait<kStages - 1>();
    __syncwarp();
    const Stage<T>& stage = shared.stages[turn];

    float weights[kSlotsAtOnce][kColumns], reference[kColumns];
    Sums sums = Sums::of_none();
    for_counted(counted, [&](int j) {
      float bias[kColumns];
      Pack<float>{shared.biases[j][own_thread]}.to_floats(bias);
      stage.gate[j][own_thread].to_floats(weights[j]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weights[j][c] += bias[c];
        sums.largest[c] = fmaxf(sums.largest[c], weights[j][c]);
      }
    });
#pragma unroll
    for (int c = 0; c < kColumns; ++c) reference[c] = Sums::reference(sums.largest[c]);
    for_counted(counted, [&](int j) {
      float kv[kColumns];
      stage.kv[j][own_thread].to_floats(kv);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weights[j][c] = Sums::weight(weights[j][c], reference[c]);
        sums.total[c] += weights[j][c];
        sums.sum[c] = fmaf(weights[j][c], kv[c], sums.sum[c]);
      }
    });
    float sum[kColumns], scale[kColumns];  // scale: makes the thread's weights those of the softmax
    if (kGroups && p.team.groups_log > 0) {
      const Sums own = sums;
      join_groups(p.team, thread, memory, sums);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sum[c] = sums.sum[c];
        scale[c] = Sums::scale(own.largest[c], Sums::reference(sums.largest[c])) * sums.total[c];
      }
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        scale[c] = __fdividef(1, sums.total[c]);
        sum[c] = sums.sum[c] * scale[c];
      }
    }

    if (turns) rotation.rotate(-1, gradient);
    if (p.norm_weight != nullptr) {
      float2 both = {0, 0};  // of sum^2, and of the weighed gradient with sum
      float norm[kColumns], weighed[kColumns];
      Pack<float>{memory.norm[thread.lane]}.to_floats(norm);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weighed[c] = gradient[c] * norm[c];
        both.x = fmaf(sum[c], sum[c], both.x);
        both.y = fmaf(weighed[c], sum[c], both.y);
      }
      if (!found) both = {0, 0};
      both = add_columns<kGroups>(params, shared, both, window);
      const float inverse = norm_of(p, both.x);
      const float part = inverse * inverse * both.y * p.inverse_d;
      if (found && group == 0) {
        float so_far[kColumns];
        Pack<float>{norm_sum}.to_floats(so_far);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) so_far[c] += gradient[c] * sum[c] * inverse;
        norm_sum = Pack<float>::of(so_far).words;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        gradient[c] = inverse * (weighed[c] - sum[c] * part);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) gradient[c] *= scale[c];

    const auto put_kv = d_kv.of(spot, held.own), put_gate = d_gate.of(spot, held.own);
    for_counted(counted, [&](int j) {
      float kv[kColumns], of_kv[kColumns], of_gate[kColumns];
      stage.kv[j][own_thread].to_floats(kv);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        of_kv[c] = weights[j][c] * gradient[c];
        of_gate[c] = of_kv[c] * (kv[c] - sum[c]);
        bias_sums[j][c] += of_gate[c];
      }
      put_kv(j, of_kv);
      put_gate(j, of_gate);
    });
  }
  device::allow_next_kernel();
  for (int sequence = block; sequence < p.n; sequence += static_cast<int>(gridDim.x)) {
    clear_sequence<T, kAligned>(params, sequence);
  }

  device::cp_async_wait<0>();
  __syncthreads();  // all stages have been read
#pragma unroll
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    shared.gradients[j][own_thread] = Pack<float>::of(bias_sums[j]).words;
  }
  __syncthreads();
  put_part(params, shared.gradients, memory.norm_sums);
}

// ---- large windows

// Windows of more than half of kLargeSlots slots, by clusters whose blocks have kLargeColumns
// columns each. A warp has kColumnsOfWarp columns of all slots, so that no other warp has a part in
// their sums; each of its lanes has four columns of every 16th slot. Slots come to shared memory
// and gradients leave it in whole lines, by a thread for each piece of 16 bytes: a gradient takes
// the place of what it is the gradient of, and the thread that stores it copies what comes next
// there. That is done while the two sums of the window are exchanged.
constexpr int kLargeSlots = 128, kLargeColumns = 64, kColumnsOfWarp = kLargeColumns / kWarps;
constexpr int kGroupsOfWarp = kLargeSlots / kSlotsAtOnce;  // of lanes, with every 16th slot
constexpr int kCourse = 64;                                // windows that a block finds at a time

struct LargeMemory {
  // Rows of 128 bytes: kLargeColumns columns of each slot, in pieces of 16 bytes.
  uint4 kv[kStages][kLargeSlots][8], gate[kStages][kLargeSlots][8];
  float4 biases[kSlotsAtOnce][kThreads];  // of the gates of each thread
  float2 warps[2][kWarps];                // sums over the columns of each warp, by turns
  float2 sums[2][kPortableBlocks];        // the same of each block of the cluster; 0 beyond it
  Spot spots[kCourse];
  std::uint64_t full[kStages],
      there[2];  // barriers: slots of a stage are there, sums of all blocks
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

__device__ __forceinline__ float2 sum_of(const float2 (&sums)[8]) {
  float2 sum = sums[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) sum = {sum.x + sums[i].x, sum.y + sums[i].y};
  return sum;
}

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

// One column of the gradient of a row, turned back.
struct RowColumn {
  float even, odd, cos, sin;  // of the pair of columns

  template <class T>
  __device__ __forceinline__ void load(const KernelParams& params, const Spot& spot, int row,
                                       int column, bool found) {
    const KernelProblem& p = params.problem;
    even = odd = sin = 0;
    cos = 1;
    if (!found) return;
    const int first = column & ~1, pair = (first - (p.d - 2 * p.pairs)) / 2;
    const std::int64_t at = row * params.d_rows.stride0 + first;
    const auto load_pair = [&](const auto* rows) {
      even = number_at(rows + at);
      odd = number_at(rows + at + 1);
    };
    if (params.wide_rows) {
      load_pair(static_cast<const float*>(params.d_rows.data));
    } else {
      load_pair(static_cast<const T*>(params.d_rows.data));
    }
    if (p.positions > 0 && first >= p.d - 2 * p.pairs) {
      const std::int64_t place = min(max(spot.position, std::int64_t{0}), p.positions - 1);
      cos = p.cos.data[place * p.cos.stride0 + pair];
      sin = p.sin.data[place * p.sin.stride0 + pair];
    }
  }
  __device__ __forceinline__ float turned_back(int column) const {
    return column % 2 == 0 ? fmaf(even, cos, odd * sin) : fmaf(odd, cos, -(even * sin));
  }
};

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    large_windows_kernel(const __grid_constant__ KernelParams params) {
  static_assert(sizeof(T) == 2);
  auto& shared = *reinterpret_cast<LargeMemory*>(device::dynamic_shared<16>());
  const KernelProblem& p = params.problem;
  const Shares& shares = params.shares;
  const int block = static_cast<int>(blockIdx.x), cluster = block / shares.blocks;
  const int own_thread = static_cast<int>(threadIdx.x), warp = own_thread / 32;
  const Folding folding{own_thread % 32};
  const int lane = folding.lane, group = lane / 2;
  const int begin = block % shares.blocks * kLargeColumns;  // the block's first column
  const int column = begin + warp * kColumnsOfWarp + lane % 2 * kColumns;
  const int own_column = column + folding.column();
  const bool has_column = column < p.d;
  const int stride = shares.clusters;

  // The pieces that the thread copies: piece `piece` of every 32nd row.
  constexpr int kRowsAtOnce = kThreads / 8, kPieces = kLargeSlots / kRowsAtOnce;
  const int piece = own_thread % 8, first_slot = own_thread / 8;
  const int piece_column = begin + piece * 8;
  const int slots = p.slots(), own = slots - p.ratio;
  const Held copied(p, first_slot);
  using Stride = StrideOf<kAligned>;
  const Slots<const T, Stride> kv_slots(static_cast<const T*>(p.kv.data), p.kv.stride0, p, copied,
                                        piece_column),
      gate_slots(static_cast<const T*>(p.gate.data), p.gate.stride0, p, copied, piece_column);
  const Slots<T, Stride> d_kv_slots(static_cast<T*>(params.d_kv.data), params.d_kv.stride0, p,
                                    copied, piece_column),
      d_gate_slots(static_cast<T*>(params.d_gate.data), params.d_gate.stride0, p, copied,
                   piece_column);
  // The slots of a window that count: [first, slots), none where there is no window.
  const auto first_of = [&](const Spot& spot) {
    return spot.kind == Spot::other ? 0 : spot.kind == Spot::first ? own : kLargeSlots;
  };
  const int place = place_of_piece(piece, first_slot);
  // Stores the gradients of a window, and begins to copy the slots of another one to their place.
  const auto move = [&](const Spot& before, const Spot& next, int stage) {
    const auto d_kv_walk = d_kv_slots.of(before), d_gate_walk = d_gate_slots.of(before);
    const auto kv_walk = kv_slots.of(next), gate_walk = gate_slots.of(next);
    const auto move_piece = [&](int k, bool stores, bool copies) {
      const int row = k * kRowsAtOnce;
      uint4 &kv = shared.kv[stage][row + first_slot][place],
            &gate = shared.gate[stage][row + first_slot][place];
      if (stores) {
        store_piece<kAligned>(d_kv_walk.at(0, row, copied.own), kv);
        store_piece<kAligned>(d_gate_walk.at(0, row, copied.own), gate);
      }
      if (copies) {
        copy_piece<kAligned>(kv, kv_walk.at(0, row, copied.own));
        copy_piece<kAligned>(gate, gate_walk.at(0, row, copied.own));
      }
    };
    const bool inside = piece_column < p.d;
    const int from = inside ? first_of(before) : kLargeSlots,
              to = inside ? first_of(next) : kLargeSlots;
    if (from == 0 && to == 0 && slots == kLargeSlots) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) move_piece(k, true, true);
    } else {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int row = k * kRowsAtOnce + first_slot;
        move_piece(k, row >= from && row < slots, row >= to && row < slots);
      }
    }
    const std::uint32_t full = device::shared_address(&shared.full[stage]);
    if constexpr (kAligned) {
      device::mbarrier_arrive_cp_async(full);
    } else {
      device::mbarrier_arrive(full);
    }
  };
  const auto find = [&](int first_row) {
    if (own_thread >= kCourse) return;
    const std::int64_t row = first_row + std::int64_t{own_thread} * stride;
    const Place place =
        row < params.num_rows ? Windows().of_row(p, static_cast<int>(row)) : Place();
    shared.spots[own_thread] = {place.token,
                                !place.found        ? Spot::none
                                : place.window == 0 ? Spot::first
                                                    : Spot::other,
                                place.position};
  };

  find(cluster);
  if (own_thread < 2) {
    device::mbarrier_init(device::shared_address(&shared.full[own_thread]), kThreads);
    device::mbarrier_init(device::shared_address(&shared.there[own_thread]), 1);
    device::fence_mbarrier_init();
  }
  if (own_thread < 2 * kPortableBlocks) (&shared.sums[0][0])[own_thread] = {0, 0};
  __syncthreads();  // the first course is there
  Spot spot = shared.spots[0], before = {0, Spot::none, 0};
  move(before, spot, 0);
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    const int slot = j * kGroupsOfWarp + group;
    if (!has_column || slot >= slots) break;
    shared.biases[j][own_thread] =
        Pack<float>::load<kAligned>(p.position_bias.data +
                                    (slot < own ? slot : slot - own) * p.position_bias.stride0 +
                                    (slot < own ? 0 : (p.series - 1) * p.d) + column)
            .words;
  }
  const float norm = p.norm_weight != nullptr && own_column < p.d ? p.norm_weight[own_column] : 1;
  device::cluster_sync();  // all blocks run before one sends

  float bias_sums[kSlotsAtOnce][kColumns] = {}, norm_sum = 0;
  // The thread's columns of its first slot in a stage.
  const int inside = (group * 8 + place_of_piece(warp, group)) * 16 + lane % 2 * 8;
  const auto pack_of = [&](uint4(&rows)[kLargeSlots][8], int j) -> Pack<T>& {
    return *reinterpret_cast<Pack<T>*>(reinterpret_cast<std::byte*>(&rows) + inside +
                                       j * (kGroupsOfWarp * 128));
  };
  int window = 0;  // of the cluster's
  for (int row = cluster; row < params.num_rows; row += stride, ++window) {
    const int stage = window % kStages, turn = stage;
    const unsigned parity = window / kStages % 2;
    const int next_spot = (window + 1) % kCourse;
    if (next_spot == 0) {
      __syncthreads();  // the course has been gone
      find(row + stride);
      __syncthreads();  // the next course is there
    }
    const bool found = spot.kind != Spot::none && own_column < p.d;
    RowColumn row_column;
    row_column.load<T>(params, spot, row, own_column, found);
    // function(j) for the thread's slots that count.
    const int first = has_column ? first_of(spot) : kLargeSlots;
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
    device::mbarrier_wait(device::shared_address(&shared.full[stage]), parity, "slots", stage);

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
    const float weighed = gradient * norm;
    if (p.norm_weight != nullptr) {
      float2 both = {0, 0};  // of sum^2, and of the weighed gradient with sum
      if (found) both = {sum * sum, weighed * sum};
#pragma unroll
      for (int distance = 1; distance < kColumnsOfWarp; distance *= 2) {
        both.x += __shfl_xor_sync(device::kFullWarp, both.x, distance);
        both.y += __shfl_xor_sync(device::kFullWarp, both.y, distance);
      }
      if (lane == 0) shared.warps[turn][warp] = both;
    }
    __syncthreads();  // the sums of all warps are there, and the gradients of the window before
    if (p.norm_weight != nullptr) {
      const std::uint32_t there = device::shared_address(&shared.there[turn]);
      if (own_thread == 0) {
        device::mbarrier_arrive_expect(there,
                                       static_cast<unsigned>(shares.blocks * sizeof(float2)));
      }
      if (own_thread < shares.blocks) {
        const std::uint32_t sums_of_block =
            device::shared_address(&shared.sums[turn][device::cluster_rank()]);
        device::st_async_cluster(device::map_shared(sums_of_block, own_thread),
                                 sum_of(shared.warps[turn]), device::map_shared(there, own_thread));
      }
    }
    // Meanwhile the gradients of the window before go, and the slots of the next one come.
    const Spot next = shared.spots[next_spot];
    move(before, next, 1 - stage);
    if (p.norm_weight != nullptr) {
      device::mbarrier_wait(device::shared_address(&shared.there[turn]), parity, "columns", turn);
      const float2 both = sum_of(shared.sums[turn]);
      const float inverse = norm_of(p, both.x);
      const float part = inverse * inverse * both.y * p.inverse_d;
      if (found) norm_sum += gradient * sum * inverse;
      gradient = inverse * (weighed - sum * part);
    }
    float factors[kColumns], means[kColumns];
    folding.spread(gradient * scale, factors);
    folding.spread(sum, means);
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
    before = spot;
    spot = next;
  }
  device::allow_next_kernel();
  for (int sequence = block; sequence < p.n; sequence += static_cast<int>(gridDim.x)) {
    clear_sequence<T, kAligned>(params, sequence);
  }
  __syncthreads();  // the gradients of the last window are there
  move(before, {0, Spot::none, 0}, (window + 1) % kStages);
  for (int j = 0; has_column && j < kSlotsAtOnce; ++j) {
    const int slot = j * kGroupsOfWarp + group;
    if (slot >= slots) break;
    *reinterpret_cast<float4*>(params.bias_parts + (std::int64_t{cluster} * slots + slot) * p.d +
                               column) = Pack<float>::of(bias_sums[j]).words;
  }
  if (p.norm_weight != nullptr && lane < kColumnsOfWarp && own_column < p.d) {
    params.norm_parts[std::int64_t{cluster} * p.d + own_column] = norm_sum;
  }
}

// Adds the parts of the clusters. A block has 32 * kColumns sums, of which each of its warps adds a
// range of the parts.
template <int kWarpsOfSums>
__global__ void __launch_bounds__(32 * kWarpsOfSums)
    add_parts(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED_ALIGNED(16, sums, float[kWarpsOfSums][32 * kColumns]);
  const KernelProblem& p = params.problem;
  const int biases = p.slots() * p.d, all = biases + (p.norm_weight != nullptr ? p.d : 0);
  const int first = static_cast<int>(blockIdx.x) * 32 * kColumns;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int at = first + lane * kColumns, parts = params.shares.clusters;
  const int of_range = (parts + kWarpsOfSums - 1) / kWarpsOfSums;
  const int begin = warp * of_range, end = min(begin + of_range, parts);
  const bool of_bias = at < biases;
  // Beyond the sums: the first ones again, which nobody writes.
  const float* from = of_bias    ? params.bias_parts + at
                      : at < all ? params.norm_parts + (at - biases)
                                 : params.bias_parts;
  const std::int64_t stride = of_bias ? biases : p.d;
  float4 sum = {0, 0, 0, 0};
  device::wait_for_kernel_before();
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

template <class T>
auto* kernel_of(bool aligned, const Team& team) {
  return !aligned              ? backward_kernel<T, false, true>
         : team.groups_log > 0 ? backward_kernel<T, true, true>
                               : backward_kernel<T, true, false>;
}

template <class T>
int shared_bytes(const Problem& problem, const Team& team) {
  auto* const anywhere = reinterpret_cast<std::byte*>(alignof(SharedMemory<T>));
  const BlockMemory behind(anywhere, team, problem.hadamard);
  return static_cast<int>(sizeof(SharedMemory<T>) + (behind.end - anywhere));
}

// How many clusters of so many blocks run at a time on the current GPU. Asked once, as it takes
// longer than a launch.
template <class T>
int most_clusters(const Team& team, int blocks, int bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, int, int>, int> known;
  int gpu = 0, most = 0;
  kRuntime.check(cudaGetDevice(&gpu), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  const std::tuple key(gpu, blocks, bytes);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  for (const bool aligned : {false, true}) {
    kRuntime.allow_shared_memory(kernel_of<T>(aligned, team), bytes);
    if (blocks <= kPortableBlocks) continue;
    kRuntime.check(cudaFuncSetAttribute(kernel_of<T>(aligned, team),
                                        cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                   "cudaFuncSetAttribute");
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  cudaLaunchAttribute attribute = device::in_clusters(static_cast<unsigned>(blocks));
  config.attrs = &attribute;
  config.numAttrs = 1;
  kRuntime.check(cudaOccupancyMaxActiveClusters(&most, kernel_of<T>(true, team), &config),
                 "cudaOccupancyMaxActiveClusters");
  known[key] = most;
  return most;
}

// As many clusters as run at a time have all windows.
template <class T>
Shares shares_of(const BackwardParams& params) {
  const Problem& problem = params.problem;
  Shares shares;
  shares.team.lanes_log = log_above(problem.d, kColumns);
  shares.team.groups_log = log_above(problem.slots(), kSlotsAtOnce);
  while (shares.team.threads() > kThreads) {
    --shares.team.lanes_log;
    shares.blocks *= 2;
  }
  const int most = shares.blocks > 1 ? most_clusters<T>(shares.team, shares.blocks,
                                                        shared_bytes<T>(problem, shares.team))
                                     : kRuntime.multiprocessors() * kBlocks<T>;
  const std::int64_t windows = shares.team.windows();
  const std::int64_t turns = (params.num_rows + windows - 1) / windows;
  shares.clusters =
      static_cast<int>(std::max<std::int64_t>(std::min<std::int64_t>(turns, most), 1));
  return shares;
}

std::int64_t bias_bytes(const BackwardParams& params, const Shares& shares) {
  return device::scratch_bytes(shares.clusters * params.problem.slots() * params.problem.d *
                               std::int64_t{sizeof(float)});
}

std::int64_t workspace_bytes(const BackwardParams& params, const Shares& shares) {
  return bias_bytes(params, shares) +
         device::scratch_bytes(shares.clusters * params.problem.d * std::int64_t{sizeof(float)});
}

template <class T>
void launch(const BackwardParams& params, const Packed& lists, void* workspace,
            cudaStream_t stream) {
  const Problem& problem = params.problem;
  const Shares shares = shares_of<T>(params);
  const device::Scratch scratch(kRuntime, workspace, workspace_bytes(params, shares), stream);
  auto* const parts = static_cast<char*>(scratch.data());
  KernelParams kernel = {
      .problem = kernel_problem_of(problem, lists),
      .shares = shares,
      .num_rows = static_cast<int>(params.num_rows),
      .wide_rows = params.d_rows_dtype != problem.dtype,
      .wide_kv = params.d_kv_dtype != problem.dtype,
      .wide_gate = params.d_gate_dtype != problem.dtype,
      .d_rows = params.d_rows,
      .d_kv = params.d_kv,
      .d_gate = params.d_gate,
      .d_position_bias = params.d_position_bias.as<float>(),
      .d_norm_weight = static_cast<float*>(params.d_norm_weight),
      .bias_parts = reinterpret_cast<float*>(parts),
      .norm_parts = reinterpret_cast<float*>(parts + bias_bytes(params, shares)),
  };
  kernel.problem.team = shares.team;
  const bool aligned = aligned_inputs(problem) && !kernel.wide_kv && !kernel.wide_gate &&
                       aligned_rows(params.d_rows, size_of(params.d_rows_dtype)) &&
                       aligned_rows(params.d_kv, size_of(params.d_kv_dtype)) &&
                       aligned_rows(params.d_gate, size_of(params.d_gate_dtype));
  int bytes = shared_bytes<T>(problem, shares.team);
  auto* function = kernel_of<T>(aligned, shares.team);
  if constexpr (sizeof(T) == 2) {
    if (!kernel.wide_kv && !kernel.wide_gate && !problem.hadamard &&
        shares.team.groups() == kGroupsOfWarp && shares.team.lanes() * kColumns == kLargeColumns) {
      function = aligned ? large_windows_kernel<T, true> : large_windows_kernel<T, false>;
      bytes = sizeof(LargeMemory);
    }
  }
  kRuntime.allow_shared_memory(function, bytes);
  kRuntime.check(device::launch_clusters(function, static_cast<unsigned>(shares.blocks),
                                         static_cast<unsigned>(shares.clusters * shares.blocks),
                                         kThreads, static_cast<std::size_t>(bytes), stream, kernel),
                 "launch");
  const std::int64_t sums =
      problem.slots() * problem.d + (problem.norm_weight != nullptr ? problem.d : 0);
  constexpr int kSums = 32 * kColumns;  // of a block
  const dim3 blocks(static_cast<unsigned>((sums + kSums - 1) / kSums));
  // Few sums of many parts, or many of few.
  const bool many = shares.clusters > 64;
  kRuntime.check(device::launch_early(many ? add_parts<32> : add_parts<8>, blocks,
                                      32 * (many ? 32 : 8), 0, stream, kernel),
                 "launch");
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
