// How bytes cross from node to node: the interface that kernels are written against, and the fabric
// of in_process, whose puts are copies. Device code only.
//
// A fabric is a class with these static functions. Put and signal are called by all threads of a
// block alike and go to a rail peer; puts complete in any order, and a signal comes after all
// earlier puts of its block to that rank. Sources must lie in symmetric memory where
// kRegisteredSources says so, and stay as they are until the peer has told that it has them, or
// until quiet(): one thread of a later kernel waits there for all puts of earlier ones. Where
// kNeedsQuiet is false puts are complete when their kernel has ended, and there is no quiet().
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/cuda/wait.cuh"

namespace winnow::expert_parallel {

// The same bytes to to_of(0), ..., to_of(count - 1). By all threads of the block, in the widest
// words that everything is a multiple of.
template <class Word, class ToOf>
__device__ void copy_words(int count, const ToOf& to_of, const std::byte* from,
                           std::int64_t bytes) {
  constexpr int kAtOnce = 4;  // loads under way in a thread
  const auto* source = reinterpret_cast<const Word*>(from);
  const std::int64_t words = bytes / std::int64_t(sizeof(Word)), step = blockDim.x;
  for (std::int64_t first = threadIdx.x; first < words; first += kAtOnce * step) {
    Word word[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * step < words) word[i] = source[first + i * step];
    }
    for (int to = 0; to < count; ++to) {
      auto* destination = reinterpret_cast<Word*>(to_of(to));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * step < words) destination[first + i * step] = word[i];
      }
    }
  }
}
template <class ToOf>
__device__ void copy_to_each(int count, const ToOf& to_of, const std::byte* from,
                             std::int64_t bytes) {
  auto multiple = reinterpret_cast<std::uintptr_t>(from) | std::uintptr_t(bytes);
  for (int to = 0; to < count; ++to) multiple |= reinterpret_cast<std::uintptr_t>(to_of(to));
  if (multiple % 16 == 0) return copy_words<uint4>(count, to_of, from, bytes);
  if (multiple % 4 == 0) return copy_words<std::uint32_t>(count, to_of, from, bytes);
  copy_words<std::uint8_t>(count, to_of, from, bytes);
}
__device__ inline void copy_by_block(std::byte* to, const std::byte* from, std::int64_t bytes) {
  copy_to_each(1, [&](int) { return to; }, from, bytes);
}

struct PointerFabric {
  static constexpr bool kRegisteredSources = false, kNeedsQuiet = false;
  // Copies `bytes` at `from`, in this rank's memory, to `offset` of that rank's.
  static __device__ void put(const SymmetricView& memory, int rank, std::int64_t offset,
                             const std::byte* from, std::int64_t bytes) {
    copy_by_block(memory.peers[rank] + offset, from, bytes);
  }
  // The word at `offset` of that rank becomes `value` when what this block put there before is
  // complete.
  static __device__ void signal(const SymmetricView& memory, int rank, std::int64_t offset,
                                std::uint64_t value) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();
    device::st_release_sys(reinterpret_cast<std::uint64_t*>(memory.peers[rank] + offset), value);
  }
};

}  // namespace winnow::expert_parallel
