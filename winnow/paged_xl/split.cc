#include "winnow/paged_xl/split.h"

namespace winnow::paged_xl {

std::string to_string(const Split& split) {
  return std::to_string(split.tiles) + " tiles x " + std::to_string(split.heads) +
         " heads, parts of " + std::to_string(split.part_tiles) + " tiles, " +
         std::to_string(split.blocks) + (split.blocks == 1 ? " block" : " blocks");
}

std::string describe_one_sequence(std::int64_t heads, int passes, const Machine& machine) {
  const int blocks = blocks_of_head(1, heads, passes, machine);
  if (blocks == 0) return "a plan";
  return std::to_string(blocks) + " blocks for each of " + std::to_string(heads) + " heads" +
         (passes > 1 ? " in " + std::to_string(passes) + " passes" : "");
}

}  // namespace winnow::paged_xl
