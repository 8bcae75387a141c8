// Host half of winnow/device/sm80/mma.cuh.
#pragma once

#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

template <DType kType>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                  Where where = Where::current()) {
  static_assert(kType == DType::f16 || kType == DType::bf16);
  simulator::mma_m16n8k16(kType, d, a, {b0, b1}, where);
}

}  // namespace winnow::device
