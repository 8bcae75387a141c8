// Tensor maps and copies of boxes against a walk over every element of a box; ldmatrix, stmatrix
// and the rules of bulk copies.
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/simulator/instructions/bulk_copy.h"
#include "winnow/simulator/instructions/matrix_fragments.h"
#include "winnow/simulator/instructions/tensor_map.h"
#include "winnow/simulator/instructions/test_misuse.h"

namespace winnow::simulator {
namespace {

alignas(1024) std::byte memory[1 << 16];

// A description that owns its arrays; as it stands it is right.
struct Given {
  TensorElement element = TensorElement::bf16;
  const void* address = memory;
  std::vector<std::uint64_t> size = {100, 30, 4}, strides = {208, 8192};
  std::vector<std::uint32_t> box = {64, 8, 2}, steps = {1, 1, 1};
  TensorInterleave interleave = TensorInterleave::none;
  TensorSwizzle swizzle = TensorSwizzle::bytes128;
  TensorFill fill = TensorFill::zeros;

  TensorMap encode() const {
    return encode_tensor_map(
        {element, address, size, strides, box, steps, interleave, swizzle, fill});
  }
};

void fill_memory() {
  std::uint32_t state = 1;
  for (std::byte& byte : memory) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(state >> 24 | 1);  // never 0: that is what fills
  }
}

// Where byte `at` of a box stands, counted from a destination that is a multiple of 1024.
std::size_t place(std::size_t at, TensorSwizzle swizzle) {
  const std::size_t row = at / 128;
  switch (swizzle) {
    case TensorSwizzle::none:
      return at;
    case TensorSwizzle::bytes32:
      return at ^ row % 2 * 16;
    case TensorSwizzle::bytes64:
      return at ^ row % 4 * 16;
    case TensorSwizzle::bytes128:
      return at ^ row % 8 * 16;
  }
  return at;
}

// Compares a copy with what an element at a time gives.
void expect_box(const Given& given, std::vector<std::int32_t> coordinates, int element_bytes) {
  const TensorMap map = given.encode();
  constexpr std::uint32_t kDestination = 2048;
  std::vector<std::byte> shared(65536, std::byte{0xee});
  std::size_t written = 0;
  for (const BoxUnit& unit : box_units(map, coordinates, kDestination)) {
    ASSERT_LE(unit.shared + 16, shared.size());
    unit.write(shared.data() + unit.shared);
    written += 16;
  }
  EXPECT_EQ(written, box_bytes(map));
  const std::size_t rank = given.size.size();
  std::vector<std::size_t> count(rank, 1);
  std::size_t elements = 1;
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t step = i == 0 ? 1 : given.steps[i];
    while (count[i] * step < given.box[i]) ++count[i];
    elements *= count[i];
  }
  EXPECT_EQ(written, elements * static_cast<std::size_t>(element_bytes));
  for (std::size_t n = 0; n < elements; ++n) {
    std::size_t rest = n;
    bool inside = true;
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < rank; ++i) {
      const std::size_t step = i == 0 ? 1 : given.steps[i];
      const std::int64_t at = coordinates[i] + static_cast<std::int64_t>(rest % count[i] * step);
      rest /= count[i];
      inside = inside && at >= 0 && at < static_cast<std::int64_t>(given.size[i]);
      offset += at * (i == 0 ? element_bytes : static_cast<std::int64_t>(given.strides[i - 1]));
    }
    for (std::size_t byte = 0; byte < static_cast<std::size_t>(element_bytes); ++byte) {
      const std::size_t at = n * static_cast<std::size_t>(element_bytes) + byte;
      const std::byte want =
          inside ? memory[offset + static_cast<std::int64_t>(byte)] : std::byte{0};
      ASSERT_EQ(shared[kDestination + place(at, given.swizzle)], want) << "element " << n;
    }
  }
}

TEST(TensorMap, BoxesAreCopiedInEverySwizzle) {
  fill_memory();
  for (int swizzle = 0; swizzle < 4; ++swizzle) {
    Given given;
    given.swizzle = static_cast<TensorSwizzle>(swizzle);
    given.box[0] = swizzle == 0 ? 24 : 8u << swizzle;
    for (const std::int32_t x : {0, 8, -8, 72, 96, 104, -64}) {
      for (const std::int32_t y : {0, -3, 25, 40}) {
        SCOPED_TRACE(::testing::Message() << "swizzle " << swizzle << " at " << x << ", " << y);
        expect_box(given, {x, y, 3}, 2);
      }
    }
  }
}

TEST(TensorMap, RanksTypesAndStepsAreThoseGiven) {
  fill_memory();
  Given bytes;
  bytes.element = TensorElement::u8;
  bytes.size = {130, 100};
  bytes.strides = {144};
  bytes.box = {128, 50};
  bytes.steps = {1, 1};
  expect_box(bytes, {16, 70}, 1);
  Given line;
  line.element = TensorElement::f32;
  line.size = {1000};
  line.strides = {};
  line.box = {256};
  line.steps = {0};  // nothing reads it
  line.swizzle = TensorSwizzle::none;
  expect_box(line, {900}, 4);
  Given stepped;
  stepped.steps = {1, 3, 2};
  expect_box(stepped, {56, 20, 1}, 2);
  Given deep;
  deep.element = TensorElement::f64;
  deep.size = {10, 3, 3, 3, 3};
  deep.strides = {80, 240, 720, 2160};
  deep.box = {8, 2, 3, 2, 3};
  deep.steps = {1, 1, 1, 1, 1};
  deep.swizzle = TensorSwizzle::bytes64;
  expect_box(deep, {2, 2, -1, 0, 1}, 8);
}

TEST(TensorMap, LimitsOfTheDriverAreReported) {
  const auto rejects = [](const char* text, const std::function<void(Given&)>& change) {
    Given given;
    change(given);
    expect_misuse([&] { given.encode(); }, "tensor map", text);
  };
  Given().encode();
  rejects("size[1] is 0", [](Given& g) { g.size[1] = 0; });
  rejects("must be 1 to 2^32", [](Given& g) { g.size[0] = (std::uint64_t{1} << 32) + 1; });
  rejects("box[1] is 257", [](Given& g) { g.box[1] = 257; });
  rejects("box[2] is 0", [](Given& g) { g.box[2] = 0; });
  rejects("steps[1] is 9", [](Given& g) { g.steps[1] = 9; });
  rejects("strides[0] is 200", [](Given& g) { g.strides[0] = 200; });
  rejects("less than 2^40", [](Given& g) { g.strides[1] = std::uint64_t{1} << 40; });
  rejects("120 bytes, which is no multiple of 16", [](Given& g) { g.box[0] = 60; });
  rejects("144 bytes, more than the 128", [](Given& g) { g.box[0] = 72; });
  rejects("is not a multiple of 16", [](Given& g) { g.address = memory + 8; });
  rejects("is not a multiple of 32", [](Given& g) {
    g.interleave = TensorInterleave::bytes32;
    g.swizzle = TensorSwizzle::bytes32;
    g.address = memory + 16;
  });
  rejects("needs the swizzle of 32",
          [](Given& g) { g.interleave = TensorInterleave::bytes32, g.strides[0] = 224; });
  rejects("strides, box and steps have not as many entries as the rank asks for",
          [](Given& g) { g.strides.pop_back(); });
  rejects("the rank is 0", [](Given& g) { g.size.clear(); });
  rejects("the rank is 6", [](Given& g) { g.size.resize(6, 1); });
  rejects("three dimensions", [](Given& g) {
    g.interleave = TensorInterleave::bytes16;
    g.size.pop_back(), g.strides.pop_back(), g.box.pop_back(), g.steps.pop_back();
  });
  rejects("a floating type", [](Given& g) {
    g.element = TensorElement::u16;
    g.fill = TensorFill::nan;
  });
  rejects("type of the elements", [](Given& g) { g.element = static_cast<TensorElement>(13); });
}

TEST(TensorMap, MisuseOfACopyIsReported) {
  const Given given;
  const TensorMap map = given.encode();
  expect_misuse([&] { box_units(map, std::vector<std::int32_t>{0, 0}, 0); }, "tensor copy",
                "2 coordinates for a tensor of rank 3");
  expect_misuse([&] { box_units(map, std::vector<std::int32_t>{0, 0, 0}, 64); }, "tensor copy",
                "the destination 64 is not a multiple of 128");
  for (const std::int32_t x : {1, 4, -4}) {
    expect_misuse([&] { box_units(map, std::vector<std::int32_t>{x, 0, 0}, 0); }, "tensor copy",
                  "bytes into a row, which is no multiple of 16");
  }
  const TensorMap none{};
  expect_misuse([&] { box_bytes(none); }, "tensor copy", "the map was not encoded");
  Given narrow;
  narrow.box[0] = 32;
  expect_misuse([&] { box_units(narrow.encode(), std::vector<std::int32_t>{0, 0, 0}, 0); },
                "tensor copy", "does not model rows narrower than the swizzle");
}

TEST(BulkCopy, SizesAndAddressesAreMultiplesOf16) {
  check_bulk_copy(32, memory + 48, 160);
  check_cp_async(16, memory);
  expect_misuse([] { check_bulk_copy(8, memory, 16); }, "bulk copy", "shared memory 8");
  expect_misuse([] { check_bulk_copy(16, memory + 4, 16); }, "bulk copy", "global memory");
  expect_misuse([] { check_bulk_prefetch(memory, 24); }, "bulk copy", "24 bytes");
  expect_misuse([] { check_cp_async(24, memory); }, "cp.async", "shared memory 24");
  expect_misuse([] { check_cp_async(16, memory + 8); }, "cp.async", "global memory");
}

TEST(MatrixFragments, AreStoredAndLoadedAsTheDocumentSays) {
  std::vector<std::byte> shared(4096, std::byte{0});
  std::uint32_t rows[32], registers[32][4], back[32][4];
  for (std::uint32_t row = 0; row < 32; ++row) rows[row] = 16 * ((row * 37 + 5) % 256);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t i = 0; i < 4; ++i) registers[lane][i] = 0x10000u * (lane + 1) + 7 * i + 1;
  }
  stmatrix_x4(shared, rows, registers);
  for (std::size_t row = 0; row < 32; ++row) {
    for (std::size_t column = 0; column < 8; ++column) {
      std::uint16_t element;
      std::memcpy(&element, shared.data() + rows[row] + 2 * column, 2);
      const std::uint32_t held = registers[row % 8 * 4 + column / 2][row / 8];
      EXPECT_EQ(element, static_cast<std::uint16_t>(column % 2 == 0 ? held : held >> 16));
    }
  }
  ldmatrix_x4(shared, rows, back);
  EXPECT_EQ(std::memcmp(back, registers, sizeof registers), 0);
  rows[3] = 24;
  expect_misuse([&] { stmatrix_x4(shared, rows, registers); }, "stmatrix", "24 is not a multiple");
  rows[3] = 4096;
  expect_misuse([&] { ldmatrix_x4(shared, rows, back); }, "shared memory", "outside of the 4096");
}

}  // namespace
}  // namespace winnow::simulator
