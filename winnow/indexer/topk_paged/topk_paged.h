// The lightning indexer's choice of rows in decode steps, over a paged cache of keys in 8 bits.
#pragma once

#include <cstdint>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/topk/topk.h"

namespace winnow::indexer {

// Arguments of topk_paged(). A default-constructed optional tensor is absent.
struct TopkPagedArgs {
  ConstTensorView q{};             // [b, s_q, h, d], f8_e4m3; h 1 to 128, d 128 or 64
  ConstTensorView pages{};         // [num_pages, 64 * (d + 4)], u8: see kPageRows and quantize()
  ConstTensorView weights{};       // [b, s_q, h], f32 or bf16
  ConstTensorView block_tables{};  // [b, n], i32: the pages of each sequence
  // i32: [b], cached rows, including those of the step's own queries; or [b, s_q], the rows that
  // each query sees.
  ConstTensorView context_lens{};
  Ties ties = Ties::smaller;
  bool positions = false;  // `indices` holds positions in the sequence, not slots of the cache
  TensorView indices{};    // [b, s_q, topk], i32; topk is 1 or more
  TensorView length{};     // [b, s_q], i32
  TensorView scores{};     // optional [b, s_q, topk], f32
  // Optional, u8 on the device of q, aligned to 256 bytes, at least topk_paged_workspace_bytes():
  // scratch memory of GPU backends, in use until the work on the stream is done. Required if that
  // is not 0. The CPU backend does not use it.
  TensorView workspace{};
};

// For query j of every sequence i the topk largest scores of the rows that it sees:
//   I[i,j,t] = k_scale[t] * sum over h of weights[i,j,h] * max(0, dot(q[i,j,h,:], k[t,:]))
// as in topk(), whose rules for ties, NaN and zeros hold. k[t] and k_scale[t] are those of position
// t of the sequence: row t % 64 of page block_tables[i, t / 64]. The caller multiplies d^-0.5,
// h^-0.5 and the scale of the quantised q into `weights`.
//
// With context_lens [b], query j sees the positions t < context_lens[i] - s_q + j + 1: the queries
// of a step are the last rows of its sequence, and each sees its own row and the previous ones.
// With context_lens [b, s_q] it sees the positions t < context_lens[i,j], in any order of lengths:
// rows that each stand for several tokens want that. Lengths are clamped to [0, n * 64]. The rows
// of a page outside of [0, num_pages) are absent. Rows that a query does not see, and entries of
// the table beyond the context, do not affect the result.
//
// `length[i,j]` is the smaller of topk and the number of rows that the query sees. `indices[i,j]`
// contains that many slots, block_tables[i, t / 64] * 64 + t % 64, or positions t, in ascending
// order of position, followed by -1. `scores[i,j]` contains their scores, followed by -inf. The
// slots can be passed to sparse_mla::decode() if both caches have blocks of 64 rows and use the
// same table. The choice is exact for the computed scores. It is the same in every run and does not
// depend on the rest of the batch.
//
// Shapes: any b, s_q, num_pages and n, 0 included; num_pages and n are at most 2^25 - 2. Strides:
// the innermost dimension is contiguous, the others are arbitrary. Memory: all tensors belong to
// the caller and live on one device; an output that overlaps another tensor is refused. On a GPU
// the scratch memory is `workspace`, up to 256 MiB, or 16 bytes for each row of the n pages if that
// is more; if it is absent, the memory is allocated on the stream. On the CPU it grows with
// num_threads() and, by 16 bytes per row, with the smaller of topk and the rows of the n pages.
// Lengths and tables are read on the device, so the stream may be in capture and the graph may be
// replayed with other contents. Streams: see Stream. Thread-safe. Returns the backend that ran.
// Errors: Error (invalid_argument) naming the argument, before anything is written; Error
// (unsupported) if no backend, or not the forced one, can run it.
//
// Defined by DeepSeek-V3.2; the layout of pages is that of DeepGEMM and vLLM.
WINNOW_EXPORT Backend topk_paged(const TopkPagedArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that topk_paged() needs with the same arguments; 0 on the CPU. The
// result depends on shapes and the GPU, not on values. Errors: as topk_paged().
WINNOW_EXPORT std::int64_t topk_paged_workspace_bytes(const TopkPagedArgs& args,
                                                      const RunOptions& options = {});

}  // namespace winnow::indexer
