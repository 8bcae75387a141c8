// The low-latency combine on a GPU: a warp takes a piece of a row and writes it home, to the place
// of its pair; later a block takes a token and adds up its rows.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/expert_parallel/low_latency/low_latency_cuda.cuh"

namespace winnow::expert_parallel {
namespace low_latency {
namespace {

WINNOW_DYNAMIC_SHARED(begins_memory, 16);

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    send_kernel(const __grid_constant__ LowLatencyCombineParams p) {
  WINNOW_BLOCK_SHARED(is_last, bool);
  WINNOW_BLOCK_SHARED(note_memory, std::uint32_t[sizeof(LowLatencyNote) / 4]);
  device::wait_for_kernel_before();
  const LowLatencyView& view = p.view;
  const std::uint64_t epoch = view.state->sent[kLowLatencyCombine] + 1;
  if (broken_or_told(view)) return;
  if (!wait_for_places(view, kLowLatencyCombine, epoch)) return;
  device::allow_next_kernel();
  if (p.note.refusal == 0) {
    const int world = view.layout.world, entries = view.layout.per_rank * world;
    const std::int64_t rows = world * view.layout.max_tokens;
    const auto range = [&](int i) { return p.ranges[i / world * p.ranges_stride + i % world]; };
    const auto find = [&](std::int64_t value) {
      LowLatencyNote& found = view.state->note;
      if (atomicCAS(reinterpret_cast<int*>(&found.found), 0, int(LowLatencyNote::kNoPair)) == 0) {
        found.value = std::int32_t(value);
      }
    };
    auto* begins = reinterpret_cast<std::int32_t*>(begins_memory);
    for (int i = int(threadIdx.x); i < entries; i += kThreads) {
      const std::int64_t value = range(i), first = value >> 32, count = value & 0xffffffff;
      const bool fits = first >= 0 && count <= view.layout.max_tokens && first + count <= rows;
      if (!fits) find(first);
      begins[i] = fits ? std::int32_t(count) : 0;
    }
    __syncthreads();
    lay_out_rows(entries, begins);
    // A warp takes a piece of a row at a time, so that few rows are work for all of them.
    const auto pieces = std::int32_t((view.layout.row_bytes + kPieceBytes - 1) / kPieceBytes);
    const std::int64_t all = std::int64_t(begins[entries]) * pieces;
    const int warp = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
    for (std::int64_t unit = warp; unit < all; unit += std::int64_t(gridDim.x) * kWarps) {
      const auto i = std::int32_t(unit / pieces);
      const std::int64_t begin = unit % pieces * kPieceBytes;
      const int entry = entry_of(begins, entries, i), expert = entry / world;
      const int source = entry % world;
      if (masked(view, source)) continue;
      const std::int64_t row = (range(entry) >> 32) + i - begins[entry];
      const std::int32_t pair = p.source_pairs[expert * p.pairs_stride + row];
      if (pair < 0 || pair >= view.layout.max_tokens * view.layout.topk) {
        if (threadIdx.x % 32 == 0) find(pair);
        continue;
      }
      copy_row(view.peers[source] + view.layout.returned_row(epoch, pair) + begin,
               p.expert_output + expert * p.expert_stride + row * p.row_stride + begin,
               min(view.layout.row_bytes - begin, std::int64_t(kPieceBytes)));
    }
  }
  if (!last_block<WrittenFor::system>(view, is_last)) return;
  tell_sent(view, kLowLatencyCombine, epoch, take_note(view, p.note, note_memory));
}

// A pair whose row is added: null, none.
struct Term {
  const std::byte* row;
  float weight;
};

__device__ void add_columns(const uint4& raw, float weight, float (&sum)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sum[i] = __fadd_rn(sum[i], __fmul_rn(column_of(raw, i), weight));
  }
}

__device__ void sum_token(const LowLatencyCombineParams& p, std::int64_t token, const Term* terms) {
  std::byte* out = p.out + token * p.out_stride;
  const bool aligned = reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  const int vectors = int(p.hidden / kVector);
  for (int v = int(threadIdx.x); v < vectors; v += kThreads) {
    float sum[kVector] = {};
    for (int first = 0; first < p.indices.topk; first += kAtOnce) {
      uint4 raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::byte* row = first + i < p.indices.topk ? terms[first + i].row : nullptr;
        if (row != nullptr) raw[i] = *reinterpret_cast<const uint4*>(row + v * 16);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= p.indices.topk || terms[first + i].row == nullptr) continue;
        add_columns(raw[i], terms[first + i].weight, sum);
      }
    }
    uint4 packed;
    packed.x = device::pack_bf16(sum[0], sum[1]);
    packed.y = device::pack_bf16(sum[2], sum[3]);
    packed.z = device::pack_bf16(sum[4], sum[5]);
    packed.w = device::pack_bf16(sum[6], sum[7]);
    if (aligned) {
      *reinterpret_cast<uint4*>(out + v * 16) = packed;
      continue;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      reinterpret_cast<std::uint16_t*>(out + v * 16)[i] =
          reinterpret_cast<const std::uint16_t*>(&packed)[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    receive_kernel(const __grid_constant__ LowLatencyCombineParams p) {
  WINNOW_BLOCK_SHARED(come, bool[kMaxLocals]);
  WINNOW_BLOCK_SHARED(is_last, bool);
  WINNOW_BLOCK_SHARED(terms, Term[kMostTopk]);
  device::wait_for_kernel_before();
  const LowLatencyView& view = p.view;
  const std::uint64_t epoch = view.state->received[kLowLatencyCombine] + 1;
  if (__syncthreads_or(broken(view.layer)) != 0) return;
  const HeardCall heard =
      hear(view, kLowLatencyCombine, epoch, p.note.format, p.call, p.wait_statistics, come, [] {});
  if (heard.broken) return;
  const std::int64_t tokens = heard.refused || p.out == nullptr ? 0 : p.indices.tokens;
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    const int k = int(threadIdx.x);
    if (k < p.indices.topk) {
      const std::int64_t expert = p.indices.at(token, k);
      const bool kept = expert >= 0 && expert < view.layer.topology.experts &&
                        come[expert / view.layout.per_rank];
      const std::int64_t at = view.layout.returned_row(epoch, token * view.layout.topk + k);
      terms[k] = {kept ? own(view) + at : nullptr,
                  kept ? p.weights[token * p.weights_stride + k] : 0.0f};
    }
    __syncthreads();
    sum_token(p, token, terms);
    __syncthreads();
  }
  if (last_block<WrittenFor::gpu>(view, is_last)) tell_received(view, kLowLatencyCombine, epoch);
}

}  // namespace
}  // namespace low_latency

int launch_low_latency_send(const LowLatencyCombineParams& params, int blocks, void* stream) {
  return device::launch_early(low_latency::send_kernel, blocks, low_latency::kThreads,
                              low_latency::begins_bytes(params.view.layout),
                              static_cast<cudaStream_t>(stream), params);
}
int launch_low_latency_receive(const LowLatencyCombineParams& params, int blocks, void* stream) {
  return device::launch_early(low_latency::receive_kernel, blocks, low_latency::kThreads, 0,
                              static_cast<cudaStream_t>(stream), params);
}
int load_low_latency_combine() {
  const int status = device::load_kernel(low_latency::send_kernel, kLowLatencySharedBytes);
  return status == cudaSuccess ? device::load_kernels(low_latency::receive_kernel) : status;
}

}  // namespace winnow::expert_parallel
