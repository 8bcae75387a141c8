#include "winnow/simulator/instructions/tcgen05.h"

#include <cstddef>
#include <string>

#include "winnow/simulator/instructions/misuse.h"

namespace winnow::simulator {

MatrixDescriptor decode_tcgen05_descriptor(std::uint64_t bits) {
  constexpr const char* kCheck = "matrix descriptor";
  require((bits >> 46 & 7) == 1, kCheck,
          [&] { return "bits 46 to 48 are " + std::to_string(bits >> 46 & 7) + ", not 1"; });
  require((bits >> 52 & 0x1ff) == 0, kCheck,
          [] { return "a bit from 52 to 60 is set, which is 0 in all that the simulator models"; });
  // Of sm_90: none 0, 128 bytes 1, 64 bytes 2, 32 bytes 3, in bits 62 and 63.
  std::uint64_t swizzle = 0;
  switch (bits >> 61) {
    case 0:
      break;
    case 2:
      swizzle = 1;
      break;
    case 4:
      swizzle = 2;
      break;
    case 6:
      swizzle = 3;
      break;
    default:
      throw Misuse(kCheck, "a swizzle of " + std::to_string(bits >> 61) +
                               ", not 0 (none), 2 (128 bytes), 4 (64) or 6 (32)");
  }
  constexpr std::uint64_t kSame = ~(std::uint64_t{7} << 46 | std::uint64_t{7} << 61);
  return decode_matrix_descriptor((bits & kSame) | swizzle << 62);
}

Tcgen05Product decode_instruction_descriptor(std::uint32_t bits, int blocks) {
  constexpr const char* kCheck = "instruction descriptor";
  const auto field = [&](int first, int count) {
    return static_cast<int>(bits >> first & ((1u << count) - 1));
  };
  const auto zero = [&](int first, int count, const char* what) {
    require(field(first, count) == 0, kCheck, [&] {
      return std::string(what) + " (bit " + std::to_string(first) + " and up) is " +
             std::to_string(field(first, count)) + ", not 0";
    });
  };
  zero(0, 2, "the sparsity selector");
  zero(2, 1, "sparsity");
  zero(3, 1, "saturation");
  zero(6, 1, "a reserved bit");
  zero(13, 2, "a negation");
  zero(23, 1, "a reserved bit");
  zero(29, 1, "a reserved bit");
  zero(30, 2, "the shift");
  require(field(4, 2) == 1, kCheck, [] { return "the sums are not f32"; });
  const int a = field(7, 3), b = field(10, 3);
  require(a == b && a <= 1, kCheck, [] { return "the operands are not both f16 or both bf16"; });
  Tcgen05Product product{};
  product.element = a == 1 ? MatrixElement::bf16 : MatrixElement::f16;
  product.major_a = field(15, 1) == 1 ? MatrixMajor::mn : MatrixMajor::k;
  product.major_b = field(16, 1) == 1 ? MatrixMajor::mn : MatrixMajor::k;
  product.n = field(17, 6) * 8;
  product.m = field(24, 5) * 16;
  const int step = blocks == 2 && product.m == 128 ? 32 : 16;
  require(product.m == 128 || (blocks == 2 && product.m == 256), kCheck, [&] {
    return "M is " + std::to_string(product.m) + " with " + std::to_string(blocks) + " blocks";
  });
  require(product.n >= step && product.n <= 256 && product.n % step == 0, kCheck, [&] {
    return "N is " + std::to_string(product.n) + ", not a multiple of " + std::to_string(step) +
           " up to 256";
  });
  return product;
}

TensorPlace tcgen05_place(const Tcgen05Product& product, int blocks, int i, int j) {
  const int rows = product.m / blocks, half = product.n / 2;
  if (rows == 128) return {i / rows, i % rows, j};
  return {i / rows, i % rows + (j < half ? 0 : 64), j % half};
}

int tcgen05_columns(const Tcgen05Product& product, int blocks) {
  return product.m / blocks == 128 ? product.n : product.n / 2;
}

void multiply_tcgen05(int rows, int n, const std::vector<float>& a, const std::vector<float>& b,
                      float* d) {
  const Wgmma part{.n = n, .a = MatrixElement::bf16, .b = MatrixElement::bf16};
  std::vector<float> some(static_cast<std::size_t>(16 * kWgmmaRows));
  for (int first = 0; first < rows; first += kWgmmaRows) {
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < kWgmmaRows; ++row) {
        some[static_cast<std::size_t>(k * kWgmmaRows + row)] =
            a[static_cast<std::size_t>(k * rows + first + row)];
      }
    }
    multiply(part, some, b, d + static_cast<std::ptrdiff_t>(first) * n);
  }
}

}  // namespace winnow::simulator
