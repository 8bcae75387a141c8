#include "winnow/simulator/engine/tensor_copies.h"

#include <vector>

namespace winnow::simulator {

namespace {
struct Pieces {
  std::vector<CopyPiece> pieces;
  std::uint32_t bytes;
};
Pieces pieces_of(const TensorMap& map, std::span<const std::int32_t> coordinates,
                 std::uint32_t destination, const Where& where) {
  Pieces all;
  checked(where, [&] {
    for (const BoxUnit& unit : box_units(map, coordinates, destination)) {
      all.pieces.push_back({unit.shared, 16, unit.skip, unit.bytes, unit.global});
    }
    all.bytes = box_bytes(map);
  });
  return all;
}
}  // namespace

void tensor_load(std::uint32_t destination, const TensorMap& map, std::uint32_t barrier,
                 std::span<const std::int32_t> coordinates, const Where& where) {
  const Pieces all = pieces_of(map, coordinates, destination, where);
  bulk_load("cp.async.bulk.tensor", all.pieces.data(), all.pieces.size(), all.bytes, barrier,
            where);
}

void tensor_load_cluster(int blocks, unsigned ranks, std::uint32_t destination,
                         const TensorMap& map, std::uint32_t barrier,
                         std::span<const std::int32_t> coordinates, const Where& where) {
  const Pieces all = pieces_of(map, coordinates, destination, where);
  bulk_load_cluster("cp.async.bulk.tensor", all.pieces.data(), all.pieces.size(),
                    ranks == 0 ? 1u << cluster_rank() : ranks, all.bytes, barrier, blocks, where);
}

void tensor_gather4(int blocks, std::uint32_t destination, const TensorMap& map,
                    std::uint32_t barrier, std::span<const std::int32_t, 5> coordinates,
                    const Where& where) {
  std::vector<CopyPiece> pieces;
  const std::uint32_t bytes = checked(where, [&] {
    for (const BoxUnit& unit : gather4_units(map, coordinates, destination)) {
      pieces.push_back({unit.shared, 16, unit.skip, unit.bytes, unit.global});
    }
    return 4 * box_bytes(map);
  });
  bulk_load_cluster("cp.async.bulk.tensor.tile::gather4", pieces.data(), pieces.size(),
                    1u << cluster_rank(), bytes, barrier, blocks, where);
}

}  // namespace winnow::simulator
