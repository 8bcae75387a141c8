// The low-latency dispatch on a GPU: a block takes a token, makes its row and writes it to every
// rank that has an expert of it; later a warp takes each row that has come to its place in order.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/low_latency/low_latency_cuda.cuh"

namespace winnow::expert_parallel {
namespace low_latency {
namespace {

constexpr int kColumns = 2 * kVector;   // of a thread that makes f8, which are 16 bytes of them
constexpr int kGroup = 128 / kColumns;  // threads of 128 columns

__device__ __forceinline__ uint4 load_vector(const std::byte* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint4*>(from);
  alignas(16) std::uint16_t columns[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) columns[i] = reinterpret_cast<const std::uint16_t*>(from)[i];
  return *reinterpret_cast<const uint4*>(columns);
}

// kColumns columns of a group of 128, as f8_e4m3, and the scale of the group: see quantize() of the
// CPU. `mask`: the threads of the group in their warp.
__device__ __forceinline__ uint4 quantize(const uint4 (&raw)[2], bool power_of_two, unsigned mask,
                                          float& scale) {
  constexpr float kLeast = 1e-4f, kLargest = 448;
  constexpr unsigned kInfinityBits = 0x7f800000u, kMantissa = 0x007fffffu;
  float x[kColumns];
  unsigned amax = 0;  // magnitudes order as their bits do
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    x[i] = column_of(raw[i / kVector], i % kVector);
    amax = max(amax, __float_as_uint(x[i]) & 0x7fffffffu);
  }
#pragma unroll
  for (int step = kGroup / 2; step > 0; step /= 2) {
    amax = max(amax, __shfl_xor_sync(mask, amax, step));
  }
  if (amax >= kInfinityBits) {
    scale = __uint_as_float(0x7fc00000u);
    return {0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu};
  }
  scale = __fdiv_rn(fmaxf(__uint_as_float(amax), kLeast), kLargest);
  if (power_of_two) {
    scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
  }
  unsigned words[kColumns / 4];
#pragma unroll
  for (int word = 0; word < kColumns / 4; ++word) {
    float quotients[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) quotients[i] = __fdiv_rn(x[word * 4 + i], scale);
    words[word] = device::pack_f8(quotients);
  }
  return {words[0], words[1], words[2], words[3]};
}

// Where the token's row goes, one place for each of its pairs; null: nowhere.
__device__ void find_places(const LowLatencyDispatchParams& p, std::uint64_t epoch,
                            std::int64_t token, std::byte** places) {
  const LowLatencyView& view = p.view;
  const int k = int(threadIdx.x), per_rank = view.layout.per_rank;
  if (k >= p.indices.topk) return;
  places[k] = nullptr;
  const std::int64_t expert = p.indices.at(token, k);
  const auto find = [&](LowLatencyNote::Found what) {
    LowLatencyNote& note = view.state->note;
    if (atomicCAS(reinterpret_cast<int*>(&note.found), 0, int(what)) != 0) return;
    note.token = std::int32_t(token);
    note.value = std::int32_t(max(std::int64_t(INT32_MIN), min(expert, std::int64_t(INT32_MAX))));
  };
  if (expert == -1 || expert == view.layer.topology.experts) return;
  if (expert < 0 || expert > view.layer.topology.experts) return find(LowLatencyNote::kNoExpert);
  for (int other = 0; other < k; ++other) {
    if (p.indices.at(token, other) == expert) return find(LowLatencyNote::kExpertTwice);
  }
  const int home = int(expert) / per_rank;
  if (masked(view, home)) return;
  const int slot = atomicAdd(view.slots + expert, 1);
  places[k] = view.peers[home] +
              view.layout.message(epoch, int(expert) % per_rank, view.layer.topology.rank, slot);
  *reinterpret_cast<std::int32_t*>(places[k]) = std::int32_t(token * view.layout.topk + k);
}

// The part of a row that a thread has first, loaded before it is known where the row goes.
struct RowStart {
  uint4 raw[2];
};

__device__ __forceinline__ int vectors_of(const LowLatencyDispatchParams& p) {
  return int(p.hidden / kVector);
}

// Vectors `at` and `at + 1` of f8 rows, `at` and `at + kThreads` of bf16 rows.
__device__ __forceinline__ void load_piece(const LowLatencyDispatchParams& p, std::int64_t token,
                                           int at, bool fp8, uint4 (&raw)[2]) {
  const std::byte* row = p.input + token * p.input_stride;
  const bool aligned = reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
  const int other = fp8 ? at + 1 : at + kThreads;
  if (at < vectors_of(p)) raw[0] = load_vector(row + at * 16, aligned);
  if (other < vectors_of(p)) raw[1] = load_vector(row + other * 16, aligned);
}

__device__ void send_bf16(const LowLatencyDispatchParams& p, std::int64_t token,
                          std::byte* const* places, RowStart start) {
  const int vectors = vectors_of(p);
  for (int v = int(threadIdx.x); v < vectors; v += 2 * kThreads) {
    if (v >= 2 * kThreads) load_piece(p, token, v, false, start.raw);
    for (int k = 0; k < p.indices.topk; ++k) {
      if (places[k] == nullptr) continue;
      auto* to = reinterpret_cast<uint4*>(places[k] + LowLatencyLayout::kPairBytes);
      to[v] = start.raw[0];
      if (v + kThreads < vectors) to[v + kThreads] = start.raw[1];
    }
  }
}

__device__ void send_fp8(const LowLatencyDispatchParams& p, RowFormat format, std::int64_t token,
                         std::byte* const* places, RowStart start) {
  const unsigned mask = ((1u << kGroup) - 1) << (threadIdx.x % 32 / kGroup * kGroup);
  const int pieces = int(p.hidden / kColumns);
  for (int piece = int(threadIdx.x); piece < pieces; piece += kThreads) {
    if (piece >= kThreads) load_piece(p, token, piece * 2, true, start.raw);
    float scale;
    const uint4 packed = quantize(start.raw, format != RowFormat::fp8, mask, scale);
    const bool first = piece % kGroup == 0;
    for (int k = 0; k < p.indices.topk; ++k) {
      if (places[k] == nullptr) continue;
      std::byte* to = places[k] + LowLatencyLayout::kPairBytes;
      reinterpret_cast<uint4*>(to)[piece] = packed;
      if (!first) continue;
      to += p.hidden;
      if (format == RowFormat::fp8_ue8m0) {
        to[piece / kGroup] = std::byte(__float_as_uint(scale) >> 23);
      } else {
        reinterpret_cast<float*>(to)[piece / kGroup] = scale;
      }
    }
  }
}

// The last block: how many rows each rank gets for each of its experts.
__device__ void tell_counts(const LowLatencyView& view, std::uint64_t epoch) {
  const int per_rank = view.layout.per_rank;
  for (int expert = int(threadIdx.x); expert < view.layer.topology.experts; expert += kThreads) {
    const int home = expert / per_rank;
    const std::int32_t count = atomicExch(view.slots + expert, 0);
    if (masked(view, home)) continue;
    *reinterpret_cast<std::int32_t*>(
        view.peers[home] + view.layout.count(epoch, view.layer.topology.rank, expert % per_rank)) =
        count;
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    send_kernel(const __grid_constant__ LowLatencyDispatchParams p) {
  WINNOW_BLOCK_SHARED(places, std::byte* [kMostTopk]);
  WINNOW_BLOCK_SHARED(is_last, bool);
  WINNOW_BLOCK_SHARED(note_memory, std::uint32_t[sizeof(LowLatencyNote) / 4]);
  device::wait_for_kernel_before();
  const LowLatencyView& view = p.view;
  const auto format = RowFormat(p.note.format);
  const bool fp8 = format != RowFormat::bf16;
  const std::int64_t tokens = p.note.refusal != 0 ? 0 : p.indices.tokens;
  const std::uint64_t epoch = view.state->sent[kLowLatencyDispatch] + 1;
  RowStart start;
  const auto begin_row = [&](std::int64_t token) {
    if (token < tokens) load_piece(p, token, int(threadIdx.x) * (fp8 ? 2 : 1), fp8, start.raw);
  };
  begin_row(blockIdx.x);
  if (broken_or_told(view)) return;
  if (!wait_for_places(view, kLowLatencyDispatch, epoch)) return;
  device::allow_next_kernel();
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    find_places(p, epoch, token, places);
    __syncthreads();
    fp8 ? send_fp8(p, format, token, places, start) : send_bf16(p, token, places, start);
    begin_row(token + gridDim.x);
    __syncthreads();
  }
  if (!last_block<WrittenFor::system>(view, is_last)) return;
  tell_counts(view, epoch);
  tell_sent(view, kLowLatencyDispatch, epoch, take_note(view, p.note, note_memory));
}

// A row that has come, by a warp. What stands beside the row is loaded before it and stored after.
__device__ void take_row(const LowLatencyDispatchParams& p, const std::byte* message, int expert,
                         std::int64_t row) {
  constexpr int kAhead = 2;  // words of scales of a lane
  const int lane = int(threadIdx.x % 32);
  const std::int64_t bytes = RowFormat(p.note.format) == RowFormat::bf16 ? p.hidden * 2 : p.hidden;
  const std::int32_t pair = *reinterpret_cast<const std::int32_t*>(message);
  message += LowLatencyLayout::kPairBytes;
  const auto* from = reinterpret_cast<const std::uint32_t*>(message + bytes);
  std::uint32_t ahead[kAhead] = {};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (lane + 32 * i < p.scale_words) ahead[i] = from[lane + 32 * i];
  }
  copy_row(p.output + expert * p.expert_stride + row * p.row_stride, message, bytes);
  auto* to = reinterpret_cast<std::uint32_t*>(p.scales) + expert * p.scale_strides[0] +
             row * p.scale_strides[1];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (lane + 32 * i < p.scale_words) to[(lane + 32 * i) * p.scale_strides[2]] = ahead[i];
  }
  for (std::int64_t i = lane + 32 * kAhead; i < p.scale_words; i += 32) {
    to[i * p.scale_strides[2]] = from[i];
  }
  if (lane != 0) return;
  p.source_pairs[expert * p.pairs_stride + row] = pair;
  p.source_tokens[expert * p.tokens_stride + row] = pair / p.view.layout.topk;
}

// What stands beside the rows, by one block.
__device__ void write_counts(const LowLatencyDispatchParams& p, const std::int32_t* begins) {
  const int world = p.view.layout.world;
  for (int expert = int(threadIdx.x); expert < p.view.layout.per_rank; expert += kThreads) {
    const std::int32_t first = begins[expert * world];
    const std::int32_t count = begins[(expert + 1) * world] - first;
    p.counts[expert] = count;
    if (p.expert_statistics != nullptr) p.expert_statistics[expert] += count;
  }
  for (int i = int(threadIdx.x); i < p.view.layout.per_rank * world; i += kThreads) {
    const std::int64_t begin = begins[i] - begins[i / world * world];
    p.ranges[i / world * p.ranges_stride + i % world] = begin << 32 | (begins[i + 1] - begins[i]);
  }
}

WINNOW_DYNAMIC_SHARED(begins_memory, 16);

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    receive_kernel(const __grid_constant__ LowLatencyDispatchParams p) {
  WINNOW_BLOCK_SHARED(come, bool[kMaxLocals]);
  WINNOW_BLOCK_SHARED(is_last, bool);
  device::wait_for_kernel_before();
  const LowLatencyView& view = p.view;
  const std::uint64_t epoch = view.state->received[kLowLatencyDispatch] + 1;
  if (__syncthreads_or(broken(view.layer)) != 0) return;
  const int world = view.layout.world, entries = view.layout.per_rank * world;
  auto* begins = reinterpret_cast<std::int32_t*>(begins_memory);
  const auto load_counts = [&] {
    for (int i = int(threadIdx.x); i < entries; i += kThreads) {
      const auto* count = reinterpret_cast<const std::int32_t*>(
          own(view) + view.layout.count(epoch, i % world, i / world));
      begins[i] = come[i % world] ? *count : 0;
    }
  };
  const HeardCall heard = hear(view, kLowLatencyDispatch, epoch, p.note.format, p.call,
                               p.wait_statistics, come, load_counts);
  if (heard.broken) return;
  if (!heard.refused && p.output != nullptr) {
    lay_out_rows(entries, begins);
    if (blockIdx.x == 0) write_counts(p, begins);
    const int warp = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
    for (std::int32_t row = warp; row < begins[entries]; row += std::int32_t(gridDim.x) * kWarps) {
      const int entry = entry_of(begins, entries, row), expert = entry / world;
      take_row(p,
               own(view) + view.layout.message(epoch, expert, entry % world, row - begins[entry]),
               expert, row - begins[expert * world]);
    }
  }
  if (last_block<WrittenFor::gpu>(view, is_last)) tell_received(view, kLowLatencyDispatch, epoch);
}

}  // namespace
}  // namespace low_latency

int launch_low_latency_send(const LowLatencyDispatchParams& params, int blocks, void* stream) {
  return device::launch_early(low_latency::send_kernel, blocks, low_latency::kThreads, 0,
                              static_cast<cudaStream_t>(stream), params);
}
int launch_low_latency_receive(const LowLatencyDispatchParams& params, int blocks, void* stream) {
  return device::launch_early(low_latency::receive_kernel, blocks, low_latency::kThreads,
                              low_latency::begins_bytes(params.view.layout),
                              static_cast<cudaStream_t>(stream), params);
}
int load_low_latency_dispatch() {
  const int status = device::load_kernels(low_latency::send_kernel);
  return status == cudaSuccess
             ? device::load_kernel(low_latency::receive_kernel, kLowLatencySharedBytes)
             : status;
}

}  // namespace winnow::expert_parallel
