#include "winnow/paged_xl/split.h"

namespace winnow::paged_xl {

std::string to_string(const Split& split) {
  const Stretches stretches = split.stretches(0);
  std::string text = std::to_string(split.tiles) + " tiles x " + std::to_string(split.kv_heads) +
                     " heads, " + std::to_string(split.phases) +
                     (split.phases == 1 ? " phase" : " phases") + ", " +
                     std::to_string(split.blocks) + (split.blocks == 1 ? " block" : " blocks") +
                     " of " + std::to_string(stretches.each);
  if (stretches.longer > 0) text += " or " + std::to_string(stretches.each + 1);
  return text + " tiles";
}

}  // namespace winnow::paged_xl
