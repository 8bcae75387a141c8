// New rows of a paged cache of latent rows.
#pragma once

#include <cstdint>

#include "winnow/cache/cache_format.h"
#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::sparse_mla {

// Arguments of store().
struct StoreArgs {
  ConstTensorView rows{};   // [n, columns], bf16: 576 for fp8_656, 512 for fp8_584, for bf16 as the
                            // cache
  ConstTensorView slots{};  // [n], i64 or i32: block * block_size + offset; negative: not stored
  CacheFormat format = CacheFormat::fp8_656;
  TensorView cache{};  // [blocks, block_size, 1, row], see CacheFormat
  // Optional, u8 on the device of rows, aligned to 256 bytes, at least store_workspace_bytes():
  // scratch memory of GPU backends, in use until the work on the stream is done. Required if that
  // is not 0. The CPU backend does not use it.
  TensorView workspace{};
};

// Writes row i to slot slots[i] of the cache, quantised as its format says: each group of 128 (in
// fp8_584 of 64) of the first columns gets the scale cache_scale(its largest magnitude) and is
// stored as f8_e4m3(row / scale), rounded to nearest even and saturating at 448; the 64 columns of
// RoPE are copied, and in bf16 all columns are. The byte of padding in fp8_584 is written as 0. All
// backends give bitwise the same results. Nothing else in the cache is written, and a row is
// written completely or not at all.
//
// Rows with negative slots are not stored. On the CPU, and on a GPU in checking mode
// (RunOptions::check), a slot outside of the cache and a slot that two rows name are errors;
// otherwise a GPU skips slots outside of the cache, and a slot of several rows contains one of them
// completely.
//
// Sizes: any n, blocks and block_size, including 0; fewer than 2^31 slots. Strides: the innermost
// dimension is contiguous, the others are arbitrary (also 0 or negative; not 0 for the cache); in
// fp8_584 as decode() says. On a GPU rows and the cache's rows, and in fp8_584 its blocks, begin at
// multiples of 16 bytes. Memory: all tensors belong to the caller and live on one device; a cache
// that overlaps another tensor is refused. On a GPU the call neither waits nor allocates, so the
// stream may be in capture. Streams: see Stream. Thread-safe, but not for calls that write the same
// slots. Returns the backend that ran. Errors: Error (invalid_argument) naming the argument, before
// anything is written; Error (unsupported) if no backend, or not the forced one, can run it.
//
// The caches in f8 are those of FlashMLA.
WINNOW_EXPORT Backend store(const StoreArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that store() needs with the same arguments; 0 on the CPU. The result
// depends on shapes and the format, not on addresses or values, and is no smaller for more rows.
// Errors: as store().
WINNOW_EXPORT std::int64_t store_workspace_bytes(const StoreArgs& args,
                                                 const RunOptions& options = {});

}  // namespace winnow::sparse_mla
