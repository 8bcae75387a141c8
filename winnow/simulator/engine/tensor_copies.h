// Copies of boxes of tensors, for the host half of winnow/device/sm90/tensor_copy.cuh.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/simulator/engine.h"
#include "winnow/simulator/instructions/tensor_map.h"

namespace winnow::simulator {

// cp.async.bulk.tensor in its tile mode, to shared memory.
void tensor_load(std::uint32_t destination, const TensorMap& map, std::uint32_t barrier,
                 std::span<const std::int32_t> coordinates, const Where& where);

// The same with cta_group `blocks`, to the blocks of `ranks` (a mask; 0: to the block itself).
void tensor_load_cluster(int blocks, unsigned ranks, std::uint32_t destination,
                         const TensorMap& map, std::uint32_t barrier,
                         std::span<const std::int32_t> coordinates, const Where& where);
// Mode tile::gather4: `coordinates` are the column and four rows.
void tensor_gather4(int blocks, std::uint32_t destination, const TensorMap& map,
                    std::uint32_t barrier, std::span<const std::int32_t, 5> coordinates,
                    const Where& where);

}  // namespace winnow::simulator
