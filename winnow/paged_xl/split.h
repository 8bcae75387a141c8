// How the tokens of one decode step are dealt out to thread blocks. Internal; host and device.
//
// The unit of work is a tile: a few neighbouring tokens of one sequence, for one cached head (or
// for the query heads that share it). All tiles of a step stand in one line, sequence by sequence
// and head by head, and each thread block takes one stretch of the line, all about equally long.
// So the balance does not depend on the lengths, and only where a stretch begins or ends inside a
// context does a partial result have to be merged: at most two per block, however long the
// contexts are. The lengths are needed where the stretches are computed, which is on the device.
#pragma once

#include <cstdint>
#include <string>

#include "winnow/core/export.h"

#ifdef __CUDACC__
#define WINNOW_HOST_DEVICE __host__ __device__
#else
#define WINNOW_HOST_DEVICE
#endif

namespace winnow::paged_xl {

// What is known on the host.
struct Machine {
  int blocks = 1;             // thread blocks that run at the same time, per pass
  int min_tiles = 1;          // below which a block is not worth its start
  std::int64_t r_budget = 0;  // bytes of r that should be in use at a time; 0: any
};

// What the lengths of a step come to.
struct StepWork {
  std::int64_t tiles = 0;    // of all sequences, of one cached head
  std::int64_t longest = 0;  // tokens
};

// A line of tiles cut into stretches whose lengths differ by one at most.
struct Stretches {
  std::int64_t each = 0, longer = 0;  // the first `longer` stretches have one tile more
  int blocks = 1;

  WINNOW_HOST_DEVICE std::int64_t tiles() const { return each * blocks + longer; }
  WINNOW_HOST_DEVICE std::int64_t begin(std::int64_t block) const {
    return block * each + (block < longer ? block : longer);
  }
  // The block whose stretch holds a tile of the line.
  WINNOW_HOST_DEVICE int owner(std::int64_t tile) const {
    const std::int64_t in_longer = longer * (each + 1);
    if (tile < in_longer) return static_cast<int>(tile / (each + 1));
    return static_cast<int>(longer + (tile - in_longer) / each);
  }
};

// The plan of a step. In fused mode all sequences read the same rows of r: heads are then taken in
// phases, one after the other, so that the rows of a phase stay in the L2 cache.
struct Split {
  std::int64_t tiles = 0;  // StepWork::tiles
  int kv_heads = 0, heads_per_phase = 1, phases = 1, blocks = 1;

  WINNOW_HOST_DEVICE int first_head(int phase) const { return phase * heads_per_phase; }
  WINNOW_HOST_DEVICE int heads(int phase) const {
    const int left = kv_heads - first_head(phase);
    return left < heads_per_phase ? left : heads_per_phase;
  }
  WINNOW_HOST_DEVICE Stretches stretches(int phase) const {
    const std::int64_t line = tiles * heads(phase);
    return {line / blocks, line % blocks, blocks};
  }
};

// `r_bytes_per_token`: of all heads of a pass; 0 in plain mode.
WINNOW_HOST_DEVICE inline Split plan_split(const StepWork& work, std::int64_t num_seqs,
                                           int kv_heads, std::int64_t r_bytes_per_token,
                                           const Machine& machine) {
  Split split;
  split.tiles = work.tiles;
  split.kv_heads = kv_heads;
  split.heads_per_phase = kv_heads;
  const std::int64_t r_bytes = r_bytes_per_token * work.longest;
  // A single sequence reads each row of r once.
  if (num_seqs > 1 && machine.r_budget > 0 && r_bytes > machine.r_budget) {
    const std::int64_t fitting = kv_heads * machine.r_budget / r_bytes;
    split.heads_per_phase = fitting < 1 ? 1 : static_cast<int>(fitting);
  }
  split.phases = (kv_heads + split.heads_per_phase - 1) / split.heads_per_phase;
  const std::int64_t worth = work.tiles * split.heads_per_phase / machine.min_tiles;
  split.blocks = worth < 1 ? 1 : worth < machine.blocks ? static_cast<int>(worth) : machine.blocks;
  return split;
}

// "16384 tiles x 16 heads, 1 phase, 528 blocks of 496 or 497 tiles".
WINNOW_EXPORT std::string to_string(const Split& split);

}  // namespace winnow::paged_xl
