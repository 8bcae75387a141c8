// What step() hands to its backends. Internal.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/cache/cache.h"
#include "winnow/compressor/problem.h"
#include "winnow/core/executor.h"
#include "winnow/core/slots.h"

namespace winnow::compressor {

struct StepParams {
  Problem problem;
  // On the CPU; checked. `rows` are the windows that the new tokens complete, 0 without a state.
  std::span<const Sequence> sequences;
  Rows<void*> state;  // [states, ring, 2 * series * d]
  std::int64_t states = 0, ring = 0;
  DType rows_dtype = DType::f32;
  Rows<void*> rows;  // [tokens, d]; may be absent
  // Where rows are stored besides: a cache, pages, or neither.
  Slots slots;  // [tokens]
  sparse_mla::Cache<std::uint8_t> cache;
  indexer::KeyPages pages;
};

void step_cpu(const StepParams& params, const Executor& executor);
// Queues its work on `stream` (null: the default stream) of the current device. `lists`, and
// `state_slots` [n], are there, too; what they say is clamped.
void step_cuda(const StepParams& params, const Packed& lists, const std::int32_t* state_slots,
               void* stream);

}  // namespace winnow::compressor
