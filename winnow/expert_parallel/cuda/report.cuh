// How kernels tell the host something, in pinned memory. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/cuda/wait.cuh"

namespace winnow::expert_parallel {

// Marks a report as complete, so that the host may read it. Called by one thread, after a barrier
// that follows what other threads wrote to it.
__device__ __forceinline__ void complete(const LayerView& view, const ReportView& report) {
  device::st_release_sys(&report.report->call,
                         *const_cast<const volatile std::uint64_t*>(&view.state->call));
}

// Whether an error can be deferred: the host has read the one before; otherwise that one stays.
// Called by one thread.
__device__ __forceinline__ bool can_defer(const LayerView& view) {
  return device::ld_acquire_sys(&view.deferred.report->call) == 0;
}

// Defers to the host's next call the error that some rank wanted more rows than there were. Called
// by one thread. `wanted` [W] is in global or shared memory.
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
