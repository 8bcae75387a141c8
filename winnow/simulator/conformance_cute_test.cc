// The wrappers' descriptors, the places of operands and sums and what loads of tensor memory
// return, beside CuTe, which is evaluated on the host (conformance_cute.h). The first tests compare
// what is written in the wrappers and what the simulator reads in it, element by element; the
// others run micro-kernels in the simulator on operands that stand where CuTe puts them.
#include "winnow/simulator/conformance_cute.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "winnow/device/sm100/operand.cuh"
#include "winnow/device/sm90/chunk.cuh"
#include "winnow/simulator/conformance_sm100.h"
#include "winnow/simulator/conformance_test.h"
#include "winnow/simulator/instructions/matrix_descriptor.h"
#include "winnow/simulator/instructions/tcgen05.h"

namespace winnow::conformance {
namespace {

namespace cute = cute_oracle;
using cute::Operand;
using cute::PairProduct;
using device::Major;

const char* name(Operand operand) {
  return operand == Operand::k ? "K" : operand == Operand::mn ? "MN" : "MN64";
}
Major major_of(Operand operand) { return operand == Operand::k ? Major::K : Major::MN; }

constexpr std::uint32_t kStart = 0x6000;  // of an operand: any multiple of 1024 below 256 KiB

// As the kernels describe it: chunks beside each other, a step of K further by an addition.
std::uint64_t described(Operand operand, std::uint32_t start, int k16) {
  const auto steps = static_cast<std::uint64_t>(k16);
  switch (operand) {
    case Operand::k:
      return device::tcgen05_k_major(start) + 2 * steps;
    case Operand::mn:
      return device::tcgen05_mn_major(start, device::kChunkBytes) + 128 * steps;
    case Operand::mn64:
      return device::tcgen05_mn_major_64(start, device::kChunkBytes / 2) + 64 * steps;
  }
  return 0;
}

// An operand of a block, as a kernel of the backend uses it.
struct Used {
  const char* by;
  Operand operand;
  int rows;
};
const Used kUsed[] = {
    {"scores: entries, images of dkv", Operand::k, 128},
    {"scores: heads", Operand::k, 64},
    {"scores: 32 heads", Operand::k, 32},
    {"dq: dS", Operand::mn, 64},
    {"dq: columns of rows, dkv: of heads", Operand::mn, 128},
    {"dq, dkv: the narrow part", Operand::mn64, 32},
};

// The leading offset says where the next chunk of M or N is. Of a single chunk it has no meaning.
std::uint64_t that_count(std::uint64_t descriptor, const Used& used) {
  const int chunk = used.operand == Operand::mn ? 64 : 32;
  const bool single = used.operand != Operand::k && used.rows == chunk;
  return single ? descriptor & ~(std::uint64_t{0x3fff} << 16) : descriptor;
}

TEST(CuteDescriptors, AreThoseOfSm100) {
  for (const Used& used : kUsed) {
    for (int k16 = 0; k16 < 4; ++k16) {
      EXPECT_EQ(that_count(described(used.operand, kStart, k16), used),
                that_count(cute::sm100_descriptor(used.operand, used.rows, kStart, k16), used))
          << used.by << ", step " << k16;
    }
  }
}

TEST(CuteDescriptors, AreThoseOfSm90) {
  for (int k16 = 0; k16 < 4; ++k16) {
    const auto k = cute::sm90_descriptor(Operand::k, 64, kStart, k16);
    EXPECT_EQ(device::descriptor_k_major(kStart, k16), k);
    EXPECT_EQ(device::descriptor_offset(device::descriptor_k_major(kStart),
                                        static_cast<std::uint32_t>(32 * k16)),
              k);
    const auto mn = cute::sm90_descriptor(Operand::mn, 128, kStart, k16);
    EXPECT_EQ(device::descriptor_mn_major(kStart, k16), mn);
    EXPECT_EQ(device::descriptor_offset(device::descriptor_mn_major(kStart),
                                        static_cast<std::uint32_t>(2048 * k16)),
              mn);
  }
}

TEST(CuteDescriptors, AreThoseOfInstructions) {
  int compared = 0;
  for (const int m : {128, 256}) {
    for (const int n : {64, 128, 256}) {
      for (const Major a : {Major::K, Major::MN}) {
        for (const Major b : {Major::K, Major::MN}) {
          EXPECT_EQ(device::tcgen05_bf16(m, n, a, b),
                    cute::instruction_descriptor({m, n, a == Major::K, b == Major::K}))
              << m << " x " << n;
          ++compared;
        }
      }
    }
  }
  EXPECT_EQ(compared, 24);
}

// Where the simulator reads element k, of 16, of a row of the operand that a descriptor names.
std::uint32_t simulated_place(const simulator::MatrixDescriptor& descriptor, Operand operand,
                              int rows, int row, int k) {
  using simulator::MatrixMajor;
  const auto major = operand == Operand::k ? MatrixMajor::k : MatrixMajor::mn;
  const std::vector<std::uint32_t> units = simulator::operand_units(descriptor, major, rows);
  const int unit = operand == Operand::k ? 2 * row + k / 8 : k * rows / 8 + row / 8;
  return units.at(static_cast<std::size_t>(unit)) +
         2 * static_cast<std::uint32_t>(operand == Operand::k ? k % 8 : row % 8);
}

TEST(CutePlaces, AreWhereTheSimulatorReadsOperands) {
  for (const Used& used : kUsed) {
    for (int k16 = 0; k16 < 4; ++k16) {
      const auto sm100 = simulator::decode_tcgen05_descriptor(described(used.operand, kStart, k16));
      for (int row = 0; row < used.rows; ++row) {
        for (int k = 0; k < 16; ++k) {
          ASSERT_EQ(simulated_place(sm100, used.operand, used.rows, row, k),
                    kStart + cute::place(used.operand, used.rows, row, 16 * k16 + k))
              << used.by << ", row " << row << ", step " << 16 * k16 + k;
        }
      }
    }
  }
  for (int k16 = 0; k16 < 4; ++k16) {  // of sm90
    for (const auto& [operand, rows] : {std::pair{Operand::k, 64}, {Operand::mn, 128}}) {
      const auto sm90 = simulator::decode_matrix_descriptor(
          operand == Operand::k ? device::descriptor_k_major(kStart, k16)
                                : device::descriptor_mn_major(kStart, k16));
      for (int row = 0; row < rows; ++row) {
        for (int k = 0; k < 16; ++k) {
          ASSERT_EQ(simulated_place(sm90, operand, rows, row, k),
                    kStart + cute::place(operand, rows, row, 16 * k16 + k))
              << name(operand) << ", row " << row << ", step " << 16 * k16 + k;
        }
      }
    }
  }
}

TEST(CutePlaces, AreThoseOfChunks) {
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 64; ++column) {
      const std::uint32_t chunk =
          device::chunk_offset(row, column / 8) + 2 * static_cast<std::uint32_t>(column % 8);
      ASSERT_EQ(chunk, cute::place(Operand::k, 64, row, column));
      ASSERT_EQ(chunk, cute::place(Operand::mn, 64, column, row));
    }
  }
}

TEST(CutePlaces, AreThoseOfTheSumsOfPairs) {
  for (const int m : {128, 256}) {
    for (const int n : {64, 128, 256}) {
      const PairProduct product{m, n, true, true};
      const simulator::Tcgen05Product simulated{
          .m = m, .n = n, .element = {}, .major_a = {}, .major_b = {}};
      int last = 0;
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
          const cute::TensorPlace wanted = cute::sum(product, i, j);
          const simulator::TensorPlace got = simulator::tcgen05_place(simulated, 2, i, j);
          ASSERT_EQ(got.block, wanted.block) << m << " x " << n << ": " << i << ", " << j;
          ASSERT_EQ(got.lane, wanted.lane) << m << " x " << n << ": " << i << ", " << j;
          ASSERT_EQ(got.column, wanted.column) << m << " x " << n << ": " << i << ", " << j;
          last = std::max(last, wanted.column);
        }
      }
      EXPECT_EQ(simulator::tcgen05_columns(simulated, 2), last + 1);
    }
  }
}

// ---- Micro-kernels -----------------------------------------------------------------------------

// A product of a kernel, with the steps of K from 16 * k16 on.
struct UsedProduct {
  const char* by;
  int m, n;
  Operand a, b;
};
const UsedProduct kUsedProducts[] = {
    {"Scores", 256, 128, Operand::k, Operand::k},
    {"ScoresOf64Heads", 256, 64, Operand::k, Operand::k},
    {"Dq", 128, 256, Operand::mn, Operand::mn},
    {"DqNarrow", 128, 64, Operand::mn, Operand::mn64},
    {"Dkv", 256, 256, Operand::k, Operand::mn},
    {"DkvNarrow", 256, 64, Operand::k, Operand::mn64},
};
class CuteProducts : public Conformance, public ::testing::WithParamInterface<UsedProduct> {
 protected:
  void SetUp() override {}  // of sm90; this runs in the simulator alone
};

// Rows of A have a single 1 each, in another place in the next row: each sum shows one element of
// B, each of which is another number in its column. All else in shared memory is NaN.
TEST_P(CuteProducts, OneHotRowsShowEachElement) {
  const UsedProduct& used = GetParam();
  const PairProduct product{used.m, used.n, used.a == Operand::k, used.b == Operand::k};
  constexpr std::uint32_t kBegin[] = {0, 16384};  // of A and of B in a block's memory
  const int rows_of_a = used.m / 2, rows_of_b = used.n / 2;
  const auto one_at = [](int i) { return (7 * i + i / 16) % 16; };
  const auto b_at = [](int j, int k) { return static_cast<float>((16 * j + k) * 37 % 251 + 1); };
  for (int k16 = 0; k16 < 4; ++k16) {
    Words in(kProductWords + 2 * kOperandWords, 0xffffffffu);
    const std::uint64_t operands[] = {described(used.a, kBegin[0], k16),
                                      described(used.b, kBegin[1], k16)};
    std::memcpy(in.data(), operands, sizeof(operands));
    in[4] = device::tcgen05_bf16(used.m, used.n, major_of(used.a), major_of(used.b));
    const auto put = [&](cute::BlockRow at, std::uint32_t begin, Operand operand, int rows, int k,
                         float value) {
      const auto bf16 = static_cast<std::uint16_t>(bits(value) >> 16);
      auto* const block = reinterpret_cast<std::byte*>(
          &in[static_cast<std::size_t>(kProductWords + at.block * kOperandWords)]);
      std::memcpy(block + begin + cute::place(operand, rows, at.row, 16 * k16 + k), &bf16, 2);
    };
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < used.m; ++i) {
        put(cute::row_of_a(product, i), kBegin[0], used.a, rows_of_a, k,
            k == one_at(i) ? 1.0f : 0.0f);
      }
      for (int j = 0; j < used.n; ++j) {
        put(cute::row_of_b(product, j), kBegin[1], used.b, rows_of_b, k, b_at(j, k));
      }
    }
    const Words out = run(launch_product_2, in, 2 * 128 * kTensorColumns);
    for (int i = 0; i < used.m; ++i) {
      for (int j = 0; j < used.n; ++j) {
        const cute::TensorPlace at = cute::sum(product, i, j);
        const auto word =
            static_cast<std::size_t>((at.block * 128 + at.lane) * kTensorColumns + at.column);
        // The micro-kernel adds the product twice.
        ASSERT_EQ(number(out[word]), 2 * b_at(j, one_at(i)))
            << "step " << k16 << ", row " << i << ", column " << j;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, CuteProducts, ::testing::ValuesIn(kUsedProducts),
                         [](const auto& tested) { return std::string(tested.param.by); });

class CuteMoves : public CuteProducts {};

TEST_F(CuteMoves, LoadsReturnWhatCuteSays) {
  Words in(4096);  // [128 lanes][32 columns]
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint32_t>(i);
  const Words out = run(launch_tensor_moves, in, 8192);
  const auto word = [](int lane, int column) {
    return static_cast<std::uint32_t>(32 * lane + column);
  };
  for (int warp = 0; warp < 4; ++warp) {
    for (int thread = 0; thread < 32; ++thread) {
      for (int r = 0; r < 16; ++r) {
        const cute::TensorPlace at = cute::load_32x32b(thread, r);
        // Two loads of 16 columns. Stored as well as loaded by threads in this order, and so the
        // other shape of load below shows the store's.
        const int stored = (32 * warp + thread) * 32 + r;
        EXPECT_EQ(word(32 * warp + at.lane, at.column), static_cast<std::uint32_t>(stored));
        EXPECT_EQ(out[static_cast<std::size_t>(stored)], word(32 * warp + at.lane, at.column));
        for (int half = 0; half < 2; ++half) {
          const cute::TensorPlace wide = cute::load_16x256b(thread, r);
          const auto got =
              static_cast<std::size_t>(4096 + ((2 * warp + half) * 32 + thread) * 16 + r);
          EXPECT_EQ(out[got], word(32 * warp + 16 * half + wide.lane, wide.column))
              << "warp " << warp << ", half " << half << ", thread " << thread << ", " << r;
        }
      }
    }
  }
}

// Gathered rows land as steps of K of MN-major operands, which is how dq reads them, and as rows of
// K-major ones, as the scores do.
TEST_F(CuteMoves, GathersLandInOperands) {
  Words in = random_words(kGatherRows * kGatherStride / 4, 51);
  const int rows[2][4] = {{5, 0, 11, 36}, {30, 7, 7, 12}};
  for (const auto& four : rows) {
    for (const int row : four) in.push_back(static_cast<std::uint32_t>(row));
  }
  in.push_back(0);  // the first column
  const Words out = run(launch_gather, in, 2 * kGatherWords);
  const auto* const tensor = reinterpret_cast<const std::byte*>(in.data());
  for (std::size_t block = 0; block < 2; ++block) {
    const auto* const got = reinterpret_cast<const std::byte*>(&out[block * kGatherWords]);
    const auto same = [&](std::uint32_t at, int row, int column) {
      return std::memcmp(got + at, tensor + row * kGatherStride + 2 * column, 2) == 0;
    };
    for (int i = 0; i < 4; ++i) {
      for (int column = 0; column < 64; ++column) {
        ASSERT_TRUE(same(cute::place(Operand::mn, 64, column, i), rows[block][i], column));
        ASSERT_TRUE(same(cute::place(Operand::k, 64, i, column), rows[block][i], column));
        if (column >= 32) continue;
        ASSERT_TRUE(same(512 + cute::place(Operand::mn64, 32, column, i), rows[block][i], column));
      }
    }
    for (int row = 0; row < 8; ++row) {
      for (int column = 0; column < 64; ++column) {
        ASSERT_TRUE(same(768 + cute::place(Operand::k, 64, row, column), row + 3, column));
      }
    }
  }
}

}  // namespace
}  // namespace winnow::conformance
