// Host half of winnow/device/sm100/tensor_copy.cuh.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "winnow/simulator/engine/tensor_copies.h"

namespace winnow::device {

using simulator::Where;

inline void tensor_load_pair(std::uint32_t destination, const CUtensorMap* map,
                             std::uint32_t barrier, int x, int y, std::uint64_t,
                             Where where = Where::current()) {
  const std::int32_t at[] = {x, y};
  simulator::tensor_load_cluster(2, 0, destination, *map, barrier, at, where);
}
inline void tensor_load_pair(std::uint32_t destination, const CUtensorMap* map,
                             std::uint32_t barrier, int x, int y, int z, std::uint64_t,
                             Where where = Where::current()) {
  const std::int32_t at[] = {x, y, z};
  simulator::tensor_load_cluster(2, 0, destination, *map, barrier, at, where);
}
inline void tensor_load_pair_multicast(std::uint32_t destination, const CUtensorMap* map,
                                       std::uint32_t barrier, int x, int y, std::uint16_t ranks,
                                       Where where = Where::current()) {
  const std::int32_t at[] = {x, y};
  simulator::tensor_load_cluster(2, ranks, destination, *map, barrier, at, where);
}
inline void tensor_gather4_pair(std::uint32_t destination, const CUtensorMap* map,
                                std::uint32_t barrier, int x, int4 rows, std::uint64_t,
                                Where where = Where::current()) {
  const std::int32_t at[] = {x, rows.x, rows.y, rows.z, rows.w};
  simulator::tensor_gather4(2, destination, *map, barrier, at, where);
}

}  // namespace winnow::device
