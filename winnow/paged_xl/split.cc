#include "winnow/paged_xl/split.h"

namespace winnow::paged_xl {

std::string to_string(const Split& split) {
  return std::to_string(split.tiles) + " tiles x " + std::to_string(split.heads) +
         " heads, parts of " + std::to_string(split.part_tiles) + " tiles, " +
         std::to_string(split.blocks) + (split.blocks == 1 ? " block" : " blocks");
}

}  // namespace winnow::paged_xl
