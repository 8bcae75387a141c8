// Conformance on sm100. Every layout is written out here element by element, as the PTX document
// defines it, and each product is one of integers, whose sums are exact: an element that is read or
// stored at a wrong place shows.
#include "winnow/simulator/conformance_sm100.h"

#include <cstring>
#include <string>
#include <tuple>

#include <cuda_runtime.h>

#include "winnow/device/sm100/operand.cuh"
#include "winnow/simulator/conformance_test.h"

namespace winnow::conformance {
namespace {

class ConformanceSm100 : public Conformance {
 protected:
  void SetUp() override {
#ifdef WINNOW_CONFORMANCE_ON_GPU
    for (const BackendStatus& status : backends()) {
      if (status.backend == Backend::sm100 && !status.supported) GTEST_SKIP() << status.reason;
    }
#endif
  }
};

enum class Operand { k, mn, mn64 };
const char* name(Operand operand) {
  return operand == Operand::k ? "K" : operand == Operand::mn ? "MN" : "MN64";
}

constexpr std::uint32_t kLeading128 = 8192, kLeading64 = 1024;

// Byte at which element k of row `row` of M or N stands.
std::size_t place(Operand operand, std::size_t row, std::size_t k) {
  switch (operand) {
    case Operand::k:
      return row * 128 + ((k / 8) ^ (row % 8)) * 16 + k % 8 * 2;
    case Operand::mn:
      return row / 64 * kLeading128 + k * 128 + ((row % 64 / 8) ^ (k % 8)) * 16 + row % 8 * 2;
    case Operand::mn64: {  // two steps of K to 128 bytes
      const std::size_t half = k % 2 * 4 + row % 32 / 8;
      return row / 32 * kLeading64 + k / 2 * 128 + (half ^ (k / 2 % 4)) * 16 + row % 8 * 2;
    }
  }
  return 0;
}
std::uint64_t describe(Operand operand, std::uint32_t start) {
  switch (operand) {
    case Operand::k:
      return device::tcgen05_k_major(start);
    case Operand::mn:
      return device::tcgen05_mn_major(start, kLeading128);
    case Operand::mn64:
      return device::tcgen05_mn_major_64(start, kLeading64);
  }
  return 0;
}

constexpr std::size_t kBegin[] = {0, 16384};  // of A and of B in a block's memory

struct Shape {
  int blocks, m, n;
};
using Case = std::tuple<Shape, Operand, Operand, bool>;  // bool: one-hot rows of A
class Products : public ConformanceSm100, public ::testing::WithParamInterface<Case> {};

TEST_P(Products, StandWhereTheDocumentSays) {
  const auto [shape, layout_a, layout_b, one_hot] = GetParam();
  const auto blocks = static_cast<std::size_t>(shape.blocks), m = static_cast<std::size_t>(shape.m),
             n = static_cast<std::size_t>(shape.n);
  std::mt19937 random(7);
  std::vector<float> a(m * 16), b(n * 16);
  for (float& x : a) x = static_cast<float>(static_cast<int>(random() % 17) - 8);
  for (float& x : b) x = static_cast<float>(static_cast<int>(random() % 255) - 127);
  if (one_hot) {
    for (std::size_t i = 0; i < m; ++i) {
      for (std::size_t k = 0; k < 16; ++k) a[i * 16 + k] = k == (i * 7 + i / 16) % 16 ? 1.0f : 0.0f;
    }
  }
  Words in(kProductWords + blocks * kOperandWords);
  const std::uint64_t described[] = {describe(layout_a, kBegin[0]), describe(layout_b, kBegin[1])};
  std::memcpy(in.data(), described, sizeof(described));
  const auto major = [](Operand operand) {
    return operand == Operand::k ? device::Major::K : device::Major::MN;
  };
  in[4] = device::tcgen05_bf16(shape.m, shape.n, major(layout_a), major(layout_b));
  const auto put = [&](std::size_t block, std::size_t operand, Operand layout, std::size_t row,
                       std::size_t k, float value) {
    const std::uint16_t bf16 =
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    auto* const bytes = reinterpret_cast<std::byte*>(&in[kProductWords + block * kOperandWords]);
    std::memcpy(bytes + kBegin[operand] + place(layout, row, k), &bf16, 2);
  };
  for (std::size_t k = 0; k < 16; ++k) {
    for (std::size_t i = 0; i < m; ++i) {
      put(i / (m / blocks), 0, layout_a, i % (m / blocks), k, a[i * 16 + k]);
    }
    for (std::size_t j = 0; j < n; ++j) {
      put(j / (n / blocks), 1, layout_b, j % (n / blocks), k, b[j * 16 + k]);
    }
  }
  const Words out = run(shape.blocks == 1 ? launch_product_1 : launch_product_2, in,
                        blocks * 128 * kTensorColumns);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::size_t k = 0; k < 16; ++k) sum += a[i * 16 + k] * b[j * 16 + k];
      std::size_t block = i / (m / blocks), lane = i % (m / blocks), column = j;
      if (m / blocks == 64) lane += j < n / 2 ? 0 : 64, column = j % (n / 2);
      ASSERT_EQ(number(out[(block * 128 + lane) * kTensorColumns + column]), 2 * sum)
          << "row " << i << ", column " << j;
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<Case>& tested) {
  const auto& [shape, a, b, one_hot] = tested.param;
  return "Blocks" + std::to_string(shape.blocks) + "M" + std::to_string(shape.m) + "N" +
         std::to_string(shape.n) + name(a) + "by" + name(b) + (one_hot ? "OneHot" : "Random");
}

const Shape kShapes[] = {{1, 128, 64},  {1, 128, 128}, {1, 128, 256}, {2, 128, 64}, {2, 128, 128},
                         {2, 128, 256}, {2, 256, 64},  {2, 256, 128}, {2, 256, 256}};
INSTANTIATE_TEST_SUITE_P(
    All, Products,
    ::testing::Combine(::testing::ValuesIn(kShapes), ::testing::Values(Operand::k, Operand::mn),
                       ::testing::Values(Operand::k, Operand::mn, Operand::mn64),
                       ::testing::Bool()),
    name_of);

TEST_F(ConformanceSm100, TensorMemoryMoves) {
  const Words in = random_words(4096, 31), out = run(launch_tensor_moves, in, 8192);
  for (std::size_t i = 0; i < 4096; ++i) ASSERT_EQ(out[i], in[i]) << i;
  for (std::size_t group = 0; group < 8; ++group) {
    for (std::size_t thread = 0; thread < 32; ++thread) {
      for (std::size_t i = 0; i < 16; ++i) {
        const std::size_t lane = group * 16 + thread / 4 + (i % 4 < 2 ? 0 : 8);
        const std::size_t column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        ASSERT_EQ(out[4096 + (group * 32 + thread) * 16 + i], in[lane * 32 + column])
            << group << ", " << thread << ", " << i;
      }
    }
  }
}

TEST_F(ConformanceSm100, CopiesToTensorMemory) {
  const Words in = random_words(2048, 32), out = run(launch_tensor_copy, in, 2048);
  for (std::size_t block = 0; block < 2; ++block) {
    for (std::size_t lane = 0; lane < 128; ++lane) {
      for (std::size_t column = 0; column < 8; ++column) {
        const std::size_t from = lane / 8 * 64 + column / 4 * 32 + lane % 8 * 4 + column % 4;
        ASSERT_EQ(out[(block * 128 + lane) * 8 + column], in[block * 1024 + from])
            << block << ", " << lane << ", " << column;
      }
    }
  }
}

TEST_F(ConformanceSm100, GathersAndMulticasts) {
  for (const std::uint32_t x : {0u, 16u, 64u}) {
    Words in = random_words(kGatherRows * kGatherStride / 4, 33);
    const int rows[2][4] = {{5, 0, -1, 36}, {37, 7, 7, 12}};
    for (const auto& four : rows) {
      for (const int row : four) in.push_back(static_cast<std::uint32_t>(row));
    }
    in.push_back(x);
    const Words out = run(launch_gather, in, 2 * kGatherWords);
    const auto* const tensor = reinterpret_cast<const std::uint8_t*>(in.data());
    const auto expected = [&](int row, std::size_t byte) {
      if (row < 0 || row >= kGatherRows || byte >= 2 * kGatherColumns) return std::uint8_t{0};
      return tensor[static_cast<std::size_t>(row) * kGatherStride + byte];
    };
    for (std::size_t block = 0; block < 2; ++block) {
      const auto* const got = reinterpret_cast<const std::uint8_t*>(&out[block * kGatherWords]);
      for (std::size_t row = 0; row < 4; ++row) {
        for (std::size_t byte = 0; byte < 128; ++byte) {
          const std::size_t at = row * 128 + ((byte / 16) ^ row) * 16 + byte % 16;
          ASSERT_EQ(got[at], expected(rows[block][row], 2 * x + byte)) << block << row << byte;
        }
        for (std::size_t byte = 0; byte < 64; ++byte) {
          const std::size_t unit = row % 2 * 4 + byte / 16;
          const std::size_t at = 512 + row / 2 * 128 + (unit ^ (row / 2)) * 16 + byte % 16;
          ASSERT_EQ(got[at], expected(rows[block][row], 2 * x + byte)) << block << row << byte;
        }
      }
      for (std::size_t row = 0; row < 8; ++row) {
        for (std::size_t byte = 0; byte < 128; ++byte) {
          const std::size_t at = 768 + row * 128 + ((byte / 16) ^ row) * 16 + byte % 16;
          ASSERT_EQ(got[at], expected(static_cast<int>(row) + 3, byte)) << block << row << byte;
          const int own = static_cast<int>(row + 32 * block);
          ASSERT_EQ(got[1024 + at], expected(own, 2 * x + byte)) << block << row << byte;
          const int of_plane = 4 + static_cast<int>(row % 4);  // two of four rows are there
          const int in_planes = static_cast<int>(2 + block + row / 4) * kGatherPlaneRows + of_plane;
          ASSERT_EQ(got[2048 + at],
                    expected(of_plane < kGatherPlaneRows ? in_planes : -1, 2 * x + byte))
              << block << row << byte;
        }
      }
    }
  }
}

// Two of these stand in the research of this backend, from CuTe.
TEST(DescriptorsSm100, AreThoseOfCute) {
  using device::Major;
  EXPECT_EQ(device::tcgen05_bf16(128, 128, Major::K, Major::K), 0x08200490u);
  EXPECT_EQ(device::tcgen05_bf16(256, 64, Major::MN, Major::K), 0x10108490u);
}

}  // namespace
}  // namespace winnow::conformance
