// Gradients of compressed rows on CUDA. Threads have kColumns neighbouring columns of up to
// kSlotsAtOnce slots, and hold them from the sums to the gradients, so that tokens are read once.
// Where a window is too large for a block, a cluster has it: each of its blocks has a part of the
// columns, and they exchange the two sums over all columns that the norm wants. Clusters have
// windows in turn, and keep their share of the gradients that are sums over windows, which a second
// kernel adds in a fixed order.
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "winnow/compressor/backward/backward_impl.h"
#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/scratch.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/cluster.cuh"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::backward", "cuda"};
constexpr int kMostBlocks = 16, kPortableBlocks = 8;

// How the windows of a call are shared out.
struct Shares {
  Team team;         // of one block
  int blocks = 1;    // of a cluster
  int clusters = 1;  // that have windows
  int parts = 1;     // clusters * windows of a block: sums of their own
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
  // Sums of each part: [parts, slots, d], then [parts, d].
  float *bias_parts, *norm_parts;
};

// What the groups of a window exchange: of each thread, and of all groups in the first one's place.
struct Joint {
  float largest[kThreads][kColumns], total[kThreads][kColumns], sum[kThreads][kColumns];
};

struct SharedMemory {
  union {
    Exchange exchange;
    Joint joint;
  };
  alignas(8) float2 warps[2][kWarps];                 // sums over the columns of each, by turns
  alignas(8) float2 sums[2][kMostBlocks];             // the same of each block of the cluster
  alignas(16) float4 biases[kSlotsAtOnce][kThreads];  // each thread's gradients of its biases
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

// Where the gradient of a window's slots goes. kAligned: it is of kv's type.
template <class T, bool kAligned>
struct Gradients {
  Walk<T, StrideOf<kAligned>> walk;
  Walk<float, StrideOf<kAligned>> wide_walk;
  bool wide;

  __device__ __forceinline__ Gradients(const KernelProblem& p, const Rows<void*>& rows,
                                       bool are_wide, std::int64_t token, int column)
      : wide(are_wide) {
    const std::int64_t at = token * rows.stride0 + column, series = (p.series - 1) * p.d;
    walk = walk.of(static_cast<T*>(rows.data) + at, rows.stride0, series);
    if constexpr (!kAligned) {
      wide_walk = wide_walk.of(static_cast<float*>(rows.data) + at, rows.stride0, series);
    }
  }
  __device__ __forceinline__ void put(int from, int j, int own, const float (&x)[kColumns]) const {
    if constexpr (!kAligned) {
      if (wide) {
        Pack<float>::of(x).template store<false>(wide_walk.at(from, j, own));
        return;
      }
    }
    Pack<T>::of(x).template store<kAligned>(walk.at(from, j, own));
  }
};

// The thread's columns of the gradient of a row before its transform. The whole block calls it.
template <class T, bool kAligned>
__device__ __forceinline__ void load_gradient(const KernelParams& params, const Thread& thread,
                                              int row, int column, bool found, Exchange& exchange,
                                              float (&gradient)[kColumns]) {
  const KernelProblem& p = params.problem;
  const std::int64_t begin = row * params.d_rows.stride0;
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
  float* whole = &exchange.columns[0][0] + thread.window * p.d;
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
  __syncthreads();  // others may write there now
}

// Makes sums those of all groups, in all of them; for many groups this is less work than
// add_groups(). The whole block calls it.
__device__ __forceinline__ void join_groups(const Team& team, const Thread& thread, Joint& joint,
                                            Sums& sums) {
  if (team.groups_log == 0) return;
  const int threads = team.threads(), first = thread.window << team.threads_log();
  const int columns = team.lanes() * kColumns, own = static_cast<int>(threadIdx.x);
  const int all = first + thread.lane;
  // combine(value, other) of all groups, for each column by one thread.
  const auto of_groups = [&](float(&values)[kThreads][kColumns], const auto& combine) {
    for (int column = own - first; column < columns; column += threads) {
      float* const place = &values[first][0] + column;
      float value = *place;
      for (int group = 1; group < team.groups(); ++group) {
        value = combine(value, place[group * columns]);
      }
      *place = value;
    }
  };
  const auto put = [&](float(&values)[kThreads][kColumns], const float(&x)[kColumns]) {
    Pack<float>::of(x).template store<true>(values[own]);
  };
  const auto get = [&](const float(&values)[kThreads][kColumns], float(&x)[kColumns]) {
    Pack<float>::load<true>(values[all]).to_floats(x);
  };
  const auto sum_of = [](float a, float b) { return a + b; };
  put(joint.largest, sums.largest);
  __syncthreads();
  of_groups(joint.largest, [](float a, float b) { return fmaxf(a, b); });
  __syncthreads();
  float largest[kColumns];
  get(joint.largest, largest);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const float scale = Sums::scale(sums.largest[c], Sums::reference(largest[c]));
    sums.largest[c] = largest[c];
    sums.total[c] *= scale;
    sums.sum[c] *= scale;
  }
  put(joint.total, sums.total);
  put(joint.sum, sums.sum);
  __syncthreads();
  of_groups(joint.total, sum_of);
  of_groups(joint.sum, sum_of);
  __syncthreads();
  get(joint.total, sums.total);
  get(joint.sum, sums.sum);
}

// Two sums over all columns of a window, in all of its threads. All blocks of the cluster call it.
__device__ __forceinline__ float2 add_columns(const KernelParams& params, SharedMemory& shared,
                                              float2 x, int turn) {
  const Team& team = params.problem.team;
  const auto add = [&x](float2 other) {
    x.x += other.x;
    x.y += other.y;
  };
  for (int distance = min(team.lanes(), 32) / 2; distance > 0; distance /= 2) {
    add({__shfl_xor_sync(device::kFullWarp, x.x, distance),
         __shfl_xor_sync(device::kFullWarp, x.y, distance)});
  }
  if (team.lanes_log > 5) {
    const int warp = static_cast<int>(threadIdx.x) / 32, of_group = team.lanes() / 32;
    if (threadIdx.x % 32 == 0) shared.warps[turn][warp] = x;
    __syncthreads();
    const int first = warp & ~(of_group - 1);
    x = shared.warps[turn][first];
    for (int i = 1; i < of_group; ++i) add(shared.warps[turn][first + i]);
  }
  const int blocks = params.shares.blocks;
  if (blocks == 1) return x;
  const std::uint32_t own = device::shared_address(&shared.sums[turn][device::cluster_rank()]);
  if (static_cast<int>(threadIdx.x) < blocks) {
    device::st_shared_cluster(device::map_shared(own, threadIdx.x), x);
  }
  device::cluster_sync();
  x = shared.sums[turn][0];
  for (int block = 1; block < blocks; ++block) add(shared.sums[turn][block]);
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

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    backward_kernel(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED(shared, SharedMemory);
  const KernelProblem& p = params.problem;
  const Shares& shares = params.shares;
  const int block = static_cast<int>(blockIdx.x), cluster = block / shares.blocks;
  if (shares.blocks > 1) device::cluster_sync();  // all blocks run before one reaches another
  const Thread thread(p.team);
  const int windows = p.team.windows();
  const int lane = block % shares.blocks * p.team.lanes() + thread.lane, column = lane * kColumns;
  const bool active = column < p.d;
  Range range(p, thread.group);
  const int own = p.slots() - p.ratio;
  // Where windows do not overlap, slots are counted from the group's first.
  const int skipped = own == 0 ? range.begin : 0;
  range.begin -= skipped;
  range.end -= skipped;
  float norm_sums[kColumns] = {};
  for (int j = 0; j < kSlotsAtOnce; ++j) shared.biases[j][threadIdx.x] = {};

  Windows of_rows;
  int turn = 0;
  for (int first_row = cluster * windows; first_row < params.num_rows;
       first_row += shares.clusters * windows, turn ^= 1) {
    const int row = first_row + thread.window;
    const Place place = row < params.num_rows && active ? of_rows.of_row(p, row) : Place();
    const int first = place.window == 0 ? own : 0;
    const bool found = place.found && max(range.begin, first) < range.end;
    const SlotLoader<T, kAligned> loader(p, place.token, column, skipped);
    // A slot beyond the range is one of its ends again, of weight 0.
    const bool whole = found && range.begin >= first && range.begin + kSlotsAtOnce == range.end;
    const auto place_of = [&](int j) {
      return whole ? j : min(max(range.begin + j, first), range.end - 1) - range.begin;
    };
    const auto counts = [&](int j) { return whole || (found && place_of(j) == j); };
    typename SlotLoader<T, kAligned>::Raw raw[kSlotsAtOnce];
    const bool simple = whole && range.is_first_whole();  // offsets are the same in all threads
    if (simple) {
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) raw[j] = loader.fetch(0, j);
    } else if (found) {
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) raw[j] = loader.fetch(range.begin, place_of(j));
    }
    const Factors<kAligned> factors(p, place.position, column);
    float gradient[kColumns];
    load_gradient<T, kAligned>(params, thread, row, column, place.found, shared.exchange, gradient);

    float weights[kSlotsAtOnce][kColumns], reference[kColumns];
    Sums sums = Sums::of_none();
    if (simple) {
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) loader.gate(raw[j], 0, j, weights[j]);
    } else if (found) {
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) {
        loader.gate(raw[j], range.begin, place_of(j), weights[j]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (!counts(j)) weights[j][c] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int j = 0; found && j < kSlotsAtOnce; ++j) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sums.largest[c] = fmaxf(sums.largest[c], weights[j][c]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) reference[c] = Sums::reference(sums.largest[c]);
#pragma unroll
    for (int j = 0; found && j < kSlotsAtOnce; ++j) {
      float kv[kColumns];
      loader.kv(raw[j], 0, j, kv);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weights[j][c] = Sums::weight(weights[j][c], reference[c]);
        sums.total[c] += weights[j][c];
        sums.sum[c] = fmaf(weights[j][c], counts(j) ? kv[c] : 0.0f, sums.sum[c]);
      }
    }
    float own_largest[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) own_largest[c] = sums.largest[c];
    join_groups(p.team, thread, shared.joint, sums);
    float sum[kColumns], scale[kColumns];  // scale: makes the thread's weights those of the softmax
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float inverse = __fdividef(1, sums.total[c]);
      sum[c] = sums.sum[c] * inverse;
      scale[c] = Sums::scale(own_largest[c], Sums::reference(sums.largest[c])) * inverse;
    }

    if (p.pairs > 0) factors.rotate(-1, gradient);
    if (p.norm_weight != nullptr) {
      float2 both = {0, 0};  // of sum^2, and of the weighed gradient with sum
      float weighed[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weighed[c] = gradient[c] * factors.norm[c];
        if (!place.found) continue;
        both.x += sum[c] * sum[c];
        both.y += weighed[c] * sum[c];
      }
      both = add_columns(params, shared, both, turn);
      const float inverse = norm_of(p, both.x);
      const float mean = both.y / static_cast<float>(p.d);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (place.found) norm_sums[c] += gradient[c] * sum[c] * inverse;
        gradient[c] = inverse * (weighed[c] - sum[c] * (inverse * inverse * mean));
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) gradient[c] *= scale[c];

    const std::int64_t token = place.token - own + skipped;
    const Gradients<T, kAligned> d_kv_walk(p, params.d_kv, params.wide_kv, token, column);
    const Gradients<T, kAligned> d_gate_walk(p, params.d_gate, params.wide_gate, token, column);
    const auto store = [&](int from, int j) {
      float kv[kColumns], d_kv[kColumns], d_gate[kColumns];
      loader.kv(raw[j], 0, j, kv);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        d_kv[c] = weights[j][c] * gradient[c];
        d_gate[c] = d_kv[c] * (kv[c] - sum[c]);
      }
      float4& bias = shared.biases[j][threadIdx.x];
      bias = {bias.x + d_gate[0], bias.y + d_gate[1], bias.z + d_gate[2], bias.w + d_gate[3]};
      d_kv_walk.put(from, j, own, d_kv);
      d_gate_walk.put(from, j, own, d_gate);
    };
    if (simple) {
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) store(0, j);
    } else {
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) {
        if (counts(j)) store(range.begin, j);
      }
    }
  }
  for (int sequence = block; sequence < p.n; sequence += static_cast<int>(gridDim.x)) {
    clear_sequence<T, kAligned>(params, sequence);
  }

  if (shares.blocks > 1) device::cluster_sync();  // nobody reaches this block any more
  if (!active) return;
  const std::int64_t part = cluster * windows + thread.window;
#pragma unroll
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    const int slot = range.begin + j;
    if (slot >= range.end) continue;
    reinterpret_cast<float4*>(
        params.bias_parts)[((part * p.slots() + skipped + slot) * p.d + column) / 4] =
        shared.biases[j][threadIdx.x];
  }
  if (p.norm_weight != nullptr && thread.group == 0) {
    store_columns<float, true>(params.norm_parts, part * p.d + column, true, norm_sums);
  }
}

// Adds the parts. Grid: groups of 32 sums; block: (32, kWarps), of which each row adds a range of
// the parts.
__global__ void __launch_bounds__(kThreads) add_parts(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED(sums, float[kWarps][32]);
  const KernelProblem& p = params.problem;
  const int biases = p.slots() * p.d, all = biases + (p.norm_weight != nullptr ? p.d : 0);
  const int at = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  const int parts = params.shares.parts, of_range = (parts + kWarps - 1) / kWarps;
  const int begin = static_cast<int>(threadIdx.y) * of_range, end = min(begin + of_range, parts);
  const bool of_bias = at < biases;
  // Beyond the sums: the first one again, which nobody writes.
  const float* from = of_bias    ? params.bias_parts + at
                      : at < all ? params.norm_parts + (at - biases)
                                 : params.bias_parts;
  const std::int64_t stride = of_bias ? biases : p.d;
  float sum = 0;
#pragma unroll 16
  for (int part = begin; part < end; ++part) sum += from[part * stride];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || at >= all) return;
  for (int i = 1; i < kWarps; ++i) sum += sums[i][threadIdx.x];
  if (!of_bias) {
    params.d_norm_weight[at - biases] = sum;
    return;
  }
  const int slot = at / p.d, column = at % p.d, own = p.slots() - p.ratio;
  const bool before = slot < own;
  params.d_position_bias.data[(before ? slot : slot - own) * params.d_position_bias.stride0 +
                              (before ? 0 : (p.series - 1) * p.d) + column] = sum;
}

template <class T>
auto* kernel_of(bool aligned) {
  return aligned ? backward_kernel<T, true> : backward_kernel<T, false>;
}

// How many clusters of so many blocks run at a time on the current GPU. Asked once, as it takes
// longer than a launch.
template <class T>
int most_clusters(int blocks) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, int> known;
  int gpu = 0, most = 0;
  kRuntime.check(cudaGetDevice(&gpu), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  if (const auto found = known.find({gpu, blocks}); found != known.end()) return found->second;
  if (blocks > kPortableBlocks) {
    for (const bool aligned : {false, true}) {
      kRuntime.check(cudaFuncSetAttribute(kernel_of<T>(aligned),
                                          cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                     "cudaFuncSetAttribute");
    }
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = kThreads;
  cudaLaunchAttribute attribute = device::in_clusters(static_cast<unsigned>(blocks));
  config.attrs = &attribute;
  config.numAttrs = 1;
  kRuntime.check(cudaOccupancyMaxActiveClusters(&most, kernel_of<T>(true), &config),
                 "cudaOccupancyMaxActiveClusters");
  known[{gpu, blocks}] = most;
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
  const int most = shares.blocks > 1 ? most_clusters<T>(shares.blocks)
                                     : kRuntime.multiprocessors() * kBlocksOfSm;
  const std::int64_t windows = shares.team.windows();
  const std::int64_t turns = (params.num_rows + windows - 1) / windows;
  shares.clusters =
      static_cast<int>(std::max<std::int64_t>(std::min<std::int64_t>(turns, most), 1));
  shares.parts = static_cast<int>(shares.clusters * windows);
  return shares;
}

std::int64_t bias_bytes(const BackwardParams& params, const Shares& shares) {
  return device::scratch_bytes(shares.parts * params.problem.slots() * params.problem.d *
                               std::int64_t{sizeof(float)});
}

std::int64_t workspace_bytes(const BackwardParams& params, const Shares& shares) {
  return bias_bytes(params, shares) +
         device::scratch_bytes(shares.parts * params.problem.d * std::int64_t{sizeof(float)});
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
  kRuntime.check(
      device::launch_clusters(kernel_of<T>(aligned), static_cast<unsigned>(shares.blocks),
                              static_cast<unsigned>(shares.clusters * shares.blocks), kThreads, 0,
                              stream, kernel),
      "launch");
  const std::int64_t sums =
      problem.slots() * problem.d + (problem.norm_weight != nullptr ? problem.d : 0);
  kRuntime.launch(add_parts, static_cast<unsigned>((sums + 31) / 32), dim3(32, kWarps), 0, stream,
                  kernel);
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
