// What topk_paged() hands to its backends. Internal.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/core/executor.h"
#include "winnow/core/read_once.h"
#include "winnow/core/rows.h"

namespace winnow::indexer {

struct TopkPagedParams {
  std::int64_t b = 0, s_q = 0, h = 0, d = 0, topk = 0;
  std::int64_t num_pages = 0, table = 0;  // table: pages of a row of block_tables
  bool later_ties = false;                // of equal scores that of the larger position wins
  bool positions = false;
  bool lens_of_queries = false;  // context_lens has the rows that each query sees
  Rows<const void*> q;           // [b, s_q, h, d], f8_e4m3; the strides of b and s_q
  std::int64_t q_head_stride = 0;
  DType weights_dtype = DType::f32;
  Rows<const void*> weights;               // [b, s_q, h]
  Rows<const std::uint8_t*> pages;         // [num_pages, 64 * (d + 4)]
  Rows<const std::int32_t*> block_tables;  // [b, table]
  Rows<const std::int32_t*> context_lens;  // [b], or [b, s_q]
  Rows<std::int32_t*> indices;             // [b, s_q, topk]
  Rows<std::int32_t*> length;              // [b, s_q]
  Rows<float*> scores;                     // [b, s_q, topk], may be null

  // The rows that query j of sequence i sees, of those that the table has room for. Reads the
  // length once.
  std::int64_t visible(std::int64_t i, std::int64_t j) const {
    const std::int64_t given =
        read_once(context_lens.data + context_lens.offset(i, lens_of_queries ? j : 0));
    const std::int64_t context = std::clamp<std::int64_t>(given, 0, table * 64);
    return lens_of_queries ? context : std::max<std::int64_t>(context - s_q + j + 1, 0);
  }
};

void topk_paged_cpu(const TopkPagedParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants b and s_q of at least 1 and `workspace` of topk_paged_sm90_workspace_bytes(). Allocates
// nothing and does not wait, so the stream may be in capture.
void topk_paged_sm90(const TopkPagedParams& params, void* workspace, void* stream);
std::int64_t topk_paged_sm90_workspace_bytes(const TopkPagedParams& params);

}  // namespace winnow::indexer
