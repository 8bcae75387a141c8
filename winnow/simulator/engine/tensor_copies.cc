#include "winnow/simulator/engine/tensor_copies.h"

#include <vector>

namespace winnow::simulator {

void tensor_load(std::uint32_t destination, const TensorMap& map, std::uint32_t barrier,
                 std::span<const std::int32_t> coordinates, const Where& where) {
  std::vector<CopyPiece> pieces;
  const std::uint32_t bytes = checked(where, [&] {
    for (const BoxUnit& unit : box_units(map, coordinates, destination)) {
      pieces.push_back({unit.shared, 16, unit.skip, unit.bytes, unit.global});
    }
    return box_bytes(map);
  });
  bulk_load("cp.async.bulk.tensor", pieces.data(), pieces.size(), bytes, barrier, where);
}

}  // namespace winnow::simulator
