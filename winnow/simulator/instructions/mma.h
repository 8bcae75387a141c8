// mma.sync of a warp, .m16n8k16 with 16-bit operands and f32 sums, on the registers of its lanes.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "winnow/core/dtype.h"

namespace winnow::simulator {

// What a lane gives: registers of A and of B.
struct MmaOperands {
  std::array<std::uint32_t, 4> a;
  std::array<std::uint32_t, 2> b;
};

// The elements of D that a lane has: d += the products, one after the other in f32. `type` is f16
// or bf16.
void mma_m16n8k16(DType type, std::span<const MmaOperands, 32> warp, int lane, float (&d)[4]);

}  // namespace winnow::simulator
