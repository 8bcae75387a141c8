// What store() hands to its backends. Internal.
#pragma once

#include <cstdint>

#include "winnow/cache/cache.h"
#include "winnow/core/executor.h"
#include "winnow/core/rows.h"
#include "winnow/core/slots.h"

namespace winnow::sparse_mla {

struct StoreParams {
  std::int64_t n = 0;
  Rows<const void*> rows;  // [n, cache.columns], bf16
  Slots slots;             // [n]
  Cache<std::uint8_t> cache;
};

void store_cpu(const StoreParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Requires n of at least 1, what check_cache_for_gpu() asks for, and `workspace` of
// store_cuda_workspace_bytes(). Skips slots beyond the cache. Allocates nothing and does not wait,
// so the stream may be in capture.
void store_cuda(const StoreParams& params, void* workspace, void* stream);
std::int64_t store_cuda_workspace_bytes(const StoreParams& params);

}  // namespace winnow::sparse_mla
