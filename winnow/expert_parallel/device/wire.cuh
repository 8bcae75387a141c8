// How bytes cross from node to node: the interface that kernels are written against, and the wire
// of in_process, whose puts are copies. Device code only.
//
// A Wire is a class with these static functions. Put and signal are called by all threads of a
// block alike and go to a rail peer; puts complete in any order, and a signal comes after all
// earlier puts of its block to that rank. Sources stay as they are until drain().
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/device/view.h"
#include "winnow/expert_parallel/device/wait.cuh"

namespace winnow::expert_parallel {

// By all threads of the block. Multiples of 16 bytes are copied 16 at a time.
__device__ __forceinline__ void copy_by_block(std::byte* to, const std::byte* from,
                                              std::int64_t bytes) {
  const auto misaligned = reinterpret_cast<std::uintptr_t>(to) |
                          reinterpret_cast<std::uintptr_t>(from) | std::uintptr_t(bytes);
  const auto copy = [&]<class Word>(Word) {
    for (std::int64_t i = threadIdx.x; i < bytes / std::int64_t(sizeof(Word)); i += blockDim.x) {
      reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
    }
  };
  if (misaligned % 16 == 0) {
    copy(uint4{});
  } else if (misaligned % 4 == 0) {
    copy(std::uint32_t{});
  } else {
    copy(std::uint8_t{});
  }
}

struct PointerWire {
  // Copies `bytes` at `from`, in this rank's memory, to `offset` of that rank's.
  static __device__ void put(const SymmetricView& memory, int rank, std::int64_t offset,
                             const std::byte* from, std::int64_t bytes) {
    copy_by_block(memory.wire[rank] + offset, from, bytes);
  }
  // The word at `offset` of that rank becomes `value` when what this block put there before is
  // complete.
  static __device__ void signal(const SymmetricView& memory, int rank, std::int64_t offset,
                                std::uint64_t value) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();
    store_release_system(reinterpret_cast<std::uint64_t*>(memory.wire[rank] + offset), value);
  }
  // Until the sources of all earlier puts of this block may be written again.
  static __device__ void drain() { __syncthreads(); }
};

}  // namespace winnow::expert_parallel
