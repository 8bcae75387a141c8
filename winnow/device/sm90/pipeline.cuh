// The position of a role in a ring of stages in shared memory, and the division of work among
// persistent blocks, for pipelined kernels of sm_90.
#pragma once

#include <cstdint>

namespace winnow::device {

// The stage of a ring that a role uses next, and the parity of that use: a consumer waits for this
// parity of the stage's full barrier, a producer for the other one of its empty barrier.
template <int kStages>
struct PipelineState {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void advance(int stages) {  // at most kStages
    stage += stages;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

// Block b of a grid takes whole items of `tiles` tiles: the items b, b + blocks, and so on. The
// items of an incomplete last round are the tail: their tiles are cut into equal ranges, one for
// each block. A range contains tiles of two items at most.
struct TailRange {
  std::uint32_t first;      // the tail's first item
  std::int64_t begin, end;  // tiles, counted from the first one of `first`
};

__host__ __device__ inline TailRange tail_range(std::uint32_t items, int tiles, std::uint32_t block,
                                                std::uint32_t blocks) {
  const std::uint32_t first = items - items % blocks;
  const std::int64_t all = static_cast<std::int64_t>(items - first) * tiles;
  return {first, all * block / blocks, all * (block + 1) / blocks};
}

}  // namespace winnow::device
