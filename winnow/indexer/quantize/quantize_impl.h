// What quantize() hands to its backends. Internal.
#pragma once

#include <cstdint>

#include "winnow/cache/cache.h"
#include "winnow/core/dtype.h"
#include "winnow/core/executor.h"
#include "winnow/core/rows.h"
#include "winnow/core/slots.h"

namespace winnow::indexer {

struct QuantizeParams {
  DType dtype = DType::f32;  // of x
  std::int64_t n = 0, h = 1, d = 0;
  bool power_of_two = false;
  Rows<const void*> x;       // [n, h, d]
  Rows<std::uint8_t*> rows;  // [n, h, d]; null: pages
  Rows<float*> scale;        // [n, h]
  KeyPages pages;
  Slots slots;  // [n]
};

void quantize_cpu(const QuantizeParams& params, const Executor& executor);

// Queues the kernel on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants n and h of at least 1 and pages at multiples of 4 bytes. Skips slots beyond the pages.
// Allocates nothing and does not wait, so the stream may be in capture.
void quantize_cuda(const QuantizeParams& params, void* stream);

}  // namespace winnow::indexer
