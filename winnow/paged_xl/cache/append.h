// Writing new keys and values into a paged cache.
#pragma once

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::paged_xl {

// Arguments of append().
struct AppendArgs {
  ConstTensorView key{};    // [num_tokens, num_kv_heads, head_size], f32, f16, bf16 or, on the
                            // CPU, f64
  ConstTensorView value{};  // the same
  ConstTensorView slot_mapping{};  // [num_tokens], i64 or i32: the slot of each token
  TensorView key_cache{};    // [num_blocks, num_kv_heads, head_size/x, block_size, x], as key;
                             // x = 16 / size of an element
  TensorView value_cache{};  // [num_blocks, num_kv_heads, head_size, block_size], as key
};

// Copies token t to slot_mapping[t] = block * block_size + offset of both caches:
//   key_cache[block, h, d / x, offset, d % x] = key[t, h, d]
//   value_cache[block, h, d, offset]          = value[t, h, d]
// A token with a negative slot is not stored. Nothing else in the caches is written.
//
// Sizes: head_size 32, 64, 80, 96, 112, 128, 160, 192 or 256; block_size 8, 16, 32, 64 or 128; any
// num_tokens, num_kv_heads and num_blocks, including 0. Strides: the innermost dimension is
// contiguous, as are the last three of key_cache and the last two of value_cache; the others are
// arbitrary (also 0 or negative; not 0 for the caches). Memory: all tensors belong to the caller
// and live on one device; a cache that overlaps another tensor is refused. Streams: see Stream.
// Thread-safe,
// also for calls that write different slots of the same caches. Returns the backend that ran.
// Errors: Error (invalid_argument) naming the argument, before anything is written; on the CPU, and
// on a GPU in checking mode (RunOptions::check), also for a slot beyond the cache and for one
// written twice, with the tokens' positions and the slot. Without checking mode a GPU skips slots
// beyond the cache, and a slot that is written twice holds an unspecified one of the tokens. Error
// (unsupported) if no backend, or not the forced one, can run it.
//
// Layout of the cache: vLLM (Kwon et al. 2023, "Efficient Memory Management for Large Language
// Model Serving with PagedAttention").
WINNOW_EXPORT Backend append(const AppendArgs& args, const RunOptions& options = {});

}  // namespace winnow::paged_xl
