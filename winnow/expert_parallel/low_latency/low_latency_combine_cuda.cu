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

// How many rows' parts a block has still to send, in shared memory, and how many it had.
struct PartsLeft {
  int left[LowLatencyLayout::kMostParts], all[LowLatencyLayout::kMostParts];
};

__device__ void tell_part(const LowLatencyView& view, std::uint64_t epoch, int part, int to) {
  device::st_release_sys(
      word(view.peers[to], view.layout.part_signal(part, view.layer.topology.rank)), epoch);
}

// A warp has sent a part of a row. Who has sent the last one of all rows tells the others.
__device__ void part_sent(const LowLatencyView& view, std::uint64_t epoch, int part,
                          std::int32_t rows, PartsLeft& parts) {
  if (part == view.layout.parts - 1) return;  // the call's own signal tells
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  __threadfence_system();
  if (atomicSub(&parts.left[part], 1) != 1) return;
  __threadfence_system();
  auto* const sent = reinterpret_cast<unsigned long long*>(&view.state->parts_sent[part]);
  const auto mine = static_cast<unsigned long long>(parts.all[part]);
  if (atomicAdd(sent, mine) + mine != static_cast<unsigned long long>(rows)) return;
  *sent = 0;
  __threadfence_system();
  for (int to = 0; to < view.layer.topology.world; ++to) {
    if (!masked(view, to)) tell_part(view, epoch, part, to);
  }
}

__device__ void send_rows(const LowLatencyCombineParams& p, std::uint64_t epoch,
                          std::int32_t* begins, PartsLeft& parts_left) {
  const LowLatencyView& view = p.view;
  const int world = view.layout.world, entries = view.layout.per_rank * world;
  const int parts = view.layout.parts;
  const std::int64_t rows = world * view.layout.max_tokens;
  const auto range = [&](int i) { return p.ranges[i / world * p.ranges_stride + i % world]; };
  const auto find = [&](std::int64_t value) {
    LowLatencyNote& found = view.state->note;
    if (atomicCAS(reinterpret_cast<int*>(&found.found), 0, int(LowLatencyNote::kNoPair)) == 0) {
      found.value = std::int32_t(value);
    }
  };
  for (int i = int(threadIdx.x); i < entries; i += kThreads) {
    const std::int64_t value = range(i), first = value >> 32, count = value & 0xffffffff;
    const bool fits = first >= 0 && count <= view.layout.max_tokens && first + count <= rows;
    if (!fits) find(first);
    begins[i] = fits ? std::int32_t(count) : 0;
  }
  if (threadIdx.x < LowLatencyLayout::kMostParts) parts_left.left[threadIdx.x] = 0;
  __syncthreads();
  lay_out_rows(entries, begins);
  // Unit u is part u / all of row u % all.
  const std::int64_t all = begins[entries], units = all * parts;
  const std::int64_t first = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
  const std::int64_t step = std::int64_t(gridDim.x) * kWarps;
  if (threadIdx.x % 32 == 0) {
    for (std::int64_t unit = first; unit < units; unit += step) {
      atomicAdd(&parts_left.left[unit / all], 1);
    }
  }
  __syncthreads();
  if (threadIdx.x < LowLatencyLayout::kMostParts) {
    parts_left.all[threadIdx.x] = parts_left.left[threadIdx.x];
  }
  __syncthreads();
  for (std::int64_t unit = first; unit < units; unit += step) {
    const int part = int(unit / all);
    const auto i = std::int32_t(unit % all);
    const int entry = entry_of(begins, entries, i), expert = entry / world;
    const int source = entry % world;
    const std::int64_t row = (range(entry) >> 32) + i - begins[entry];
    const std::int32_t pair = p.source_pairs[expert * p.pairs_stride + row];
    const bool fits = pair >= 0 && pair < view.layout.max_tokens * view.layout.topk;
    if (!fits && threadIdx.x % 32 == 0) find(pair);
    if (fits && !masked(view, source)) {
      const std::int64_t begin = part * view.layout.part_bytes;
      copy_row(view.peers[source] + view.layout.returned_row(epoch, pair) + begin,
               p.expert_output + expert * p.expert_stride + row * p.row_stride + begin,
               min(view.layout.row_bytes - begin, view.layout.part_bytes));
    }
    part_sent(view, epoch, part, std::int32_t(all), parts_left);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    send_kernel(const __grid_constant__ LowLatencyCombineParams p) {
  WINNOW_BLOCK_SHARED(is_last, bool);
  WINNOW_BLOCK_SHARED(note_memory, std::uint32_t[sizeof(LowLatencyNote) / 4]);
  WINNOW_BLOCK_SHARED(parts_left, PartsLeft);
  device::wait_for_kernel_before();
  const LowLatencyView& view = p.view;
  const std::uint64_t epoch = view.state->sent[kLowLatencyCombine] + 1;
  if (broken_or_told(view)) return;
  if (!wait_for_places(view, kLowLatencyCombine, epoch)) return;
  device::allow_next_kernel();
  if (p.note.refusal == 0) {
    send_rows(p, epoch, reinterpret_cast<std::int32_t*>(begins_memory), parts_left);
  }
  if (!last_block<WrittenFor::system>(view, Half::send, is_last)) return;
  // Also of parts that no row had.
  for (int i = int(threadIdx.x); i < view.layout.world * (view.layout.parts - 1); i += kThreads) {
    const int to = i % view.layout.world;
    if (!masked(view, to)) tell_part(view, epoch, i / view.layout.world, to);
  }
  tell_sent(view, kLowLatencyCombine, epoch, take_note(view, p.note, note_memory));
}

// Of a lane at a time, so few that the loads of many rows need not wait for each other.
constexpr int kSumColumns = 4, kSumBytes = kSumColumns * 2;

// Columns of a part of a token, by a warp. `come` [W]: of the ranks whose rows are added.
__device__ void sum_piece(const LowLatencyCombineParams& p, std::uint64_t epoch, std::int64_t token,
                          std::int64_t begin, std::int64_t end, const bool* come) {
  const LowLatencyView& view = p.view;
  const int lane = int(threadIdx.x % 32), topk = p.indices.topk;
  bool kept = false;
  float weight = 0;
  if (lane < topk) {
    const std::int64_t expert = p.indices.at(token, lane);
    weight = p.weights[token * p.weights_stride + lane];
    kept = expert >= 0 && expert < view.layer.topology.experts &&
           come[int(expert) / view.layout.per_rank];
  }
  const unsigned pairs = __ballot_sync(device::kFullWarp, kept);
  const std::int64_t at = begin + lane * kSumBytes;
  const bool mine = at < end;
  const std::int64_t row_bytes = view.layout.row_bytes;
  const std::byte* row = own(view) + view.layout.returned_row(epoch, token * view.layout.topk) + at;
  float sum[kSumColumns] = {};
  for (int first = 0; first < topk; first += kAtOnce) {
    uint2 raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (mine && (pairs >> (first + i) & 1) != 0) raw[i] = *reinterpret_cast<const uint2*>(row);
      row += row_bytes;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float of_pair = __shfl_sync(device::kFullWarp, weight, first + i);
      if (!mine || (pairs >> (first + i) & 1) == 0) continue;
      const uint4 columns = {raw[i].x, raw[i].y, 0, 0};
#pragma unroll
      for (int c = 0; c < kSumColumns; ++c) {
        sum[c] = __fadd_rn(sum[c], __fmul_rn(column_of(columns, c), of_pair));
      }
    }
  }
  if (!mine) return;
  const uint2 packed = {device::pack_bf16(sum[0], sum[1]), device::pack_bf16(sum[2], sum[3])};
  std::byte* out = p.out + token * p.out_stride + at;
  if (reinterpret_cast<std::uintptr_t>(out) % kSumBytes == 0) {
    *reinterpret_cast<uint2*>(out) = packed;
    return;
  }
#pragma unroll
  for (int i = 0; i < kSumColumns; ++i) {
    reinterpret_cast<std::uint16_t*>(out)[i] = reinterpret_cast<const std::uint16_t*>(&packed)[i];
  }
}

__device__ void sum_part(const LowLatencyCombineParams& p, std::uint64_t epoch, int part,
                         const bool* come) {
  constexpr int kPiece = 32 * kSumBytes;
  const std::int64_t begin = part * p.view.layout.part_bytes;
  const std::int64_t end = min(p.view.layout.row_bytes, begin + p.view.layout.part_bytes);
  const int pieces = int((end - begin + kPiece - 1) / kPiece);
  const int warp = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
  for (std::int64_t unit = warp; unit < p.indices.tokens * pieces;
       unit += std::int64_t(gridDim.x) * kWarps) {
    const std::int64_t token = unit / pieces;
    sum_piece(p, epoch, token, begin + (unit - token * pieces) * kPiece, end, come);
  }
}

// Until every rank has sent the part. The whole block; false: broken.
__device__ bool part_comes(const LowLatencyCombineParams& p, std::uint64_t epoch, int part) {
  const LowLatencyView& view = p.view;
  bool ok = true;
  for (int rank = int(threadIdx.x); rank < view.layout.world; rank += kThreads) {
    const std::uint64_t start = device::globaltimer();
    ok = ok && wait_at_least(view.layer, word(own(view), view.layout.part_signal(part, rank)),
                             epoch, rows_phase(kLowLatencyCombine), rank);
    if (p.wait_statistics != nullptr && blockIdx.x == 0) {
      p.wait_statistics[rank] += std::int64_t(device::globaltimer() - start);
    }
  }
  return __syncthreads_and(ok) != 0;
}

__device__ void receive(const LowLatencyCombineParams& p, bool* come, bool& is_last) {
  const LowLatencyView& view = p.view;
  const std::uint64_t epoch = view.state->received[kLowLatencyCombine] + 1;
  if (__syncthreads_or(broken(view.layer)) != 0) return;
  // Parts are added up as they come. Not where a rank that does not come is masked: it is known at
  // the end only whose rows are added.
  const bool early = p.out != nullptr && !view.shrinks;
  for (int rank = int(threadIdx.x); rank < view.layout.world; rank += kThreads) come[rank] = true;
  bool all_came = false;
  for (int part = 0; part < view.layout.parts; ++part) {
    if (early && part < view.layout.parts - 1) {
      if (!part_comes(p, epoch, part)) return;
    } else if (!all_came) {
      const HeardCall heard = hear(view, kLowLatencyCombine, epoch, p.note.format, p.call,
                                   p.wait_statistics, come, [] {});
      if (heard.broken) return;
      if (heard.refused) break;
      all_came = true;
    }
    if (p.out != nullptr) sum_part(p, epoch, part, come);
  }
  if (!last_block<WrittenFor::gpu>(view, Half::receive, is_last)) return;
  tell_received(view, kLowLatencyCombine, epoch);
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    receive_kernel(const __grid_constant__ LowLatencyCombineParams p) {
  WINNOW_BLOCK_SHARED(come, bool[kMaxLocals]);
  WINNOW_BLOCK_SHARED(is_last, bool);
  if (!p.behind_send) device::wait_for_kernel_before();
  receive(p, come, is_last);
  if (p.behind_send) device::wait_for_kernel_before();
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
