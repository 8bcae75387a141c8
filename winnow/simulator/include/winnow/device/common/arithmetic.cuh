// Host half of winnow/device/common/arithmetic.cuh.
#pragma once

#include <cstdint>

#include "winnow/simulator/instructions/number_formats.h"

namespace winnow::device {

inline float ex2(float x) { return simulator::ex2_approx_ftz(x); }
inline float relu(float x) { return simulator::max_nan(x, 0.0f); }
inline std::uint32_t pack_bf16(float low, float high) {
  return simulator::cvt_rn_bf16x2(high, low);
}

}  // namespace winnow::device
