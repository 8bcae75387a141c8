// Host half of winnow/device/common/matrix.cuh.
#pragma once

#include <cstdint>

#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

inline void ldmatrix_x4(std::uint32_t address, std::uint32_t& r0, std::uint32_t& r1,
                        std::uint32_t& r2, std::uint32_t& r3, Where where = Where::current()) {
  std::uint32_t registers[4];
  simulator::ldmatrix_x4(address, registers, false, where);
  r0 = registers[0], r1 = registers[1], r2 = registers[2], r3 = registers[3];
}
inline void ldmatrix_x4_trans(std::uint32_t address, std::uint32_t& r0, std::uint32_t& r1,
                              std::uint32_t& r2, std::uint32_t& r3,
                              Where where = Where::current()) {
  std::uint32_t registers[4];
  simulator::ldmatrix_x4(address, registers, true, where);
  r0 = registers[0], r1 = registers[1], r2 = registers[2], r3 = registers[3];
}

inline std::uint32_t movmatrix_trans(std::uint32_t of_row, Where where = Where::current()) {
  return simulator::movmatrix_trans(of_row, where);
}

}  // namespace winnow::device
