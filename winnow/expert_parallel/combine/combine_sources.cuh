// Whose tokens a rank has rows of that another rank of its node reduces. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/expert_parallel/combine/combine_kernels_cuda.h"
#include "winnow/expert_parallel/cuda/view.h"

namespace winnow::expert_parallel {

// number % size, of a number below 2 * size.
__device__ __forceinline__ int wrap(int number, int size) {
  return number < size ? number : number - size;
}

// Those of a part by number, from the next rank on: no rank is everyone's first.
class Sources {
 public:
  struct Source {
    int node, local;  // of the tokens' rank; `local` is the reducer's too
  };
  __device__ Sources(const CudaTopology& topology, Part part)
      : topology_(topology),
        part_(part),
        mates_(std::uint32_t(topology.locals - 1)),
        by_mate_(max(1u, mates_)) {}

  __device__ std::uint32_t count() const {
    return part_ == kOwn ? mates_ : mates_ * std::uint32_t(topology_.nodes - 1);
  }
  __device__ Source at(std::uint32_t i) const {
    const device::FastDivmod::Result mate = by_mate_.divide(i);
    const int local = wrap(topology_.local + 1 + int(mate.remainder), topology_.locals);
    if (part_ == kOwn) return {topology_.node, local};
    return {wrap(topology_.node + 1 + int(mate.quotient), topology_.nodes), local};
  }

 private:
  const CudaTopology& topology_;
  Part part_;
  std::uint32_t mates_;
  device::FastDivmod by_mate_;
};

}  // namespace winnow::expert_parallel
