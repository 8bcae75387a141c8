// What decode() hands to its backends. Internal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "winnow/cache/cache.h"
#include "winnow/core/executor.h"
#include "winnow/core/host_device.h"
#include "winnow/core/read_once.h"
#include "winnow/core/row_limits.h"
#include "winnow/core/rows.h"

namespace winnow::sparse_mla {

// One of the caches of a call, and the rows that each query chose of it.
//
// With block tables the entries are the positions of the sequence: topk is how many the table has
// room for, `indices` are the tables, [b, n], and topk_length is context_lens.
struct ChosenRows {
  Cache<const std::uint8_t> cache;
  bool paged = false;
  // Paged: s_q where context_lens counts all queries of the step and each sees the rows up to its
  // own; otherwise 0, and topk_length is what each query sees.
  std::int64_t step = 0;
  std::int64_t topk = 0;                  // 0: there is no such cache, or nothing chosen of it
  Rows<const std::int32_t*> indices;      // [b, s_q, topk]
  Rows<const std::int32_t*> topk_length;  // [b, s_q], stride1 0 for [b]; null: every entry counts

  // Entries of query s of sequence i that count.
  std::int64_t entries(std::int64_t i, std::int64_t s) const {
    if (!topk_length.present()) return topk;
    const std::int64_t given =
        std::clamp<std::int64_t>(read_once(topk_length.data + topk_length.offset(i, s)), 0, topk);
    return step > 0 ? rows_of_step(given, step, s) : given;
  }
  // The slot of entry j of query s of sequence i; it may not be in the cache.
  std::int64_t slot(std::int64_t i, std::int64_t s, std::int64_t j) const {
    if (!paged) return read_once(indices.data + indices.offset(i, s) + j);
    const std::int64_t block =
        read_once(indices.data + indices.offset(i, 0) + j / cache.block_size);
    return block < 0 || block >= cache.blocks ? -1
                                              : block * cache.block_size + j % cache.block_size;
  }
};

// A tensor [b, s_q, h_q, columns] whose columns are contiguous. Strides count elements.
template <class Pointer>
struct Heads {
  Pointer data = nullptr;
  std::int64_t stride_b = 0, stride_s = 0, stride_h = 0;
  WINNOW_HOST_DEVICE constexpr bool present() const { return data != nullptr; }  // as in Rows
  std::int64_t offset(std::int64_t i, std::int64_t s, std::int64_t h) const {
    return i * stride_b + s * stride_s + h * stride_h;
  }
};

struct DecodeParams {
  std::int64_t b = 0, s_q = 0, h_q = 0, d_qk = 0;
  CacheFormat format = CacheFormat::fp8_656;
  float scale = 0;
  bool batch_invariant = true, in_list_order = false;
  // In the place of -inf.
  float lse_of_nothing = -std::numeric_limits<float>::infinity();
  Heads<const void*> q;  // [b, s_q, h_q, d_qk], bf16
  ChosenRows chosen, extra;
  Rows<const float*> attn_sink;                         // [h_q]; may be null
  const float *q_scale = nullptr, *kv_scale = nullptr;  // may be null: 1
  Heads<void*> out;                                     // [b, s_q, h_q, 512], bf16
  Heads<float*> lse;                                    // [b, s_q, h_q], stride_h 1; may be null
};

void decode_cpu(const DecodeParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants b, s_q and h_q of at least 1, the sizes and addresses that decode.h gives for it, and
// `workspace` of decode_sm90_workspace_bytes(). Allocates nothing and does not wait, so the stream
// may be in capture.
void decode_sm90(const DecodeParams& params, void* workspace, void* stream);
std::int64_t decode_sm90_workspace_bytes(const DecodeParams& params);
// The same on every GPU from compute capability 8.0 on.
void decode_cuda(const DecodeParams& params, void* workspace, void* stream);
std::int64_t decode_cuda_workspace_bytes(const DecodeParams& params);

}  // namespace winnow::sparse_mla
