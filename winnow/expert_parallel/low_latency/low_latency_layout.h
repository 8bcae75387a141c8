// The layout of a low-latency rank's memory, the same on every rank. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/host_device.h"

namespace winnow::expert_parallel {

// What a rank tells every other rank about a call, before its signal.
struct LowLatencyNote {
  static constexpr int kTextBytes = 612;
  std::uint32_t refusal = 0;  // ErrorCode + 1; 0: none
  std::int32_t format = 0;    // of a dispatch
  // The error that a kernel has found; the host that receives it makes the text.
  enum Found : std::int32_t { kNothing, kNoExpert, kExpertTwice, kNoRow };
  std::int32_t found = kNothing, token = 0;
  std::int64_t value = 0;
  std::int32_t tokens = 0;  // n, of a dispatch
  char text[kTextBytes] = {};
};
static_assert(sizeof(LowLatencyNote) % 16 == 0);

enum LowLatencyCall { kLowLatencyDispatch, kLowLatencyCombine, kLowLatencyCalls };

// Offsets in bytes. The epochs number the calls of each kind from 1; there is memory for two calls
// of a kind at a time.
struct LowLatencyLayout {
  int world = 1, topk = 1, per_rank = 1;
  std::int64_t max_tokens = 0;
  std::int64_t row_bytes = 0;      // of a bf16 row; one of f8 and its scales are smaller
  std::int64_t message_bytes = 0;  // row, scales
  int pieces = 1;                  // of kPieceBytes in a row that combine sends on a GPU
  std::int64_t signals = 0;        // [calls, W] words: the epoch that rank has sent here
  std::int64_t consumed = 0;  // [calls, W] words: the epoch up to which it has received from here
  std::int64_t notes = 0;     // [calls, 2, W] LowLatencyNote
  std::int64_t counts = 0;    // [2, W, e] i32
  std::int64_t places = 0;    // [2, W, M, K] i32
  std::int64_t messages = 0;  // [2, W, M]: a token comes once, however many of its experts are here
  std::int64_t returned = 0;  // [2, M, K] rows, each with room for whole pieces
  // For dispatch on a GPU alone, words from every rank: [W], the epoch of the counts that have come
  // and the number of blocks that send rows; [2, W], what it says of the call with them; [W,
  // kMostBlocks], the epoch whose rows each block has sent.
  std::int64_t count_words = 0, announced = 0, block_words = 0;
  // For combine on a GPU alone, words from every rank: [W], the epoch whose note is complete;
  // [2, W, M, K], the weight of each of its pairs, and its epoch; [2, W, M], how much it has sent
  // of a token here.
  std::int64_t note_words = 0, weights = 0, token_signals = 0;
  std::int64_t bytes = 0;

  static constexpr int kPieceBytes = 1024;
  static constexpr int kMostBlocks = 512;

  // The entry of `places` for a pair whose expert is here: the expert, and the number of earlier
  // pairs of the same rank for it. Entries of other pairs are -1.
  WINNOW_HOST_DEVICE std::int32_t place_of(int expert, std::int32_t before) const {
    return std::int32_t(expert * max_tokens + before);
  }
  WINNOW_HOST_DEVICE int expert_of(std::int32_t place) const { return int(place / max_tokens); }
  WINNOW_HOST_DEVICE std::int32_t before_of(std::int32_t place) const {
    return std::int32_t(place % max_tokens);
  }

  WINNOW_HOST_DEVICE std::int64_t signal(int call, int rank) const {
    return signals + (std::int64_t(call) * world + rank) * 8;
  }
  WINNOW_HOST_DEVICE std::int64_t consumed_word(int call, int rank) const {
    return consumed + (std::int64_t(call) * world + rank) * 8;
  }
  WINNOW_HOST_DEVICE std::int64_t note(int call, std::uint64_t epoch, int rank) const {
    return notes + ((std::int64_t(call) * 2 + std::int64_t(epoch % 2)) * world + rank) *
                       std::int64_t(sizeof(LowLatencyNote));
  }
  WINNOW_HOST_DEVICE std::int64_t count(std::uint64_t epoch, int rank, int expert) const {
    return counts + ((std::int64_t(epoch % 2) * world + rank) * per_rank + expert) * 4;
  }
  WINNOW_HOST_DEVICE std::int64_t count_word(int rank) const { return count_words + rank * 8; }
  WINNOW_HOST_DEVICE std::int64_t announcement(std::uint64_t epoch, int rank) const {
    return announced + (std::int64_t(epoch % 2) * world + rank) * 8;
  }
  WINNOW_HOST_DEVICE std::int64_t block_word(int rank, int block) const {
    return block_words + (std::int64_t(rank) * kMostBlocks + block) * 8;
  }
  WINNOW_HOST_DEVICE std::int64_t place(std::uint64_t epoch, int rank, std::int64_t token) const {
    return places + ((std::int64_t(epoch % 2) * world + rank) * max_tokens + token) * topk * 4;
  }
  WINNOW_HOST_DEVICE std::int64_t message(std::uint64_t epoch, int rank, std::int64_t token) const {
    return messages +
           ((std::int64_t(epoch % 2) * world + rank) * max_tokens + token) * message_bytes;
  }
  WINNOW_HOST_DEVICE std::int64_t returned_row(std::uint64_t epoch, std::int64_t pair) const {
    return returned + (std::int64_t(epoch % 2) * max_tokens * topk + pair) * pieces * kPieceBytes;
  }
  WINNOW_HOST_DEVICE std::int64_t note_word(int rank) const { return note_words + rank * 8; }
  WINNOW_HOST_DEVICE std::int64_t weight(std::uint64_t epoch, int rank, std::int64_t pair) const {
    return weights + ((std::int64_t(epoch % 2) * world + rank) * max_tokens * topk + pair) * 8;
  }
  WINNOW_HOST_DEVICE std::int64_t token_signal(std::uint64_t epoch, int rank,
                                               std::int64_t token) const {
    return token_signals + ((std::int64_t(epoch % 2) * world + rank) * max_tokens + token) * 8;
  }
};

}  // namespace winnow::expert_parallel
