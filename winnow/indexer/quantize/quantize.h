// Rows of f8_e4m3 with a scale each: keys and queries of the lightning indexer.
#pragma once

#include <cstdint>

#include "winnow/cache/key_page.h"
#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::indexer {

// Arguments of quantize(). Either `rows` and `scale` are given, or `pages` and `slots`.
struct QuantizeArgs {
  ConstTensorView x{};        // [n, d], or [n, h, d] without pages; f32, f16 or bf16; d 128 or 64
  bool power_of_two = false;  // scales are powers of two
  TensorView rows{};          // as x in shape, f8_e4m3, or u8 with the same bits
  TensorView scale{};         // as x without its last dimension, f32
  TensorView pages{};         // [num_pages, 64 * (d + 4)], u8: see kPageRows
  ConstTensorView slots{};    // [n], i64 or i32: page * 64 + row of the page; negative: not stored
};

// For every row of x, with amax its largest magnitude:
//   scale = max(amax, 1e-4) / 448, and with power_of_two the smallest power of two not below it
//   rows  = f8_e4m3(x / scale)
// Both quotients are rounded to f32. The conversion rounds to nearest even and saturates at 448,
// the largest f8_e4m3. The error of rows * scale is at most 1/16 of an element, or 2^-10 of the
// scale if that is larger. All backends give bitwise the same results. If a row contains a NaN or
// an infinity, the whole row and its scale become NaN: its scores are NaN, which topk() ranks last.
//
// For topk() and scores(), pass the rows of keys as `k` and their scales as `k_scale`. Multiply the
// scales of queries into the weights: weights[i,h] * scale[i,h].
//
// In pages, row i goes to page slots[i] / 64: its elements to the bytes d * (slots[i] % 64) and on,
// its scale to byte 64 * d + 4 * (slots[i] % 64). Nothing else in the pages is written. On the CPU,
// and on a GPU in checking mode (RunOptions::check), a slot outside of the pages and a slot that
// two rows name are errors; otherwise a GPU skips slots outside of the pages, and a slot of two
// rows contains an unspecified mixture of them.
//
// Sizes: any n, h and num_pages, including 0. Strides: the innermost dimension is contiguous, the
// others are arbitrary (also 0 or negative; not 0 for outputs); on a GPU pages begin at multiples
// of 4 bytes. Memory: all tensors belong to the caller and live on one device; an output that
// overlaps another tensor is refused. On a GPU the call neither waits nor allocates, so the stream
// may be in capture. Streams: see Stream. Thread-safe. Returns the backend that ran. Errors: Error
// (invalid_argument) naming the argument, before anything is written; Error (unsupported) if no
// backend, or not the forced one, can run it.
//
// The layout of pages is that of DeepGEMM and vLLM.
WINNOW_EXPORT Backend quantize(const QuantizeArgs& args, const RunOptions& options = {});

}  // namespace winnow::indexer
