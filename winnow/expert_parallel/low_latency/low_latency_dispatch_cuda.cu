// The low-latency dispatch on a GPU: a block takes a token, makes its row and writes it once to
// every rank that has an expert of it, and where its pairs belong; later warps take pieces of the
// rows that have come to all of their places.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "winnow/core/f8_scale.h"
#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/expert_parallel/cuda/pairs.cuh"
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

// kColumns columns of a group of 128, as f8_e4m3, and the scale of the group: see quantize_f8().
// `mask`: the threads of the group in their warp.
__device__ __forceinline__ uint4 quantize(const uint4 (&raw)[2], bool power_of_two, unsigned mask,
                                          float& scale) {
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
  scale = __fdiv_rn(fmaxf(__uint_as_float(amax), kLeastAmax), kLargestF8);
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

// Where a token goes; shared memory of a block.
struct TokenPlaces {
  std::byte* rows[kMostTopk];      // at the rank of a pair that no pair before it has; else null
  std::int32_t homes[kMostTopk];   // of each pair; -1: nowhere
  std::int32_t places[kMostTopk];  // see LowLatencyLayout::places
};

// The last warp finds places, since the first ones send most of a row. What it knows of a token, a
// pair to a lane: its expert, -1 for none.
__device__ __forceinline__ int finding_lane() { return int(threadIdx.x) - (kThreads - 32); }
__device__ __forceinline__ std::int64_t expert_of_lane(const LowLatencyDispatchParams& p,
                                                       std::int64_t token) {
  const int k = finding_lane();
  return k >= 0 && k < p.indices.topk && token < p.indices.tokens ? p.indices.at(token, k) : -1;
}

__device__ void find_places(const LowLatencyDispatchParams& p, std::uint64_t epoch,
                            std::int64_t token, std::int64_t expert, TokenPlaces& places,
                            std::uint32_t& mistaken) {
  const int k = finding_lane();
  if (k < 0) return;
  const LowLatencyView& view = p.view;
  const int per_rank = view.layout.per_rank;
  const int experts = view.layer.topology.experts;
  const bool kept = expert >= 0 && expert < experts;
  const auto found = [&](LowLatencyNote::Found what) {
    find(view, mistaken, what, [&](LowLatencyNote& note) {
      note.token = std::int32_t(token);
      note.value = expert;
    });
  };
  if (expert < -1 || expert > experts) found(LowLatencyNote::kNoExpert);
  const unsigned before = (1u << k) - 1;
  const bool twice = (__match_any_sync(device::kFullWarp, kept ? int(expert) : -1) & before) != 0;
  if (kept && twice) found(LowLatencyNote::kExpertTwice);
  int home = kept && !twice ? int(expert) / per_rank : -1;
  if (home >= 0 && masked(view, home)) home = -1;
  const bool first = (__match_any_sync(device::kFullWarp, home) & before) == 0;
  std::int32_t place = -1;
  if (home >= 0) {
    place = view.layout.place_of(int(expert) % per_rank, atomicAdd(view.slots + expert, 1));
  }
  places.homes[k] = home;
  places.places[k] = place;
  places.rows[k] =
      home >= 0 && first
          ? view.peers[home] + view.layout.message(epoch, view.layer.topology.rank, token)
          : nullptr;
}

// What every rank has to know of the token.
__device__ void send_places(const LowLatencyDispatchParams& p, std::uint64_t epoch,
                            std::int64_t token, const TokenPlaces& places) {
  const LowLatencyView& view = p.view;
  const int topk = view.layout.topk;
  for (int i = int(threadIdx.x); i < view.layout.world * topk; i += kThreads) {
    const int to = i / topk, k = i % topk;
    if (masked(view, to)) continue;
    reinterpret_cast<std::int32_t*>(view.peers[to] +
                                    view.layout.place(epoch, view.layer.topology.rank, token))[k] =
        places.homes[k] == to ? places.places[k] : -1;
  }
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
                          const TokenPlaces& places, RowStart start) {
  const int vectors = vectors_of(p);
  for (int v = int(threadIdx.x); v < vectors; v += 2 * kThreads) {
    if (v >= 2 * kThreads) load_piece(p, token, v, false, start.raw);
    for (int k = 0; k < p.indices.topk; ++k) {
      auto* const to = reinterpret_cast<uint4*>(places.rows[k]);
      if (to == nullptr) continue;
      to[v] = start.raw[0];
      if (v + kThreads < vectors) to[v + kThreads] = start.raw[1];
    }
  }
}

__device__ void send_fp8(const LowLatencyDispatchParams& p, RowFormat format, std::int64_t token,
                         const TokenPlaces& places, RowStart start) {
  const unsigned mask = ((1u << kGroup) - 1) << (threadIdx.x % 32 / kGroup * kGroup);
  const int pieces = int(p.hidden / kColumns);
  for (int piece = int(threadIdx.x); piece < pieces; piece += kThreads) {
    if (piece >= kThreads) load_piece(p, token, piece * 2, true, start.raw);
    float scale;
    const uint4 packed = quantize(start.raw, format != RowFormat::fp8, mask, scale);
    const bool first = piece % kGroup == 0;
    for (int k = 0; k < p.indices.topk; ++k) {
      std::byte* to = places.rows[k];
      if (to == nullptr) continue;
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

__device__ __forceinline__ std::int32_t* counts_memory() {
  return reinterpret_cast<std::int32_t*>(device::dynamic_shared<16>());
}

// What a rank says of a dispatch before its rows come.
struct Announced {
  std::uint64_t word = 0;
  static __device__ Announced of(const LowLatencyNote& note, std::int64_t tokens) {
    const std::uint64_t refused = note.refusal != 0 ? 1 : 0;
    return {refused << 40 | std::uint64_t(note.format) << 32 | std::uint64_t(tokens)};
  }
  __device__ bool refused() const { return (word >> 40) != 0; }
  __device__ int format() const { return int(word >> 32 & 255); }
  __device__ std::int32_t tokens() const { return std::int32_t(std::uint32_t(word)); }
};
// A word that tells of it: the epoch, and how many blocks send rows.
struct CountWord {
  static constexpr int kBits = 16;
  static __device__ std::uint64_t of(std::uint64_t epoch, unsigned blocks) {
    return epoch << kBits | blocks;
  }
  static __device__ int blocks(std::uint64_t word) { return int(word & ((1u << kBits) - 1)); }
};

// How many rows each rank gets for each of its experts. By a block that begins with it: the others
// know where rows belong before they come then.
__device__ void signal_counts(const LowLatencyDispatchParams& p, std::uint64_t epoch,
                              std::int64_t tokens) {
  const LowLatencyView& view = p.view;
  const int per_rank = view.layout.per_rank, experts = view.layer.topology.experts;
  std::int32_t* const counts = counts_memory();
  for (int expert = int(threadIdx.x); expert < experts; expert += kThreads) counts[expert] = 0;
  __syncthreads();
  // A warp takes as many tokens as it has lanes for their pairs; several times, before it waits.
  constexpr int kTogether = 4;
  const PairLane pair(max(1, p.indices.topk), int(threadIdx.x % 32));
  const std::int64_t step = kWarps * pair.tokens;
  for (std::int64_t first = threadIdx.x / 32 * pair.tokens; first < tokens;
       first += kTogether * step) {
    std::int64_t chosen[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int64_t token = first + i * step + pair.slot;
      chosen[i] = pair.used && token < tokens ? p.indices.at(token, pair.k) : -1;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool kept = chosen[i] >= 0 && chosen[i] < experts;
      const int expert = kept ? int(chosen[i]) : -1;
      // The same expert of the same token: a lane of the same slot.
      const unsigned same = __match_any_sync(device::kFullWarp, expert) & pair.token_lanes();
      const bool twice = (same & lanes_below(pair.lane)) != 0;
      if (kept && !twice) atomicAdd(counts + expert, 1);
    }
  }
  __syncthreads();
  for (int expert = int(threadIdx.x); expert < experts; expert += kThreads) {
    const int home = expert / per_rank;
    if (masked(view, home)) continue;
    *reinterpret_cast<std::int32_t*>(
        view.peers[home] + view.layout.count(epoch, view.layer.topology.rank, expert % per_rank)) =
        // More could be only if somebody else wrote the indices meanwhile.
        min(counts[expert], std::int32_t(tokens));
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int world = view.layer.topology.world, rank = view.layer.topology.rank;
  for (int to = 0; to < world; ++to) {
    if (masked(view, to)) continue;
    *word(view.peers[to], view.layout.announcement(epoch, rank)) =
        Announced::of(p.note, tokens).word;
  }
  __threadfence_system();  // behind the counts
  for (int to = 0; to < world; ++to) {
    if (masked(view, to)) continue;
    device::st_relaxed_sys(word(view.peers[to], view.layout.count_word(rank)),
                           CountWord::of(epoch, gridDim.x));
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    send_kernel(const __grid_constant__ LowLatencyDispatchParams p) {
  WINNOW_BLOCK_SHARED(places, TokenPlaces[2]);  // of a token and the block's next one
  WINNOW_BLOCK_SHARED(mistaken, std::uint32_t);
  WINNOW_BLOCK_SHARED(is_last, bool);
  if (finding_lane() == 0) mistaken = 0;
  __syncwarp();
  device::wait_for_kernel_before();
  const LowLatencyView& view = p.view;
  const auto format = RowFormat(p.note.format);
  const bool fp8 = format != RowFormat::bf16;
  const std::int64_t tokens = p.note.refusal != 0 ? 0 : p.indices.tokens;
  const std::uint64_t epoch = view.state->sent[kLowLatencyDispatch] + 1;
  // What a token begins with is loaded before anything is waited for; its places are found while
  // the token before is sent, and its experts are loaded before that.
  RowStart start;
  const auto begin_token = [&](std::int64_t token) {
    if (token < tokens) load_piece(p, token, int(threadIdx.x) * (fp8 ? 2 : 1), fp8, start.raw);
  };
  std::int64_t expert = expert_of_lane(p, blockIdx.x);
  const auto find_token = [&](std::int64_t token, TokenPlaces& places_of_token) {
    if (token >= tokens) return;
    find_places(p, epoch, token, expert, places_of_token, mistaken);
    expert = expert_of_lane(p, token + gridDim.x);
  };
  begin_token(blockIdx.x);
  signal_received(view);
  // Which ranks are masked is known behind the wait only.
  if (!view.shrinks) find_token(blockIdx.x, places[0]);
  if (!wait_for_places(view, kLowLatencyDispatch, epoch)) return;
  if (view.shrinks) {
    find_token(blockIdx.x, places[0]);
    __syncthreads();
  }
  device::allow_next_kernel();
  if (blockIdx.x == gridDim.x - 1) {
    signal_note(view, kLowLatencyDispatch, epoch, p.note);
    signal_counts(p, epoch, tokens);
  }
  int which = 0;
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x, which ^= 1) {
    const TokenPlaces& here = places[which];
    find_token(token + gridDim.x, places[which ^ 1]);
    send_places(p, epoch, token, here);
    fp8 ? send_fp8(p, format, token, here, start) : send_bf16(p, token, here, start);
    begin_token(token + gridDim.x);
    __syncthreads();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();  // behind the block's rows
    const int rank = view.layer.topology.rank;
    for (int to = 0; to < view.layer.topology.world; ++to) {
      if (masked(view, to)) continue;
      device::st_relaxed_sys(word(view.peers[to], view.layout.block_word(rank, int(blockIdx.x))),
                             epoch);
    }
    const Sent sent = arrive_sent(view, kBlocksSent, mistaken);
    is_last = sent.all;
    if (sent.all && sent.found) signal_found(view, kLowLatencyDispatch, epoch);
    // By the thread that has had the fence behind what all blocks have done: stores with a release
    // would each be one more.
    for (int to = 0; sent.all && to < view.layer.topology.world; ++to) {
      if (masked(view, to)) continue;
      device::st_relaxed_sys(word(view.peers[to], view.layout.signal(kLowLatencyDispatch, rank)),
                             epoch);
    }
    if (sent.all) view.state->sent[kLowLatencyDispatch] = epoch;
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = int(threadIdx.x); i < view.layer.topology.experts; i += kThreads) view.slots[i] = 0;
}

// A piece of a row, by a warp.
constexpr int kTaken = 2;                      // vectors of a lane
constexpr int kTakenBytes = kTaken * 32 * 16;  // of a warp: whole groups of 128 columns of f8

// A piece of a token that has come: which one, and what a lane has of it.
struct Piece {
  int source = 0, piece = 0;
  std::int64_t token = 0;
  std::int32_t place = -1;
  uint4 taken[kTaken];
  std::uint32_t scale = 0;
  bool has_scale = false;
};

__device__ __forceinline__ void load_piece(const LowLatencyDispatchParams& p, std::uint64_t epoch,
                                           Piece& got) {
  const LowLatencyLayout& layout = p.view.layout;
  const int lane = int(threadIdx.x % 32);
  const std::int64_t bytes = RowFormat(p.note.format) == RowFormat::bf16 ? p.hidden * 2 : p.hidden;
  const std::byte* message = own(p.view) + layout.message(epoch, got.source, got.token);
  const auto* from =
      reinterpret_cast<const uint4*>(message + std::int64_t(got.piece) * kTakenBytes);
  const std::int64_t vectors = (bytes - std::int64_t(got.piece) * kTakenBytes) / 16;
  // All loads before anything waits for one of them.
  if (lane < layout.topk) {
    got.place = reinterpret_cast<const std::int32_t*>(
        own(p.view) + layout.place(epoch, got.source, got.token))[lane];
  }
#pragma unroll
  for (int i = 0; i < kTaken; ++i) {
    if (lane + 32 * i < vectors) got.taken[i] = from[lane + 32 * i];
  }
  // Words of scales that belong to the piece: one, or a fourth of one, for 128 columns.
  const bool packed = RowFormat(p.note.format) == RowFormat::fp8_ue8m0;
  const int of_piece = packed ? kTakenBytes / 512 : kTakenBytes / 128;
  const std::int64_t word = std::int64_t(got.piece) * of_piece + lane;
  got.has_scale = lane < of_piece && word < p.scale_words;
  if (got.has_scale) got.scale = reinterpret_cast<const std::uint32_t*>(message + bytes)[word];
}

// Where combine finds the row of the lane's pair; the token's first piece says so.
__device__ __forceinline__ void write_pair_row(const LowLatencyDispatchParams& p, const Piece& got,
                                               std::int32_t row) {
  const int lane = int(threadIdx.x % 32);
  if (got.piece != 0 || lane >= p.view.layout.topk) return;
  p.pair_rows[got.source * p.pair_rows_strides[0] + got.token * p.pair_rows_strides[1] + lane] =
      row;
}

// To all of its places here. `begins` as lay_out_rows() has it.
__device__ __forceinline__ void put_piece(const LowLatencyDispatchParams& p, const Piece& got,
                                          const std::int32_t* begins) {
  const LowLatencyLayout& layout = p.view.layout;
  const int lane = int(threadIdx.x % 32), world = layout.world;
  const std::int64_t bytes = RowFormat(p.note.format) == RowFormat::bf16 ? p.hidden * 2 : p.hidden;
  const std::int64_t vectors = (bytes - std::int64_t(got.piece) * kTakenBytes) / 16;
  const int of_piece =
      RowFormat(p.note.format) == RowFormat::fp8_ue8m0 ? kTakenBytes / 512 : kTakenBytes / 128;
  const std::int64_t word = std::int64_t(got.piece) * of_piece + lane;
  int expert_of_lane = 0;
  std::int32_t row_of_lane = -1;  // of the expert's
  if (got.place >= 0) {
    expert_of_lane = layout.expert_of(got.place);
    row_of_lane = begins[expert_of_lane * world + got.source] - begins[expert_of_lane * world] +
                  layout.before_of(got.place);
  }
  write_pair_row(
      p, got, got.place < 0 ? -1 : expert_of_lane * world * int(layout.max_tokens) + row_of_lane);
  for (unsigned pairs = __ballot_sync(device::kFullWarp, got.place >= 0); pairs != 0;
       pairs &= pairs - 1) {
    const int k = __ffs(pairs) - 1;
    const int expert = __shfl_sync(device::kFullWarp, expert_of_lane, k);
    const std::int64_t row = __shfl_sync(device::kFullWarp, row_of_lane, k);
    auto* to = reinterpret_cast<uint4*>(p.output + expert * p.expert_stride + row * p.row_stride +
                                        std::int64_t(got.piece) * kTakenBytes);
#pragma unroll
    for (int i = 0; i < kTaken; ++i) {
      if (lane + 32 * i < vectors) to[lane + 32 * i] = got.taken[i];
    }
    if (got.has_scale) {
      reinterpret_cast<std::uint32_t*>(
          p.scales)[expert * p.scale_strides[0] + row * p.scale_strides[1] +
                    word * p.scale_strides[2]] = got.scale;
    }
    if (got.piece != 0 || lane != 0) continue;
    p.source_pairs[expert * p.pairs_stride + row] = std::int32_t(got.token * layout.topk + k);
    p.source_tokens[expert * p.tokens_stride + row] = std::int32_t(got.token);
  }
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

// The shared memory of a block that receives.
struct Received {
  bool come[kMaxLocals];
  std::int32_t tokens_of[kMaxLocals], blocks_of[kMaxLocals];  // ranks
};

// What the ranks that have come say before their rows. The whole block; a barrier follows.
__device__ void load_counts(const LowLatencyDispatchParams& p, std::uint64_t epoch,
                            Received& shared) {
  const LowLatencyView& view = p.view;
  const int world = view.layout.world, entries = view.layout.per_rank * world;
  for (int rank = int(threadIdx.x); rank < world; rank += kThreads) {
    const Announced announced{*word(own(view), view.layout.announcement(epoch, rank))};
    const auto* count_word = word(own(view), view.layout.count_word(rank));
    shared.tokens_of[rank] = shared.come[rank] ? announced.tokens() : 0;
    shared.blocks_of[rank] = CountWord::blocks(device::ld_acquire_sys(count_word));
  }
  for (int i = int(threadIdx.x); i < entries; i += kThreads) {
    const auto* count = reinterpret_cast<const std::int32_t*>(
        own(view) + view.layout.count(epoch, i % world, i / world));
    counts_memory()[i] = shared.come[i % world] ? *count : 0;
  }
}

// Waits for what every rank says before its rows. The whole block; false: some rank does not come,
// or the call is refused.
__device__ bool receive_counts(const LowLatencyDispatchParams& p, std::uint64_t epoch,
                               Received& shared) {
  const LowLatencyView& view = p.view;
  bool ok = true;
  for (int rank = int(threadIdx.x); rank < view.layout.world; rank += kThreads) {
    const std::uint64_t* at = word(own(view), view.layout.count_word(rank));
    ok = ok && wait_at_least(view.layer, at, CountWord::of(epoch, 0),
                             rows_phase(kLowLatencyDispatch), rank);
    shared.come[rank] = true;
    if (!ok) continue;
    const Announced announced{*word(own(view), view.layout.announcement(epoch, rank))};
    ok = !announced.refused() && announced.format() == p.note.format;
  }
  if (__syncthreads_or(!ok) != 0) return false;
  load_counts(p, epoch, shared);
  __syncthreads();
  lay_out_rows(view.layout.per_rank * view.layout.world, counts_memory());
  return true;
}

// The pieces of this block, each when the block that sends its token has sent all of its own, to
// their rows. `blocks` share them, of which this one is number `block`.
__device__ void put_rows(const LowLatencyDispatchParams& p, std::uint64_t epoch, int block,
                         int blocks, const Received& shared) {
  const LowLatencyView& view = p.view;
  const LowLatencyLayout& layout = view.layout;
  const std::int64_t bytes = RowFormat(p.note.format) == RowFormat::bf16 ? p.hidden * 2 : p.hidden;
  const int pieces = int((bytes + kTakenBytes - 1) / kTakenBytes);
  const std::int64_t all = layout.world * layout.max_tokens * pieces;
  const std::int64_t step = std::int64_t(blocks) * kWarps;
  for (std::int64_t unit = block * kWarps + int(threadIdx.x) / 32; unit < all; unit += step) {
    const std::int64_t of_all = unit / pieces;
    Piece got;
    got.piece = int(unit - of_all * pieces);
    got.source = int(of_all / layout.max_tokens);
    got.token = of_all - got.source * layout.max_tokens;
    if (got.token >= shared.tokens_of[got.source]) {
      write_pair_row(p, got, -1);
      continue;
    }
    bool come = true;
    if (threadIdx.x % 32 == 0) {
      const int sender = int(got.token) % shared.blocks_of[got.source];
      come = wait_at_least(view.layer, word(own(view), layout.block_word(got.source, sender)),
                           epoch, rows_phase(kLowLatencyDispatch), got.source);
    }
    if (!__shfl_sync(device::kFullWarp, come, 0)) return;
    __syncwarp();  // behind what the first lane has acquired
    load_piece(p, epoch, got);
    put_piece(p, got, counts_memory());
  }
}

__device__ void receive(const LowLatencyDispatchParams& p, Received& shared) {
  const LowLatencyView& view = p.view;
  std::uint64_t epoch;
  if (!begin_to_receive(view, kLowLatencyDispatch, p, epoch)) return;
  const std::uint64_t start = device::globaltimer();
  const int block = int(blockIdx.x), blocks = int(gridDim.x);
  // Where a rank that does not come is masked, and where rows are dropped, all of them must have
  // come first. Otherwise the first block alone waits for that, and reports what ranks say of the
  // call, and the others put each row when it comes.
  const bool waits = view.shrinks || p.output == nullptr;
  if (!waits) {
    const bool good = receive_counts(p, epoch, shared);
    if (block > 0) device::allow_next_kernel();
    if (good && (block > 0 || blocks == 1)) {
      put_rows(p, epoch, max(0, block - 1), max(1, blocks - 1), shared);
    }
    if (block > 0) return;
    __syncthreads();
  }
  const ReceiveOutcome received =
      receive_call(view, kLowLatencyDispatch, view.layout.signal(kLowLatencyDispatch, 0), epoch,
                   p.note.format, p.call, p.wait_statistics, start, shared.come, [&] {
                     if (waits) load_counts(p, epoch, shared);
                   });
  if (received.broken || received.refused || p.output == nullptr) return;
  if (waits) lay_out_rows(view.layout.per_rank * view.layout.world, counts_memory());
  if (block == 0) write_counts(p, counts_memory());
  if (waits) put_rows(p, epoch, block, blocks, shared);
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    receive_kernel(const __grid_constant__ LowLatencyDispatchParams p) {
  WINNOW_BLOCK_SHARED(shared, Received);
  if (!p.behind_send) {
    device::wait_for_kernel_before();
    signal_received(p.view);
  }
  receive(p, shared);
  if (p.behind_send) device::wait_for_kernel_before();
}

}  // namespace
}  // namespace low_latency

int launch_low_latency_send(const LowLatencyDispatchParams& params, int blocks, void* stream) {
  const std::size_t counts = std::size_t(params.view.layer.topology.experts) * sizeof(std::int32_t);
  return device::launch_early(low_latency::send_kernel, blocks, low_latency::kThreads, counts,
                              static_cast<cudaStream_t>(stream), params);
}
int launch_low_latency_receive(const LowLatencyDispatchParams& params, int blocks, void* stream) {
  return device::launch_early(low_latency::receive_kernel, blocks, low_latency::kThreads,
                              low_latency::begins_bytes(params.view.layer.topology.experts),
                              static_cast<cudaStream_t>(stream), params);
}
int load_low_latency_dispatch() {
  const int status = device::load_kernel(low_latency::send_kernel, low_latency::kMostBeginsBytes);
  return status == cudaSuccess
             ? device::load_kernel(low_latency::receive_kernel, low_latency::kMostBeginsBytes)
             : status;
}

}  // namespace winnow::expert_parallel
