// The low-latency combine on a GPU: rows go home through the shared memory of blocks, to the place
// of their pair, in parts; meanwhile warps of another kernel add up the parts of tokens that have
// come.
#include <algorithm>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/expert_parallel/cuda/row_pipe.cuh"
#include "winnow/expert_parallel/low_latency/low_latency_cuda.cuh"

namespace winnow::expert_parallel {
namespace low_latency {
namespace {

// The first warps of a block that sends load rows, and a thread of the next one stores them. Of the
// stores, which take microseconds to another GPU, so many are under way at a time.
constexpr int kLoaders = 4, kReading = 10;

// The shared memory of Rows.
constexpr std::size_t rows_bytes(int experts) {
  return begins_bytes(experts) + static_cast<std::size_t>(experts) * sizeof(std::int32_t);
}

// Pieces of rows so small that there is room for many and for Rows.
constexpr int kLeastStages = 48;
constexpr std::size_t kSharedBytes = 216 * 1024;
static_assert((kSharedBytes - rows_bytes(kLowLatencyMostExperts)) /
                  (PipeShape::kBytes / kLeastStages) >
              kReading);

// The rows that this rank gives back, in shared memory: of each entry, an expert here and the rank
// of the tokens, how many rows come before its own, and the first of them in the expert's.
struct Rows {
  std::int32_t *begins, *firsts;
  std::int32_t all;
};
struct Way {
  const std::byte* from = nullptr;  // null: the row goes nowhere
  std::byte* to = nullptr;
};

__device__ __forceinline__ std::int64_t range_of(const LowLatencyCombineParams& p, int entry) {
  const int world = p.view.layout.world;
  return p.note.refusal == 0 ? p.ranges[entry / world * p.ranges_stride + entry % world] : 0;
}

// The whole block. `range`: that of the thread's first entry.
__device__ Rows find_rows(const LowLatencyCombineParams& p, std::int64_t range, std::byte* memory,
                          std::uint32_t& mistaken) {
  const LowLatencyView& view = p.view;
  const int entries = view.layer.topology.experts;
  const std::int64_t most = view.layout.max_tokens, rows = view.layout.world * most;
  Rows found;
  found.begins = reinterpret_cast<std::int32_t*>(memory);
  found.firsts = reinterpret_cast<std::int32_t*>(memory + begins_bytes(entries));
  for (int i = int(threadIdx.x); i < entries; i += kThreads) {
    if (i >= kThreads) range = range_of(p, i);
    const std::int64_t first = range >> 32, count = range & 0xffffffff;
    const bool fits = first >= 0 && count <= most && first + count <= rows;
    if (!fits) {
      find(view, mistaken, LowLatencyNote::kNoPair,
           [&](LowLatencyNote& note) { note.value = std::int32_t(first); });
    }
    found.begins[i] = fits ? std::int32_t(count) : 0;
    found.firsts[i] = fits ? std::int32_t(first) : 0;
  }
  __syncthreads();
  lay_out_rows(entries, found.begins);
  found.all = found.begins[entries];
  return found;
}

__device__ Way way_of(const LowLatencyCombineParams& p, std::uint64_t epoch, const Rows& rows,
                      std::int32_t i, std::uint32_t& mistaken) {
  const LowLatencyView& view = p.view;
  const int world = view.layout.world;
  const int entry = entry_of(rows.begins, view.layer.topology.experts, i);
  const int expert = entry / world, source = entry % world;
  const std::int64_t row = std::int64_t(rows.firsts[entry]) + i - rows.begins[entry];
  const std::int32_t pair = p.source_pairs[expert * p.pairs_stride + row];
  if (pair < 0 || pair >= view.layout.max_tokens * view.layout.topk) {
    find(view, mistaken, LowLatencyNote::kNoPair, [&](LowLatencyNote& note) { note.value = pair; });
    return {};
  }
  if (masked(view, source)) return {};
  return {p.expert_output + expert * p.expert_stride + row * p.row_stride,
          view.peers[source] + view.layout.returned_row(epoch, pair)};
}

// Blocks that have rows: all but the one that says what this rank says of the call, whose fence
// would wait for them.
__device__ __forceinline__ int row_blocks() { return max(1, int(gridDim.x) - 1); }

// A loading warp: first the first part of all of its rows, then the next one. `loading`: of each
// part, the block's warps that still are in it.
__device__ void load_rows(const LowLatencyCombineParams& p, std::uint64_t epoch, const Rows& rows,
                          std::uint32_t& mistaken, RowPipe& pipe, std::int32_t* loading) {
  const LowLatencyLayout& layout = p.view.layout;
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  const int blocks = row_blocks();
  const int step = blocks * kLoaders;  // to a warp's next row
  const std::int32_t mine = int(blockIdx.x) < blocks ? int(blockIdx.x) + warp * blocks : rows.all;
  Way way;
  for (int part = 0; part < layout.parts; ++part) {
    const std::int64_t begin = part * layout.part_bytes;
    const std::int64_t bytes = min(layout.row_bytes - begin, layout.part_bytes);
    for (std::int32_t first = mine; first < rows.all; first += 32 * step) {
      // A warp that has few rows finds their ways once.
      if (part == 0 || rows.all > 32 * step) {
        const std::int32_t i = first + lane * step;
        way = i < rows.all ? way_of(p, epoch, rows, i, mistaken) : Way();
      }
      for (unsigned lanes = __ballot_sync(device::kFullWarp, way.from != nullptr); lanes != 0;
           lanes &= lanes - 1) {
        const int its = __ffs(lanes) - 1;
        const auto from = reinterpret_cast<const std::byte*>(
            __shfl_sync(device::kFullWarp, reinterpret_cast<unsigned long long>(way.from), its));
        pipe.send(from + begin, bytes, 0, lane == its, way.to + begin);
      }
    }
    pipe.mark(loading[part], part);
  }
  pipe.end();
}

// A block's part of its rows has been written; the last one tells the others. One thread. Bulk
// copies that are complete have come, so that no fence is needed, which would wait for all that is
// still under way.
__device__ void part_written(const LowLatencyView& view, std::uint64_t epoch, int part,
                             const std::uint32_t& found) {
  const Sent sent = arrive_sent(view, part, found);
  if (!sent.all) return;
  const bool last = part == view.layout.parts - 1;
  if (last && sent.found) tell_found(view, kLowLatencyCombine, epoch);
  const int rank = view.layer.topology.rank;
  const std::int64_t signal =
      last ? view.layout.signal(kLowLatencyCombine, rank) : view.layout.part_signal(part, rank);
  for (int to = 0; to < view.layer.topology.world; ++to) {
    if (!masked(view, to)) device::st_relaxed_sys(word(view.peers[to], signal), epoch);
  }
  if (last) view.state->sent[kLowLatencyCombine] = epoch;
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    send_kernel(const __grid_constant__ LowLatencyCombineParams p,
                const __grid_constant__ PipeShape shape) {
  WINNOW_BLOCK_SHARED(mistaken, std::uint32_t);
  WINNOW_BLOCK_SHARED(pipe_memory, RowPipe::Shared);
  WINNOW_BLOCK_SHARED(loading, std::int32_t[LowLatencyLayout::kMostParts]);
  std::byte* const stages = device::dynamic_shared<128>();
  RowPipe pipe(pipe_memory, stages, shape);
  if (threadIdx.x == 0) {
    mistaken = 0;
    pipe.begin(kLoaders);
  }
  if (threadIdx.x < LowLatencyLayout::kMostParts) loading[threadIdx.x] = kLoaders;
  device::wait_for_kernel_before();
  const LowLatencyView& view = p.view;
  const std::uint64_t epoch = view.state->sent[kLowLatencyCombine] + 1;
  // Loaded before anything is waited for.
  std::int64_t range = 0;
  if (threadIdx.x < view.layer.topology.experts) range = range_of(p, int(threadIdx.x));
  tell_received(view);
  if (!wait_for_places(view, kLowLatencyCombine, epoch)) return;
  device::allow_next_kernel();
  if (blockIdx.x == gridDim.x - 1) {
    tell_note(view, kLowLatencyCombine, epoch, p.note);
    __threadfence_system();
  }
  const Rows rows = find_rows(p, range, stages + shape.bytes(), mistaken);
  const int warp = int(threadIdx.x) / 32;
  if (warp < kLoaders) {
    load_rows(p, epoch, rows, mistaken, pipe, loading);
  } else if (threadIdx.x == 32 * kLoaders) {
    pipe.store<kReading>([&](int part) { part_written(view, epoch, part, mistaken); });
  }
}

// Of a lane at a time, so few that the loads of many rows need not wait for each other.
constexpr int kSumColumns = 4, kSumBytes = kSumColumns * 2;

constexpr int kAtOnce = 8;  // loads of a lane that wait together

// What a warp knows of a token, a pair to a lane: its expert, -1 for none.
struct Summed {
  int token = -1, expert = -1;
  float weight = 0;
};
__device__ __forceinline__ void choose_token(const LowLatencyCombineParams& p, int token,
                                             Summed& summed) {
  if (token == summed.token) return;
  summed.token = token;
  const int lane = int(threadIdx.x % 32);
  if (lane >= p.indices.topk) return;
  const std::int64_t expert = p.indices.at(token, lane);
  const bool known = expert >= 0 && expert < p.view.layer.topology.experts;
  summed.expert = known ? int(expert) : -1;
  summed.weight = p.weights[token * p.weights_stride + lane];
}

// Columns of a part of a token, by a warp. `come` [W]: of the ranks whose rows are added.
__device__ void sum_piece(const LowLatencyCombineParams& p, std::uint64_t epoch,
                          const Summed& summed, std::int64_t begin, std::int64_t end,
                          const bool* come) {
  const LowLatencyView& view = p.view;
  const int lane = int(threadIdx.x % 32), topk = p.indices.topk;
  const bool kept = summed.expert >= 0 && come[summed.expert / view.layout.per_rank];
  const unsigned pairs = __ballot_sync(device::kFullWarp, kept);
  const std::int64_t at = begin + lane * kSumBytes;
  const bool mine = at < end;
  const std::int64_t row_bytes = view.layout.row_bytes;
  const std::byte* row =
      own(view) + view.layout.returned_row(epoch, std::int64_t(summed.token) * view.layout.topk) +
      at;
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
      const float of_pair = __shfl_sync(device::kFullWarp, summed.weight, first + i);
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
  std::byte* out = p.out + std::int64_t(summed.token) * p.out_stride + at;
  if (reinterpret_cast<std::uintptr_t>(out) % kSumBytes == 0) {
    *reinterpret_cast<uint2*>(out) = packed;
    return;
  }
#pragma unroll
  for (int i = 0; i < kSumColumns; ++i) {
    reinterpret_cast<std::uint16_t*>(out)[i] = reinterpret_cast<const std::uint16_t*>(&packed)[i];
  }
}

// Pieces of a part of all tokens, shared by all warps.
struct PartSums {
  std::int64_t begin, end;
  int pieces;

  __device__ PartSums(const LowLatencyLayout& layout, int part)
      : begin(part * layout.part_bytes),
        end(min(layout.row_bytes, begin + layout.part_bytes)),
        pieces(int((end - begin + kPiece - 1) / kPiece)) {}
  static constexpr int kPiece = 32 * kSumBytes;
};
__device__ __forceinline__ int warp_of_all() {
  return int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
}

__device__ void sum_part(const LowLatencyCombineParams& p, std::uint64_t epoch, int part,
                         const bool* come, Summed& summed) {
  const PartSums sums(p.view.layout, part);
  for (std::int64_t unit = warp_of_all(); unit < p.indices.tokens * sums.pieces;
       unit += std::int64_t(gridDim.x) * kWarps) {
    const int token = int(unit / sums.pieces);
    choose_token(p, token, summed);
    sum_piece(p, epoch, summed,
              sums.begin + (unit - std::int64_t(token) * sums.pieces) * PartSums::kPiece, sums.end,
              come);
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

__device__ void receive(const LowLatencyCombineParams& p, bool* come) {
  const LowLatencyView& view = p.view;
  std::uint64_t epoch;
  if (!begin_to_receive(view, kLowLatencyCombine, epoch)) return;
  // Parts are added up as they come. Not where a rank that does not come is masked: it is known at
  // the end only whose rows are added.
  const bool early = p.out != nullptr && !view.shrinks;
  for (int rank = int(threadIdx.x); rank < view.layout.world; rank += kThreads) come[rank] = true;
  Summed summed;
  if (p.out != nullptr) {
    // The first token is known before any part comes.
    const int token = warp_of_all() / PartSums(view.layout, 0).pieces;
    if (token < p.indices.tokens) choose_token(p, token, summed);
  }
  bool all_came = false;
  for (int part = 0; part < view.layout.parts; ++part) {
    if (early && part < view.layout.parts - 1) {
      if (!part_comes(p, epoch, part)) return;
    } else if (!all_came) {
      const HeardCall heard = hear(view, kLowLatencyCombine, epoch, p.note.format, p.call,
                                   p.wait_statistics, come, [] {});
      if (heard.broken || heard.refused) return;
      all_came = true;
    }
    if (p.out != nullptr) sum_part(p, epoch, part, come, summed);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    receive_kernel(const __grid_constant__ LowLatencyCombineParams p) {
  WINNOW_BLOCK_SHARED(come, bool[kMaxLocals]);
  if (!p.behind_send) {
    device::wait_for_kernel_before();
    tell_received(p.view);
  }
  receive(p, come);
  if (p.behind_send) device::wait_for_kernel_before();
}

}  // namespace
}  // namespace low_latency

int launch_low_latency_send(const LowLatencyCombineParams& params, int blocks, void* stream) {
  const std::size_t begins = low_latency::rows_bytes(params.view.layer.topology.experts);
  PipeShape shape(params.view.layout.part_bytes, low_latency::kLeastStages);
  const auto room = static_cast<std::int64_t>(low_latency::kSharedBytes - begins);
  shape.stages = int(std::min<std::int64_t>(shape.stages, room / shape.piece_bytes));
  return device::launch_early(low_latency::send_kernel, blocks, low_latency::kThreads,
                              static_cast<std::size_t>(shape.bytes()) + begins,
                              static_cast<cudaStream_t>(stream), params, shape);
}
int launch_low_latency_receive(const LowLatencyCombineParams& params, int blocks, void* stream) {
  return device::launch_early(low_latency::receive_kernel, blocks, low_latency::kThreads, 0,
                              static_cast<cudaStream_t>(stream), params);
}
int load_low_latency_combine() {
  const int status = device::load_kernel(low_latency::send_kernel, int(low_latency::kSharedBytes));
  return status == cudaSuccess ? device::load_kernels(low_latency::receive_kernel) : status;
}

}  // namespace winnow::expert_parallel
