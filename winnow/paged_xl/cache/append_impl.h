// What append() hands to its backends. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/executor.h"
#include "winnow/core/slots.h"
#include "winnow/paged_xl/problem.h"

namespace winnow::paged_xl {

struct AppendParams {
  CacheShape cache;
  std::int64_t num_tokens = 0;
  Rows<const void*> key, value;        // [num_tokens, num_kv_heads, head_size]
  Slots slots;                         // [num_tokens]
  Rows<void*> key_cache, value_cache;  // [num_blocks, num_kv_heads], blocks dense
};

void append_cpu(const AppendParams& params, const Executor& executor);

// Queues the kernel on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants at least one token and head. Slots beyond the cache are skipped as negative ones are; which
// token stays in a slot that two name is left open. Allocates nothing and does not wait, so the
// stream may be in capture.
void append_cuda(const AppendParams& params, void* stream);

}  // namespace winnow::paged_xl
