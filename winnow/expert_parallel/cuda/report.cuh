// How kernels tell the host something, in pinned memory. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/cuda/wait.cuh"

namespace winnow::expert_parallel {

// Of a header without its text, which stands at its end, and which only a refusal has.
inline constexpr std::int64_t kHeadBytes = sizeof(Header) - Header::kTextBytes;

// Copies what the exchange of this call has heard. The whole block; ends with a barrier.
__device__ inline void report_heard(const LayerView& view, const ReportView& to, bool with_texts) {
  using Word = std::uint64_t;
  const Heard heard(view);
  const int world = view.topology.world;
  const int words = int((with_texts ? std::int64_t(sizeof(Header)) : kHeadBytes) / sizeof(Word));
  for (int i = threadIdx.x; i < world * words; i += blockDim.x) {
    const int rank = i / words, word = i % words;
    reinterpret_cast<Word*>(to.headers + rank)[word] =
        reinterpret_cast<const Word*>(&heard.header(rank))[word];
  }
  for (int rank = threadIdx.x; rank < world; rank += blockDim.x) {
    to.findings[rank] = heard.findings(rank);
  }
  __syncthreads();
}

// A report is complete: the host may read it. One thread, behind a barrier that comes after what
// other threads wrote to it.
__device__ __forceinline__ void complete(const LayerView& view, const ReportView& report) {
  device::st_release_sys(&report.report->call,
                         *const_cast<const volatile std::uint64_t*>(&view.state->call));
}

// Whether the host has read what was deferred before; else the first one stays. One thread asks.
__device__ __forceinline__ bool can_defer(const LayerView& view) {
  return device::ld_acquire_sys(&view.deferred.report->call) == 0;
}

// Some rank wanted more rows than there were: the host's next call throws it. One thread. `wanted`
// [W] is in global or shared memory.
__device__ __forceinline__ void defer_overflow(const LayerView& view, const std::int64_t* wanted,
                                               std::int64_t worst_case_rows) {
  if (!can_defer(view)) return;
  CallReport* report = view.deferred.report;
  report->refused = 0;
  report->overflow = 1;
  report->worst_case_rows = worst_case_rows;
  for (int rank = 0; rank < view.topology.world; ++rank) {
    view.deferred.wanted[rank] = wanted[rank];
  }
  complete(view, view.deferred);
}

}  // namespace winnow::expert_parallel
