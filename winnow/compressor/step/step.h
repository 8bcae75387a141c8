// Compressed rows of tokens that come one by one, or some at a time.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::compressor {

// Arguments of step(). c and R are those of forward(), and so is what is not explained.
struct StepArgs {
  ConstTensorView kv{};              // [tokens, c * d], of the new tokens
  ConstTensorView gate{};            // as kv
  ConstTensorView position_bias{};   // [ratio, c * d], R
  ConstTensorView cu_seqlens{};      // [n + 1], i32: where the new tokens of each sequence begin
  ConstTensorView first_position{};  // [n], i32: the position of its first new token
  ConstTensorView state_slots{};     // [n], i32: its state; negative: the sequence is left out
  bool overlap = false;
  ConstTensorView norm_weight{};
  std::optional<double> eps{};
  ConstTensorView cos{};
  ConstTensorView sin{};
  bool hadamard = false;
  TensorView state{};  // [states, ring, 2 * c * d], R: read and written; ring is at least c * ratio
  TensorView rows{};   // [tokens, d], as kv or R; optional with cache or pages
  // Paged caches that rows are stored in, one of them or none; not for f64.
  TensorView cache{};       // [blocks, block_size, 1, row], of sparse_mla: bf16 with d columns, or
                            // fp8_584 (u8 or f8_e4m3) where d is 512. See CacheFormat
  TensorView pages{};       // [num_pages, 64 * (d + 4)], u8; d 128 or 64. See kPageRows
  ConstTensorView slots{};  // [tokens], i64 or i32: block * block_size + offset of the row that
                            // the token completes; negative: not stored
  bool power_of_two = false;  // scales in pages are powers of two
};

// The new tokens of a sequence have the positions first_position and on; the first token of a
// sequence ever has position 0. A token that is the last of its window has the window's row written
// to rows[token], with the bits that forward() gives for the sequence from its beginning without a
// first_position. Other rows are not written.
//
// The token at position p leaves its kv, and its gate with position_bias, at place p % ring of its
// sequence's state. So a state needs no initialisation, and a prompt leaves the same bits in one
// call as token by token. The next call undoes tokens if its first_position is that of the first
// token to be undone: the new tokens take their places. Up to ring - c * ratio + 1 tokens can be
// undone at a time, since the state then still has every token that an incomplete window needs.
//
// With cache or pages, the row of a token is also written to slots[token], on a GPU in the same
// launch. The row is first rounded to the dtype of rows, or of kv without rows. A cache then gets
// the bytes that sparse_mla::store() gives for the row in bf16, pages get those of
// indexer::quantize(). Slots of tokens that complete no window are not looked at. Nothing else in
// the cache is written. On the CPU, and on a GPU in checking mode (RunOptions::check), a slot
// outside of the cache and a slot that two rows name are errors; otherwise a GPU skips slots
// outside of the cache, and a slot of two rows contains an unspecified mixture of them.
//
// Sizes: any tokens and n, including 0, and sequences without new tokens. No two sequences have the
// same state. Strides, memory, streams and errors: as forward(); a state, rows, a cache or pages
// that overlap each other or an input are refused. Strides of a cache, and on a GPU the alignment
// of caches and pages, are as sparse_mla::store() and indexer::quantize() want them. Returns the
// backend that ran.
WINNOW_EXPORT Backend step(const StepArgs& args, const RunOptions& options = {});

}  // namespace winnow::compressor
