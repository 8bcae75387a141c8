// Host half of winnow/device/common/registers.cuh.
#pragma once

#include <cstdint>

#include "winnow/simulator/engine.h"

namespace winnow::device {

inline std::uint64_t globaltimer() { return simulator::clock_ticks(); }
inline std::uint32_t forget(std::uint32_t value) { return value; }
inline const char* forget(const char* address) { return address; }
inline std::uint32_t keep_in_register(std::uint32_t value) { return value; }

}  // namespace winnow::device
