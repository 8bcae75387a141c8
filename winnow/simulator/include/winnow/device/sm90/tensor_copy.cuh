// Host half of winnow/device/sm90/tensor_copy.cuh.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "winnow/simulator/engine/tensor_copies.h"

namespace winnow::device {

using simulator::Where;

inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void tensor_load(std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier,
                        int x, int y, std::uint64_t, Where where = Where::current()) {
  const std::int32_t at[] = {x, y};
  simulator::tensor_load(destination, *map, barrier, at, where);
}
inline void tensor_load(std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier,
                        int x, int y, int z, std::uint64_t, Where where = Where::current()) {
  const std::int32_t at[] = {x, y, z};
  simulator::tensor_load(destination, *map, barrier, at, where);
}

}  // namespace winnow::device
