// What kernels read of a LayerView. Device code only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"

namespace winnow::expert_parallel {

// A kernel that runs before the exchange begins with `if (broken(view)) return;`.
__device__ __forceinline__ bool broken(const LayerView& view) {
  return *const_cast<const volatile std::uint32_t*>(&view.state->broken) != 0;
}
// A kernel that runs after the exchange begins with `if (!runs(view)) return;`.
__device__ __forceinline__ bool runs(const LayerView& view) {
  const volatile CudaState* state = view.state;
  return state->broken == 0 && state->refused == 0;
}
// The epoch of this call (after its exchange kernel).
__device__ __forceinline__ std::uint64_t epoch_of(const LayerView& view) {
  return *const_cast<const volatile std::uint64_t*>(&view.state->epoch);
}
// The address of an extent from the header of a rank of this node.
__device__ __forceinline__ std::byte* at_extent(const LayerView& view, int local,
                                                const Extent& extent) {
  return view.segments[(extent.segment % kMaxSegments) * view.topology.locals + local] +
         extent.offset;
}

}  // namespace winnow::expert_parallel
