// How the tokens of one decode step are dealt out to the warps of a GPU. Internal; host and device.
//
// The unit of a context is a tile of a few neighbouring tokens. Contexts are cut into parts of some
// tiles, counted from their ends, and one warp handles one part for one cached head (or for the
// query heads that share it). All parts stand in one line: head by head, then part by part, then
// sequence by sequence, so that neighbours in the line are at the same distances and read the same
// rows of r. A thread block takes a stretch of the line, all of about as many tiles whatever the
// lengths are, and its warps take the parts of the stretch in turn. The lengths are needed where
// the plan is made, which is on the device.
#pragma once

#include <cstdint>
#include <string>

#include "winnow/core/export.h"
#include "winnow/core/host_device.h"

namespace winnow::paged_xl {

// What is known on the host.
struct Machine {
  int blocks = 1;              // thread blocks that run at the same time
  int warps = 1;               // of a block
  std::int64_t max_parts = 1;  // that the workspace holds, of all heads
  bool fused = false;
};

// What the lengths of a step come to.
struct StepWork {
  std::int64_t tiles = 0;  // of all sequences, of one cached head
  int longest = 0;         // tokens
};

struct Split {
  std::int64_t tiles = 0;  // StepWork::tiles
  int heads = 0;           // cached heads
  int blocks = 1;
  int part_tiles = 1;  // tiles of a part but for the one that begins a context

  WINNOW_HOST_DEVICE std::int64_t line() const { return tiles * heads; }
  // Parts whose first tile lies in [begin(block), begin(block + 1)) of the line are the block's.
  WINNOW_HOST_DEVICE std::int64_t begin(int block) const {
    const std::int64_t each = line() / blocks, left = line() - each * blocks;
    return block * each + (block < left ? block : left);
  }
  WINNOW_HOST_DEVICE int parts_of(int context_tiles) const {
    return context_tiles / part_tiles + (context_tiles % part_tiles != 0);
  }
  // Tiles of part `part` of a context: 0 if there is no such part.
  WINNOW_HOST_DEVICE int tiles_in(int context_tiles, int part) const {
    if (part >= parts_of(context_tiles)) return 0;
    const int left = context_tiles - part * part_tiles;
    return left < part_tiles ? left : part_tiles;
  }
};

inline constexpr int kLeastPart = 4;     // tiles: a part costs about as much as one
inline constexpr int kEnoughPart = 64;   // its start does not show
inline constexpr int kFusedPart = 8;     // its rows of r stay in an L1 cache
inline constexpr int kPartsPerWarp = 4;  // so that warps finish at about the same time

// Parts are as long as leaves every warp several, within limits, and no more than there is room
// for. `passes`: over the query heads of a cached head.
WINNOW_HOST_DEVICE inline Split plan_split(const StepWork& work, int num_seqs, int heads,
                                           int passes, const Machine& machine) {
  Split split;
  split.tiles = work.tiles;
  split.heads = heads;
  split.blocks = machine.blocks;
  const std::int64_t warps = std::int64_t{machine.blocks} * machine.warps;
  const std::int64_t tiles = work.tiles * heads * passes;
  split.part_tiles = kLeastPart;
  const int enough = machine.fused ? kFusedPart : kEnoughPart;
  while (split.part_tiles < enough && tiles > kPartsPerWarp * warps * split.part_tiles) {
    split.part_tiles *= 2;
  }
  // A context has one part more than whole ones at most.
  while ((work.tiles + std::int64_t{num_seqs} * split.part_tiles) * heads * passes >
             machine.max_parts * split.part_tiles &&
         split.part_tiles < 1 << 29) {
    split.part_tiles *= 2;
  }
  return split;
}

// One sequence alone needs no plan, and so nothing waits for its length: of the thread blocks that
// run at the same time each head gets so many, and their warps take its tiles in turn. 0: plan.
inline constexpr int kMostOfHead = 32;
inline int blocks_of_head(int num_seqs, std::int64_t heads, int passes, const Machine& machine) {
  if (num_seqs != 1) return 0;
  const std::int64_t each = machine.blocks / (heads * passes);
  const int blocks = static_cast<int>(each < kMostOfHead ? each : kMostOfHead);
  const bool enough = blocks > 1 && 4 * blocks * heads * passes >= 3 * machine.blocks;
  return enough ? blocks : 0;
}

// "8 blocks for each of 16 heads", or "a plan".
WINNOW_EXPORT std::string describe_one_sequence(std::int64_t heads, int passes,
                                                const Machine& machine);

// "16384 tiles x 16 heads, parts of 16 tiles, 132 blocks".
WINNOW_EXPORT std::string to_string(const Split& split);

}  // namespace winnow::paged_xl
