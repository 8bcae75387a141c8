// Stands for CUDA's header in builds for the simulator.
#pragma once

#include <cstdint>

#include "winnow/core/dtype.h"

struct __half {
  std::uint16_t bits;
};
inline float __half2float(__half x) { return winnow::detail::f16_to_f32(x.bits); }
