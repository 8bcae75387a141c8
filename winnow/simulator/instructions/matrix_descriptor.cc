#include "winnow/simulator/instructions/matrix_descriptor.h"

#include <cstddef>
#include <string>

#include "winnow/simulator/instructions/misuse.h"

namespace winnow::simulator {
namespace {

constexpr const char* kCheck = "matrix descriptor";

constexpr std::uint32_t field(std::uint64_t bits, int first, int count) {
  return static_cast<std::uint32_t>(bits >> first & ((std::uint64_t{1} << count) - 1));
}

// Bits 14-15, 30-31, 46-48 and 52-61.
constexpr std::uint64_t kUnusedBits = std::uint64_t{3} << 14 | std::uint64_t{3} << 30 |
                                      std::uint64_t{7} << 46 | std::uint64_t{0x3ff} << 52;

}  // namespace

MatrixDescriptor decode_matrix_descriptor(std::uint64_t bits) {
  for (int bit = 0; bit < 64; ++bit) {
    require((bits & kUnusedBits & std::uint64_t{1} << bit) == 0, kCheck,
            [&] { return "bit " + std::to_string(bit) + " is set, which has no meaning"; });
  }
  constexpr int kWidth[] = {16, 128, 64, 32};
  MatrixDescriptor descriptor{};
  descriptor.start = field(bits, 0, 14) << 4;
  descriptor.leading = field(bits, 16, 14) << 4;
  descriptor.stride = field(bits, 32, 14) << 4;
  descriptor.base_offset = static_cast<int>(field(bits, 49, 3));
  descriptor.width = kWidth[field(bits, 62, 2)];
  const int rows = descriptor.pattern_rows(), row = static_cast<int>(descriptor.start >> 7);
  require(descriptor.base_offset == 0 || rows > 1, kCheck,
          [] { return "a base offset without a swizzle"; });
  require((row - descriptor.base_offset) % rows == 0, kCheck, [&] {
    return "the start " + std::to_string(descriptor.start) + " is in row " +
           std::to_string(row % rows) + " of the pattern of the " +
           std::to_string(descriptor.width) + "-byte swizzle, and the base offset is " +
           std::to_string(descriptor.base_offset);
  });
  return descriptor;
}

std::uint32_t swizzled(std::uint32_t address, int width, int base_offset) {
  const auto mask = static_cast<std::uint32_t>(width / 16 - 1);
  const std::uint32_t row = (address >> 7) - static_cast<std::uint32_t>(base_offset);
  return address ^ (row & mask) << 4;
}

std::vector<std::uint32_t> operand_units(const MatrixDescriptor& descriptor, MatrixMajor major,
                                         int rows) {
  const auto width = static_cast<std::uint32_t>(descriptor.width);
  const bool plain = width == 16;
  std::vector<std::uint32_t> units;
  const auto add = [&](std::uint32_t offset) {
    units.push_back(swizzled(descriptor.start + offset, descriptor.width, descriptor.base_offset));
  };
  if (major == MatrixMajor::k) {
    const std::uint32_t second = plain ? descriptor.leading : 16;
    units.reserve(2 * static_cast<std::size_t>(rows));
    for (std::uint32_t row = 0; row < static_cast<std::uint32_t>(rows); ++row) {
      const std::uint32_t offset = row / 8 * descriptor.stride + row % 8 * width;
      add(offset);
      add(offset + second);
    }
    return units;
  }
  constexpr std::uint32_t kSteps = 16;
  const std::uint32_t next_steps = plain ? descriptor.leading : descriptor.stride;
  const std::uint32_t next_width = plain ? descriptor.stride : descriptor.leading;
  units.reserve(kSteps * static_cast<std::size_t>(rows) / 8);
  for (std::uint32_t k = 0; k < kSteps; ++k) {
    for (std::uint32_t unit = 0; unit < static_cast<std::uint32_t>(rows) / 8; ++unit) {
      add(k / 8 * next_steps + k % 8 * width + unit * 16 / width * next_width + unit * 16 % width);
    }
  }
  return units;
}

}  // namespace winnow::simulator
