#include "winnow/simulator/instructions/mma.h"

#include <bit>

namespace winnow::simulator {
namespace {

float element(DType type, std::uint32_t word, bool upper) {
  const auto bits = static_cast<std::uint16_t>(upper ? word >> 16 : word);
  return type == DType::f16 ? winnow::detail::f16_to_f32(bits)
                            : std::bit_cast<float>(std::uint32_t{bits} << 16);
}

}  // namespace

void mma_m16n8k16(DType type, std::span<const MmaOperands, 32> warp, int lane, float (&d)[4]) {
  // Element (row, k) of A is in lane 4 (row % 8) + k % 8 / 2, register row / 8 + 2 (k / 8); element
  // (k, column) of B in lane 4 column + k % 8 / 2, register k / 8; the upper half if k is odd.
  float a[2][16], b[2][16];
  for (int k = 0; k < 16; ++k) {
    const int quad = k % 8 / 2, half = k / 8;
    for (int i = 0; i < 2; ++i) {
      const auto of_a = static_cast<std::size_t>(lane / 4 * 4 + quad);
      const auto of_b = static_cast<std::size_t>((lane % 4 * 2 + i) * 4 + quad);
      a[i][k] = element(type, warp[of_a].a[static_cast<std::size_t>(i + 2 * half)], k % 2 != 0);
      b[i][k] = element(type, warp[of_b].b[static_cast<std::size_t>(half)], k % 2 != 0);
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) d[i] += a[i / 2][k] * b[i % 2][k];
  }
}

}  // namespace winnow::simulator
