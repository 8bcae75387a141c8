#include "winnow/simulator/instructions/wgmma.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "winnow/core/dtype.h"
#include "winnow/simulator/instructions/misuse.h"
#include "winnow/simulator/instructions/number_formats.h"

// Products take most of a simulation's time. Sanitizers do not know functions with clones.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WINNOW_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define WINNOW_CLONES
#endif

namespace winnow::simulator {
namespace {

template <class Function>
void for_elements(MatrixElement element, const std::byte* unit, const Function& function) {
  const auto each = [&]<class T>(T, const auto& convert) {
    T values[16 / sizeof(T)];
    std::memcpy(values, unit, 16);
    for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) function(e, convert(values[e]));
  };
  switch (element) {
    case MatrixElement::bf16:
      return each(std::uint16_t{}, winnow::detail::bf16_to_f32);
    case MatrixElement::f16:
      return each(std::uint16_t{}, winnow::detail::f16_to_f32);
    case MatrixElement::tf32:
      return each(std::uint32_t{}, tf32_to_f32);
    case MatrixElement::e4m3:
      return each(std::uint8_t{}, winnow::detail::f8_e4m3_to_f32);
    case MatrixElement::e5m2:
      return each(std::uint8_t{}, f8_e5m2_to_f32);
  }
}

using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));

// Adds to 8 kVectors columns of all rows, of two rows at a time; sums stay in registers along K.
template <int kVectors>
[[gnu::always_inline]] inline void multiply_add(int first, int n, int k, const float* a,
                                                const float* b, float sign, float* d) {
  for (int row = 0; row < kWgmmaRows; row += 2) {
    auto* const upper = reinterpret_cast<Eight*>(d + static_cast<std::ptrdiff_t>(row) * n + first);
    auto* const lower =
        reinterpret_cast<Eight*>(d + static_cast<std::ptrdiff_t>(row + 1) * n + first);
    Eight sums[2][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) sums[0][i] = upper[i], sums[1][i] = lower[i];
#pragma GCC unroll 1
    for (int step = 0; step < k; ++step) {
      const float* const factors = a + step * kWgmmaRows + row;
      const auto* const columns =
          reinterpret_cast<const Eight*>(b + static_cast<std::ptrdiff_t>(step) * n + first);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        sums[0][i] += sign * factors[0] * columns[i];
        sums[1][i] += sign * factors[1] * columns[i];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) upper[i] = sums[0][i], lower[i] = sums[1][i];
  }
}

WINNOW_CLONES
void multiply_add(int n, int k, const float* a, const float* b, float sign, float* d) {
  int column = 0;
  for (; column + 32 <= n; column += 32) multiply_add<4>(column, n, k, a, b, sign, d);
  for (; column < n; column += 8) multiply_add<1>(column, n, k, a, b, sign, d);
}

bool is_f8(MatrixElement element) { return bytes_of(element) == 1; }

}  // namespace

void check_wgmma(const Wgmma& wgmma) {
  constexpr const char* kCheck = "wgmma";
  require(wgmma.n >= 8 && wgmma.n <= 256 && wgmma.n % 8 == 0, kCheck, [&] {
    return "n is " + std::to_string(wgmma.n) + ", which must be a multiple of 8 from 8 to 256";
  });
  require(wgmma.a == wgmma.b || (is_f8(wgmma.a) && is_f8(wgmma.b)), kCheck,
          [] { return "the operands' types differ, and are not both of 8 bits"; });
  require(bytes_of(wgmma.a) == 2 ||
              (wgmma.major_a == MatrixMajor::k && wgmma.major_b == MatrixMajor::k),
          kCheck, [] { return "only operands of 16 bits may be transposed"; });
  for (const int scale : {wgmma.scale_a, wgmma.scale_b}) {
    require(scale == 1 || scale == -1, kCheck,
            [&] { return "a factor of " + std::to_string(scale) + ", not of 1 or -1"; });
  }
}

std::vector<float> read_operand(std::span<const std::byte> shared,
                                std::span<const std::uint32_t> units, MatrixElement element,
                                MatrixMajor major, int rows) {
  const int in_unit = 16 / bytes_of(element);
  std::vector<float> operand(2 * static_cast<std::size_t>(in_unit * rows));
  for (std::size_t i = 0; i < units.size(); ++i) {
    require_inside(units[i], 16, shared.size(), "shared memory");
    const std::byte* const unit = shared.data() + units[i];
    if (major == MatrixMajor::k) {
      float* const to = operand.data() + i % 2 * static_cast<std::size_t>(in_unit * rows) + i / 2;
      for_elements(element, unit, [&](int e, float value) { to[e * rows] = value; });
    } else {
      float* const to = operand.data() + i * static_cast<std::size_t>(in_unit);
      for_elements(element, unit, [&](int e, float value) { to[e] = value; });
    }
  }
  return operand;
}

std::vector<float> read_operand(std::span<const std::uint32_t[4], kWarpgroup> registers,
                                MatrixElement element) {
  const int packed = 4 / bytes_of(element);
  std::vector<float> operand(static_cast<std::size_t>(8 * packed * kWgmmaRows));
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    std::byte bytes[16];
    std::memcpy(bytes, registers[static_cast<std::size_t>(thread)], 16);
    for_elements(element, bytes, [&](int e, float value) {
      const Place place = a_register_place(thread, e / packed, e % packed, packed);
      operand[static_cast<std::size_t>(place.column * kWgmmaRows + place.row)] = value;
    });
  }
  return operand;
}

void multiply(const Wgmma& wgmma, const std::vector<float>& a, const std::vector<float>& b,
              float* d) {
  const std::ptrdiff_t count = static_cast<std::ptrdiff_t>(kWgmmaRows) * wgmma.n;
  if (!wgmma.accumulate) std::fill(d, d + count, 0.0f);
  multiply_add(wgmma.n, wgmma.k(), a.data(), b.data(),
               static_cast<float>(wgmma.scale_a * wgmma.scale_b), d);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    if (d[i] != d[i]) d[i] = std::bit_cast<float>(kCanonicalNan);
  }
}

}  // namespace winnow::simulator
