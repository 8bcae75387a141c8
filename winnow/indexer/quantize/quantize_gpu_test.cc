// What only a GPU can show of quantize, beyond the case table: slots outside, with and without
// checking mode, rows and pages at odd addresses, graph capture, rows past 2^31. Skipped without a
// GPU.
#include <limits>

#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/indexer/cases.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/gpu_test.h"

namespace winnow::indexer {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};

class QuantizeGpu : public winnow::testing::GpuTest<Backend::cuda> {
 protected:
  static Tensor unwritten(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor tensor(dtype, shape);
    winnow::testing::fill_unwritten(tensor);
    return tensor;
  }
  static Tensor normal(std::int64_t n, std::uint64_t seed) {
    Tensor x(DType::bf16, {n, 128});
    winnow::testing::Random random(seed);
    winnow::testing::fill_normal(x, random);
    return x;
  }
};

#if WINNOW_WITH_CUDA

// Must run first in its process to show what the name says: `make test-gpu` does.
TEST_F(QuantizeGpu, TheFirstCallMayBeCaptured) {
  const Tensor first = normal(200, 1), second = normal(200, 2);
  Tensor there = first.to(kGpu);
  Tensor rows = unwritten(DType::f8_e4m3, {200, 128}).to(kGpu);
  Tensor scale = unwritten(DType::f32, {200}).to(kGpu);
  const winnow::testing::CudaStream stream;
  const winnow::testing::Graph graph(stream.stream, [&] {
    quantize({.x = there, .rows = rows, .scale = scale}, stream.options());
  });
  for (const Tensor* x : {&first, &second, &first}) {
    copy_between(there.data(), kGpu, x->data(), {}, static_cast<std::size_t>(x->numel()) * 2);
    graph.launch(stream.stream);
    stream.wait();
    Tensor cpu_rows(DType::f8_e4m3, {200, 128}), cpu_scale(DType::f32, {200});
    quantize({.x = *x, .rows = cpu_rows, .scale = cpu_scale});
    EXPECT_TRUE(winnow::testing::same_bytes(rows.to({}), cpu_rows));
    EXPECT_TRUE(winnow::testing::same_bytes(scale.to({}), cpu_scale));
  }
}

TEST_F(QuantizeGpu, ASlotBeyondThePagesIsSkippedOrNamed) {
  const Tensor x = normal(70, 3), x_there = x.to(kGpu);
  for (const std::int64_t bad : {std::int64_t{128}, std::numeric_limits<std::int64_t>::max(),
                                 std::numeric_limits<std::int64_t>::min()}) {
    Tensor slots(DType::i64, {70});
    for (std::int64_t i = 0; i < 70; ++i) slots.values<std::int64_t>()[i] = 69 - i;
    slots.values<std::int64_t>()[33] = bad;
    Tensor pages = unwritten(DType::u8, {2, page_bytes(128)}), there = pages.to(kGpu);
    const Tensor slots_there = slots.to(kGpu);
    if (bad > 0) {
      winnow::testing::expect_error(
          [&] { quantize({.x = x_there, .pages = there, .slots = slots_there}, {.check = true}); },
          ErrorCode::invalid_argument,
          "indexer::quantize: slots: want slots below 2 pages * 64 slots, got slot " +
              std::to_string(bad) + " for row 33");
      EXPECT_TRUE(winnow::testing::same_bytes(there.to({}), pages));
    }
    EXPECT_EQ(quantize({.x = x_there, .pages = there, .slots = slots_there}), Backend::cuda);
    slots.values<std::int64_t>()[33] = -1;
    quantize({.x = x, .pages = pages, .slots = slots});
    EXPECT_TRUE(winnow::testing::same_bytes(there.to({}), pages)) << bad;
  }
}

// Neither x nor the rows begin where a lane's elements could be moved whole; pages whose scales
// would be unaligned are refused.
TEST_F(QuantizeGpu, OddAddresses) {
  const Tensor wide = normal(9, 4), wide_there = wide.to(kGpu);
  Tensor rows = unwritten(DType::f8_e4m3, {9, 67}), rows_there = rows.to(kGpu);
  Tensor scale(DType::f32, {9}), scale_there = scale.to(kGpu);
  const auto call = [](const Tensor& x, Tensor& out, Tensor& of_row) {
    quantize({.x = x.view().slice(1, 3, 67), .rows = out.view().slice(1, 1, 65), .scale = of_row});
  };
  call(wide, rows, scale);
  call(wide_there, rows_there, scale_there);
  EXPECT_TRUE(winnow::testing::same_bytes(rows_there.to({}), rows));
  EXPECT_TRUE(winnow::testing::same_bytes(scale_there.to({}), scale));
  Tensor pages(DType::u8, {2, page_bytes(128) + 2}, kGpu), slots(DType::i64, {9}, kGpu);
  try {
    quantize(
        {.x = wide_there, .pages = pages.view().slice(1, 2, page_bytes(128) + 2), .slots = slots});
    ADD_FAILURE() << "took pages at an odd address";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "pages");
  }
}

TEST_F(QuantizeGpu, BeyondTwoToThe31Elements) {
  constexpr std::int64_t n = (std::int64_t{1} << 24) + 300;  // 2^31 elements and some
  const Tensor tail = normal(300, 5);
  Tensor x(DType::bf16, {n, 128}, kGpu), rows(DType::f8_e4m3, {n, 128}, kGpu);
  Tensor scale(DType::f32, {n}, kGpu);
  auto* end = static_cast<char*>(x.data()) + (n - 300) * 256;
  copy_between(end, kGpu, tail.data(), {}, 300 * 256);
  quantize({.x = x, .rows = rows, .scale = scale});
  Tensor want(DType::f8_e4m3, {300, 128}), got(DType::f8_e4m3, {300, 128}),
      of_row(DType::f32, {300});
  quantize({.x = tail, .rows = want, .scale = of_row});
  copy_between(got.data(), {}, static_cast<char*>(rows.data()) + (n - 300) * 128, kGpu, 300 * 128);
  EXPECT_TRUE(winnow::testing::same_bytes(got, want));
}

#endif

}  // namespace
}  // namespace winnow::indexer
