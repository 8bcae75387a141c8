// The low-latency combine on a GPU. A rank sends what it has of a token once: of one row the row,
// of several their weighted sum in f32, each piece of it in the places that the first two have for
// theirs. Warps make and send pieces; meanwhile warps of another kernel add up those that have
// come.
#include <climits>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/expert_parallel/low_latency/low_latency_cuda.cuh"

namespace winnow::expert_parallel {
namespace low_latency {
namespace {

using device::kFullWarp;

constexpr int kPieceColumns = LowLatencyLayout::kPieceBytes / 2;
constexpr int kAtOnce = 4;  // loads of a lane that wait together

// What a rank says of a token whose rows it has sent, beside the epoch: whether their sum, and
// which pairs' places have the first and the second half of its pieces.
struct SentRows {
  static constexpr int kBits = 11;
  std::uint64_t word = 0;  // 0: nothing was sent

  static __device__ std::uint64_t least(std::uint64_t epoch) { return epoch << kBits; }
  static __device__ SentRows rows(std::uint64_t epoch) { return {least(epoch)}; }
  // Of several pairs.
  static __device__ SentRows sum(std::uint64_t epoch, unsigned pairs) {
    const int first = __ffs(pairs) - 1, second = __ffs(pairs & (pairs - 1)) - 1;
    return {least(epoch) | 1u << 10 | unsigned(first) << 5 | unsigned(second)};
  }
  __device__ bool is_sum() const { return (word >> 10 & 1) != 0; }
  __device__ int first() const { return int(word >> 5 & 31); }
  __device__ int second() const { return int(word & 31); }
};

// ---- Sending.

// A stage for a piece of a sum.
constexpr int kHalves = 2, kHalfBytes = LowLatencyLayout::kPieceBytes;
constexpr int kStages = 2, kStageBytes = kHalves * kHalfBytes;  // of a warp
constexpr int kSharedBytes = kWarps * kStages * kStageBytes;

// What a block knows of its tokens, kTokens at a time, so that each thread has one pair at most;
// shared memory.
constexpr int kTokens = kThreads / kMostTopk;
struct Tokens {
  const std::byte* rows[kThreads];   // [kTokens, K]; null: not here
  float weights[kThreads];           // [kTokens, K]
  std::int32_t unweighted[kTokens];  // not 0: weights have not come
  std::int32_t left[kTokens];        // pieces that have not come
};

// Blocks that have rows: all but the first, which says what this rank says of the call, unless
// there is no other one. The number of this one, -1 of the first.
__device__ __forceinline__ int row_blocks() { return max(1, int(gridDim.x) - 1); }
__device__ __forceinline__ int row_block() { return int(blockIdx.x) - (gridDim.x > 1 ? 1 : 0); }
__device__ __forceinline__ bool speaks() { return blockIdx.x == 0; }

// The tokens of all ranks in the order in which this rank sends what it has of them: the next
// rank's, and at the end its own. Each block has every row_blocks()th of them.
struct SentToken {
  int source, token;
};
__device__ __forceinline__ SentToken token_at(const LowLatencyView& view, int place) {
  const int most = int(view.layout.max_tokens), turn = place / most;
  return {(view.layer.topology.rank + 1 + turn) % view.layout.world, place - turn * most};
}

// A thread's pair of the block's tokens, the first of which is its number `first`.
struct SentPair {
  SentToken token{};
  int number = 0, k = 0;  // of the token among kTokens, and of its pairs
  std::int32_t row = -1;  // as pair_rows says
};
__device__ __forceinline__ SentPair pair_of_thread(const LowLatencyCombineParams& p, int first) {
  const LowLatencyLayout& layout = p.view.layout;
  SentPair pair;
  pair.number = int(threadIdx.x) / layout.topk;
  pair.k = int(threadIdx.x) - pair.number * layout.topk;
  const int place = row_block() + (first + pair.number) * row_blocks();
  const bool any = row_block() >= 0 && p.note.refusal == 0 && pair.number < kTokens;
  if (!any || place >= layout.world * layout.max_tokens) return pair;
  pair.token = token_at(p.view, place);
  pair.row = p.pair_rows[pair.token.source * p.pair_rows_strides[0] +
                         pair.token.token * p.pair_rows_strides[1] + pair.k];
  return pair;
}

__device__ __forceinline__ int rows_of_expert(const LowLatencyView& view) {
  return view.layout.world * int(view.layout.max_tokens);
}
__device__ __forceinline__ bool is_row(const LowLatencyView& view, std::int32_t row) {
  return row >= -1 && row < view.layout.per_rank * rows_of_expert(view);
}

// Finds what is wrong with the block's pairs, of which the thread's first one is `pair`.
__device__ void check_rows(const LowLatencyCombineParams& p, SentPair pair,
                           std::uint32_t& mistaken) {
  const int all = rows_of_expert(p.view), block = row_block(), blocks = row_blocks();
  for (int first = 0;;) {
    if (!is_row(p.view, pair.row)) {
      find(p.view, mistaken, LowLatencyNote::kNoRow,
           [&](LowLatencyNote& note) { note.value = pair.row; });
    }
    first += kTokens;
    if (block + first * blocks >= all) return;
    pair = pair_of_thread(p, first);
  }
}

// Where the rows of the block's pairs are. The whole block; a barrier follows.
__device__ void find_row(const LowLatencyCombineParams& p, const SentPair& pair, Tokens& tokens) {
  const LowLatencyView& view = p.view;
  const int rows = rows_of_expert(view);
  const bool here = pair.row >= 0 && is_row(view, pair.row) && !masked(view, pair.token.source);
  const int expert = here ? pair.row / rows : 0;
  tokens.rows[threadIdx.x] =
      here ? p.expert_output + expert * p.expert_stride + (pair.row - expert * rows) * p.row_stride
           : nullptr;
  if (threadIdx.x >= kTokens) return;
  tokens.left[threadIdx.x] = view.layout.pieces;
  tokens.unweighted[threadIdx.x] = 0;
}

// The weight of a pair as it travels, with what tells that it has come: 31 bits of the epoch, and
// whether the rank's `send` was given weights. Every call writes all pairs, so that a word is never
// older than the call before the last.
struct SentWeight {
  std::uint64_t word = 0;
  static __device__ SentWeight of(std::uint64_t epoch, bool given, float weight) {
    const auto tag = std::uint32_t(epoch << 1) | (given ? 1u : 0u);
    return {std::uint64_t(tag) << 32 | __float_as_uint(weight)};
  }
  __device__ bool is_of(std::uint64_t epoch) const {
    return std::uint32_t(word >> 33) == (std::uint32_t(epoch << 1) >> 1);
  }
  __device__ bool given() const { return (word >> 32 & 1) != 0; }
  __device__ float weight() const { return __uint_as_float(std::uint32_t(word)); }
};

// A pair of this rank's tokens whose weight a thread sends.
__device__ __forceinline__ float weight_of(const LowLatencyCombineParams& p, int pair) {
  const int topk = p.view.layout.topk, token = pair / topk, k = pair - token * topk;
  if (p.weights == nullptr || token >= p.indices.tokens || k >= p.indices.topk) return 0;
  const std::int64_t expert = p.indices.at(token, k);
  const float weight = p.weights[token * p.weights_stride + k];
  return expert >= 0 && expert < p.view.layer.topology.experts ? weight : 0;
}

// To every rank, by all blocks: the weights of this rank's tokens, or that it has none yet.
// `weight`: that of the thread's first pair.
__device__ void send_weights(const LowLatencyCombineParams& p, std::uint64_t epoch, float weight) {
  const LowLatencyView& view = p.view;
  const int pairs = int(view.layout.max_tokens) * view.layout.topk;
  const int begin = int(blockIdx.x * kThreads + threadIdx.x), step = int(gridDim.x * kThreads);
  for (int pair = begin; pair < pairs; pair += step) {
    if (pair != begin) weight = weight_of(p, pair);
    const SentWeight sent = SentWeight::of(epoch, p.weights != nullptr, weight);
    for (int to = 0; to < view.layout.world; ++to) {
      if (masked(view, to)) continue;
      const std::int64_t at = view.layout.weight(epoch, view.layer.topology.rank, pair);
      device::st_relaxed_sys(word(view.peers[to], at), sent.word);
    }
  }
}

// The weight of a pair whose row is here, when it has come. Not of a rank whose `send` was given
// none; and nobody waits longer than p.patience_ns for one that is late: the rows say as much as
// their sum. `start`: since when the block waits.
__device__ void receive_weight(const LowLatencyCombineParams& p, std::uint64_t epoch,
                               const SentPair& pair, std::uint64_t start, Tokens& tokens) {
  const LowLatencyView& view = p.view;
  if (tokens.rows[threadIdx.x] == nullptr) return;
  const std::int64_t at = view.layout.weight(
      epoch, pair.token.source, std::int64_t(pair.token.token) * view.layout.topk + pair.k);
  SentWeight seen;
  do {
    seen.word = *const_cast<const volatile std::uint64_t*>(word(own(view), at));
  } while (!seen.is_of(epoch) && device::globaltimer() - start < p.patience_ns);
  tokens.weights[threadIdx.x] = seen.weight();
  if (!seen.is_of(epoch) || !seen.given()) tokens.unweighted[pair.number] = 1;
}

// A warp that sends.
class PieceSender {
 public:
  // Of the piece that was sent last: in shared memory, of each warp.
  struct Last {
    std::int32_t* left;  // pieces of its token that have not come; null: there is no such piece
    std::uint64_t* message_at;
    std::uint64_t message;
  };
  __device__ PieceSender(const LowLatencyCombineParams& p, std::uint64_t epoch,
                         std::uint32_t stages, Last& last)
      : p_(p), epoch_(epoch), stages_(stages), last_(last), lane_(int(threadIdx.x % 32)) {
    if (lane_ == 0) last_.left = nullptr;
  }

  // A piece of the block's token `number` of `tokens`. `sums`: where a token has several rows here
  // and its weights have come.
  __device__ void send(SentToken token, int number, int piece, Tokens& tokens, bool sums) {
    const LowLatencyView& view = p_.view;
    const int pair = number * view.layout.topk + lane_;
    const std::byte* row = lane_ < view.layout.topk ? tokens.rows[pair] : nullptr;
    const unsigned pairs = __ballot_sync(kFullWarp, row != nullptr);
    if (pairs == 0) return;
    const std::int64_t begin = std::int64_t(piece) * LowLatencyLayout::kPieceBytes;
    const int columns = int(min(std::int64_t(kPieceColumns), p_.hidden - begin / 2));
    if (row != nullptr) row += begin;
    std::byte* const to =
        view.peers[token.source] + begin +
        view.layout.returned_row(epoch_, std::int64_t(token.token) * view.layout.topk);
    SentRows sent = SentRows::rows(epoch_);
    const bool own_token = token.source == view.layer.topology.rank;
    bool one_group = true;
    if (sums && tokens.unweighted[number] == 0 && __popc(pairs) > 1) {
      sent = SentRows::sum(epoch_, pairs);
      send_sum(row, row != nullptr ? tokens.weights[pair] : 0, pairs, columns, to, sent, own_token);
    } else if (own_token) {
      keep_rows(row, pairs, columns, to);
    } else {
      one_group = __popc(pairs) <= kHalves;
      send_rows(row, pairs, columns, to);
    }
    if (own_token) __syncwarp();
    if (lane_ != 0) return;
    const Last now{&tokens.left[number],
                   word(view.peers[token.source],
                        view.layout.token_signal(epoch_, view.layer.topology.rank, token.token)),
                   sent.word};
    if (own_token) {
      came(now, own_token);
      device::bulk_wait<0>();  // what was sent before has had its time
      return came();
    }
    // Until the piece before has come, which this one's groups of stores, or two of them, follow.
    one_group ? device::bulk_wait<1>() : device::bulk_wait<2>();
    came();
    last_ = now;
  }
  // All that was sent has come.
  __device__ void end() {
    if (lane_ != 0) return;
    device::bulk_wait<0>();
    came();
  }

 private:
  // The piece that was sent last has come.
  __device__ void came() {
    if (last_.left == nullptr) return;
    came(last_, false);
    last_.left = nullptr;
  }
  // With the last piece of its token its rank is told. One fence for all of a token, which waits
  // for all that the SM has under way.
  __device__ void came(const Last& piece, bool own_token) {
    __threadfence_block();
    if (atomicSub(piece.left, 1) != 1) return;
    own_token ? __threadfence() : __threadfence_system();
    device::st_relaxed_sys(piece.message_at, piece.message);
  }
  // Around what the warp writes into a stage, and lane 0 stores from there.
  __device__ std::uint32_t next_stage() {
    if (lane_ == 0) device::bulk_wait_read<1>();  // that before the last has been read
    __syncwarp();
    stage_ ^= kStageBytes;
    return stages_ + stage_;
  }
  __device__ void written() {
    device::fence_proxy_async_shared();
    __syncwarp();
  }
  static __device__ const std::byte* row_of(const std::byte* row, int k) {
    return reinterpret_cast<const std::byte*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row), k));
  }
  __device__ std::byte* place_of_pair(std::byte* to, int k) const {
    return to + std::int64_t(k) * p_.view.layout.pieces * kHalfBytes;
  }
  // Half `half` of the stage, to the place of pair `k` of those at `to`. One thread.
  __device__ void store(int half, int k, int bytes, std::byte* to) {
    device::bulk_store(place_of_pair(to, k), stages_ + stage_ + half * kHalfBytes,
                       std::uint32_t(bytes), device::policy_evict_normal());
  }

  __device__ void send_sum(const std::byte* row, float weight, unsigned pairs, int columns,
                           std::byte* to, SentRows sent, bool own_token) {
    const std::uint32_t stage = own_token ? 0 : next_stage();
#pragma unroll 1
    for (int at = lane_ * kVector; at - lane_ * kVector < columns; at += 32 * kVector) {
      float sum[kVector] = {};
#pragma unroll 1
      for (unsigned rest = pairs; rest != 0;) {
        uint4 raw[kAtOnce];
        unsigned loads = rest;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (loads == 0) continue;
          const std::byte* its = row_of(row, __ffs(loads) - 1);
          if (at < columns) raw[i] = *reinterpret_cast<const uint4*>(its + at * 2);
          loads &= loads - 1;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (rest == 0) continue;
          const float its = __shfl_sync(kFullWarp, weight, __ffs(rest) - 1);
#pragma unroll
          for (int c = 0; c < kVector; ++c) {
            sum[c] = __fadd_rn(sum[c], __fmul_rn(column_of(raw[i], c), its));
          }
          rest &= rest - 1;
        }
      }
      if (at >= columns) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 four = {__float_as_uint(sum[4 * i]), __float_as_uint(sum[4 * i + 1]),
                            __float_as_uint(sum[4 * i + 2]), __float_as_uint(sum[4 * i + 3])};
        const int behind = at * 4 + i * 16, half = behind / kHalfBytes;
        if (!own_token) {
          device::st_shared(stage + behind, four);
        } else {
          *reinterpret_cast<uint4*>(place_of_pair(to, half == 0 ? sent.first() : sent.second()) +
                                    behind % kHalfBytes) = four;
        }
      }
    }
    if (own_token) return;
    written();
    if (lane_ != 0) return;
    const int bytes = columns * int(sizeof(float));
    store(0, sent.first(), min(bytes, kHalfBytes), to);
    if (bytes > kHalfBytes) store(1, sent.second(), bytes - kHalfBytes, to);
    device::bulk_commit();
  }

  // The rows of an own token, without the detour.
  __device__ void keep_rows(const std::byte* row, unsigned pairs, int columns, std::byte* to) {
    constexpr int kVectors = kPieceColumns / kVector / 32;  // of a lane
#pragma unroll 1
    for (; pairs != 0; pairs &= pairs - 1) {
      const int k = __ffs(pairs) - 1;
      const std::byte* its = row_of(row, k);
      uint4 raw[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = (lane_ + 32 * v) * kVector * 2;
        if (at < columns * 2) raw[v] = *reinterpret_cast<const uint4*>(its + at);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = (lane_ + 32 * v) * kVector * 2;
        if (at < columns * 2) *reinterpret_cast<uint4*>(place_of_pair(to, k) + at) = raw[v];
      }
    }
  }

  // As many rows at a time as a stage has room for.
  __device__ void send_rows(const std::byte* row, unsigned pairs, int columns, std::byte* to) {
    constexpr int kVectors = kPieceColumns / kVector / 32;  // of a lane
#pragma unroll 1
    while (pairs != 0) {
      const std::uint32_t stage = next_stage();
      const int ks[kHalves] = {__ffs(pairs) - 1, __ffs(pairs & (pairs - 1)) - 1};
      pairs &= pairs - 1;
      pairs &= pairs - 1;
      uint4 raw[kHalves][kVectors];  // all loads before a store
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const std::byte* its = row_of(row, max(ks[half], 0));
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int at = (lane_ + 32 * v) * kVector * 2;
          if (ks[half] < 0 || at >= columns * 2) continue;
          raw[half][v] = *reinterpret_cast<const uint4*>(its + at);
        }
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int at = (lane_ + 32 * v) * kVector * 2;
          if (ks[half] < 0 || at >= columns * 2) continue;
          device::st_shared(stage + half * kHalfBytes + at, raw[half][v]);
        }
      }
      written();
      if (lane_ != 0) continue;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (ks[half] >= 0) store(half, ks[half], columns * 2, to);
      }
      device::bulk_commit();
    }
  }

  const LowLatencyCombineParams& p_;
  std::uint64_t epoch_;
  std::uint32_t stages_;
  Last& last_;
  int lane_, stage_ = 0;  // the offset of the stage that was used last
};

// What this rank says of the call is complete when all blocks have looked at their pairs. One
// thread, behind a barrier.
__device__ void say_note(const LowLatencyView& view, std::uint64_t epoch,
                         const std::uint32_t& mistaken) {
  if (speaks()) __threadfence_system();  // behind the note itself
  const Sent known = arrive_sent(view, kBlocksKnow, mistaken);
  if (!known.all) return;
  if (known.found) signal_found(view, kLowLatencyCombine, epoch);
  for (int to = 0; to < view.layout.world; ++to) {
    if (masked(view, to)) continue;
    device::st_relaxed_sys(word(view.peers[to], view.layout.note_word(view.layer.topology.rank)),
                           epoch);
  }
}

// All that this rank sends has come. One thread of the block, behind what it says of tokens.
__device__ void say_end(const LowLatencyView& view, std::uint64_t epoch) {
  __threadfence_system();
  const std::uint32_t none = 0;
  if (!arrive_sent(view, kBlocksSent, none).all) return;
  const int rank = view.layer.topology.rank;
  for (int to = 0; to < view.layout.world; ++to) {
    if (masked(view, to)) continue;
    device::st_relaxed_sys(word(view.peers[to], view.layout.signal(kLowLatencyCombine, rank)),
                           epoch);
  }
  view.state->sent[kLowLatencyCombine] = epoch;
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    send_kernel(const __grid_constant__ LowLatencyCombineParams p) {
  WINNOW_BLOCK_SHARED(mistaken, std::uint32_t);
  WINNOW_BLOCK_SHARED(tokens, Tokens);
  WINNOW_BLOCK_SHARED(last, PieceSender::Last[kWarps]);
  WINNOW_BLOCK_SHARED(next, std::int32_t[2]);  // pieces that warps have claimed
  if (threadIdx.x == 0) mistaken = 0;
  device::wait_for_kernel_before();
  const LowLatencyView& view = p.view;
  const LowLatencyLayout& layout = view.layout;
  const std::uint64_t epoch = view.state->sent[kLowLatencyCombine] + 1;
  // Loaded before anything is waited for.
  SentPair pair = pair_of_thread(p, 0);
  const float weight = weight_of(p, int(blockIdx.x * kThreads + threadIdx.x));
  signal_received(view);
  if (!wait_for_places(view, kLowLatencyCombine, epoch)) return;
  device::allow_next_kernel();
  send_weights(p, epoch, weight);
  if (speaks()) signal_note(view, kLowLatencyCombine, epoch, p.note);
  const std::uint64_t start = device::globaltimer();
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), blocks = row_blocks();
  PieceSender sender(
      p, epoch,
      device::shared_address(device::dynamic_shared<128>()) + warp * kStages * kStageBytes,
      last[warp]);
  const int all = layout.world * int(layout.max_tokens), block = row_block();
  const int others = all - int(layout.max_tokens);  // tokens of other ranks, which come first
  const bool sums = p.weights != nullptr;
#pragma unroll 1
  for (int first = 0; first == 0 || block + first * blocks < all; first += kTokens) {
    if (first > 0) pair = pair_of_thread(p, first);
    if (threadIdx.x < 2) next[threadIdx.x] = 0;
    find_row(p, pair, tokens);
    if (first == 0) check_rows(p, pair, mistaken);
    __syncthreads();
    if (first == 0 && threadIdx.x == kThreads - 1) say_note(view, epoch, mistaken);
    if (sums) receive_weight(p, epoch, pair, start, tokens);
    __syncthreads();
    // Half of the warps begin with the tokens of other ranks, whose link they share, and half with
    // this rank's own.
    const auto pieces_before = [&](int places) {  // of the block's tokens here
      const int number = (places - block + blocks - 1) / blocks - first;
      return block < 0 ? 0 : min(max(number, 0), kTokens) * layout.pieces;
    };
    const int ends[2] = {pieces_before(others), pieces_before(all)};
    const auto claim = [&](bool own_tokens) {
      const int i = atomicAdd(&next[own_tokens], 1) + (own_tokens ? ends[0] : 0);
      return i < (own_tokens ? ends[1] : ends[0]) ? i : -1;
    };
    for (;;) {
      int i = 0;
      if (lane == 0) {
        const bool own_tokens = warp >= kWarps / 2;
        i = claim(own_tokens);
        if (i < 0) i = claim(!own_tokens);
      }
      i = __shfl_sync(kFullWarp, i, 0);
      if (i < 0) break;
      const int number = i / layout.pieces;
      sender.send(token_at(view, block + (first + number) * blocks), number,
                  i - number * layout.pieces, tokens, sums);
    }
    sender.end();
    __syncthreads();
  }
  if (threadIdx.x == 0) say_end(view, epoch);
}

// ---- Receiving.

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

// Until `rank` has sent what it has of the token; `sent`: nothing where it has sent all that it
// does. One thread; false: broken.
__device__ bool rows_come(const LowLatencyView& view, std::uint64_t epoch, int rank, int token,
                          SentRows& sent) {
  const std::uint64_t* at = word(own(view), view.layout.token_signal(epoch, rank, token));
  const std::uint64_t* end = word(own(view), view.layout.signal(kLowLatencyCombine, rank));
  const std::uint64_t least = SentRows::least(epoch);
  unsigned looks = 0;
  const auto there = [&](std::uint64_t seen) {
    return seen >= least || (++looks % 64 == 0 && device::ld_acquire_sys(end) >= epoch);
  };
  if (!wait_until(view.layer, at, there, least, rows_phase(kLowLatencyCombine), rank)) return false;
  const std::uint64_t seen = device::ld_acquire_sys(at);
  sent = {seen >= least ? seen : 0};
  return true;
}

// Columns of a piece that a lane has, in parts of all lanes' columns.
constexpr int kColumns = 4, kParts = kPieceColumns / kColumns / 32;

__device__ __forceinline__ void add_to(float4& sum, const float4& what) {
  sum = {__fadd_rn(sum.x, what.x), __fadd_rn(sum.y, what.y), __fadd_rn(sum.z, what.z),
         __fadd_rn(sum.w, what.w)};
}

// The sum of the rows of `pairs`. `row`: the lane's part of the first pair's place. By a warp.
__device__ __forceinline__ void sum_rows(const std::byte* row, std::int64_t row_bytes,
                                         unsigned pairs, float weight, int columns,
                                         float4 (&sum)[kParts]) {
  constexpr int kRows = 2;  // whose loads wait together
#pragma unroll
  for (int g = 0; g < kParts; ++g) sum[g] = {};
#pragma unroll 1
  while (pairs != 0) {
    uint2 raw[kRows][kParts];
    unsigned loads = pairs;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (loads == 0) continue;
      const std::byte* its = row + (__ffs(loads) - 1) * row_bytes;
#pragma unroll
      for (int g = 0; g < kParts; ++g) {
        if (g * 32 * kColumns >= columns) continue;
        raw[i][g] = *reinterpret_cast<const uint2*>(its + g * 32 * kColumns * 2);
      }
      loads &= loads - 1;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (pairs == 0) continue;
      const float its = __shfl_sync(kFullWarp, weight, __ffs(pairs) - 1);
#pragma unroll
      for (int g = 0; g < kParts; ++g) {
        const uint4 four = {raw[i][g].x, raw[i][g].y, 0, 0};
        add_to(sum[g], {__fmul_rn(column_of(four, 0), its), __fmul_rn(column_of(four, 1), its),
                        __fmul_rn(column_of(four, 2), its), __fmul_rn(column_of(four, 3), its)});
      }
      pairs &= pairs - 1;
    }
  }
}

// A piece of a token, by a warp. `come` [W]: of the ranks whose rows are added. False: broken.
__device__ bool sum_piece(const LowLatencyCombineParams& p, std::uint64_t epoch,
                          const Summed& summed, int piece, const bool* come) {
  const LowLatencyView& view = p.view;
  const LowLatencyLayout& layout = view.layout;
  const int lane = int(threadIdx.x % 32);
  int home = summed.expert >= 0 ? summed.expert / layout.per_rank : -1;
  if (home >= 0 && !come[home]) home = -1;
  const unsigned same = __match_any_sync(kFullWarp, home);
  const bool leads = home >= 0 && __ffs(same) - 1 == lane;
  SentRows sent;
  bool ok = true;
  if (leads) ok = rows_come(view, epoch, home, summed.token, sent);
  if (!__all_sync(kFullWarp, ok)) return false;
  __syncwarp();  // behind what the leading lanes have acquired
  const std::int64_t begin = std::int64_t(piece) * LowLatencyLayout::kPieceBytes;
  const std::int64_t row_bytes = layout.pieces * LowLatencyLayout::kPieceBytes;
  // Of the piece, behind the lane's first one.
  const int columns = int(min(std::int64_t(kPieceColumns), p.hidden - begin / 2)) - lane * kColumns;
  const std::byte* row =
      own(view) + begin + layout.returned_row(epoch, std::int64_t(summed.token) * layout.topk);
  float4 sum[kParts] = {};
  // Ranks in ascending order.
  for (int rank = -1;;) {
    rank = __reduce_min_sync(kFullWarp, leads && home > rank ? home : INT_MAX);
    if (rank == INT_MAX) break;
    const unsigned pairs = __ballot_sync(kFullWarp, home == rank);
    const SentRows its = {__shfl_sync(kFullWarp, sent.word, __ffs(pairs) - 1)};
    if (its.word == 0) continue;
    float4 of_rank[kParts];
    if (its.is_sum()) {
      const std::byte* halves[] = {row + its.first() * row_bytes + lane * kColumns * 4,
                                   row + its.second() * row_bytes + lane * kColumns * 4};
#pragma unroll
      for (int g = 0; g < kParts; ++g) {
        if (g * 32 * kColumns >= columns) continue;
        of_rank[g] = *reinterpret_cast<const float4*>(halves[g * 2 / kParts] +
                                                      g % (kParts / 2) * 32 * kColumns * 4);
      }
    } else {
      sum_rows(row + lane * kColumns * 2, row_bytes, pairs, summed.weight, columns, of_rank);
    }
#pragma unroll
    for (int g = 0; g < kParts; ++g) add_to(sum[g], of_rank[g]);
  }
  std::byte* out = p.out + std::int64_t(summed.token) * p.out_stride + begin + lane * kColumns * 2;
#pragma unroll
  for (int g = 0; g < kParts; ++g, out += 32 * kColumns * 2) {
    if (g * 32 * kColumns >= columns) continue;
    const uint2 packed = {device::pack_bf16(sum[g].x, sum[g].y),
                          device::pack_bf16(sum[g].z, sum[g].w)};
    if (reinterpret_cast<std::uintptr_t>(out) % sizeof(packed) == 0) {
      *reinterpret_cast<uint2*>(out) = packed;
      continue;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      reinterpret_cast<std::uint16_t*>(out)[c] = reinterpret_cast<const std::uint16_t*>(&packed)[c];
    }
  }
  return true;
}

__device__ void receive(const LowLatencyCombineParams& p, bool* come) {
  const LowLatencyView& view = p.view;
  std::uint64_t epoch;
  if (!begin_to_receive(view, kLowLatencyCombine, p, epoch)) return;
  const int pieces = view.layout.pieces;
  const std::int64_t all = p.out == nullptr ? 0 : p.indices.tokens * pieces;
  const std::int64_t warps = std::int64_t(row_blocks()) * kWarps;
  std::int64_t unit = std::int64_t(row_block()) * kWarps + int(threadIdx.x / 32);
  if (unit < 0) unit = all;
  Summed summed;
  if (unit < all) choose_token(p, int(unit / pieces), summed);  // before anything has come
  for (int rank = int(threadIdx.x); rank < view.layout.world; rank += kThreads) come[rank] = true;
  // The first block receives what ranks say of the call. Where a rank that does not come is masked,
  // it is known at the end only whose rows are added; and rows that are dropped have to have come,
  // so that others may take their places.
  const bool waits = view.shrinks || p.out == nullptr;
  if (waits || blockIdx.x == 0) {
    const std::int64_t words =
        waits ? view.layout.signal(kLowLatencyCombine, 0) : view.layout.note_word(0);
    const ReceiveOutcome received =
        receive_call(view, kLowLatencyCombine, words, epoch, p.note.format, p.call,
                     p.wait_statistics, device::globaltimer(), come, [] {});
    if (received.broken || received.refused) return;
  } else {
    device::allow_next_kernel();
    __syncthreads();
  }
  for (; unit < all; unit += warps) {
    const int token = int(unit / pieces);
    choose_token(p, token, summed);
    const int piece = int(unit - std::int64_t(token) * pieces);
    if (!sum_piece(p, epoch, summed, piece, come)) return;
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    receive_kernel(const __grid_constant__ LowLatencyCombineParams p) {
  WINNOW_BLOCK_SHARED(come, bool[kMaxLocals]);
  if (!p.behind_send) {
    device::wait_for_kernel_before();
    signal_received(p.view);
  }
  receive(p, come);
  if (p.behind_send) device::wait_for_kernel_before();
}

}  // namespace
}  // namespace low_latency

int launch_low_latency_send(const LowLatencyCombineParams& params, int blocks, void* stream) {
  return device::launch_early(low_latency::send_kernel, blocks, low_latency::kThreads,
                              low_latency::kSharedBytes, static_cast<cudaStream_t>(stream), params);
}
int launch_low_latency_receive(const LowLatencyCombineParams& params, int blocks, void* stream) {
  return device::launch_early(low_latency::receive_kernel, blocks, low_latency::kThreads, 0,
                              static_cast<cudaStream_t>(stream), params);
}
int load_low_latency_combine() {
  const int status = device::load_kernel(low_latency::send_kernel, low_latency::kSharedBytes);
  return status == cudaSuccess ? device::load_kernels(low_latency::receive_kernel) : status;
}

}  // namespace winnow::expert_parallel
