// Tensor views and the owning tensor.
#include "winnow/core/tensor.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "winnow/testing/expect.h"

namespace winnow {
namespace {

constexpr std::int64_t kBig = std::numeric_limits<std::int64_t>::max();

void expect_refused(const std::function<void()>& call, const std::string& text) {
  testing::expect_error(call, ErrorCode::invalid_argument, "TensorView: " + text);
}

TEST(TensorView, DenseStrides) {
  float data[24] = {};
  const TensorView view(data, DType::f32, {2, 3, 4});
  EXPECT_EQ(view.rank(), 3);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.stride(0), 12);
  EXPECT_EQ(view.stride(1), 4);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(&view.at<float>(1, 2, 3), data + 23);
  EXPECT_EQ(to_string(view), "f32 [2, 3, 4] on cpu");
}

TEST(TensorView, AbsentByDefault) {
  const TensorView view;
  EXPECT_FALSE(view.present());
  EXPECT_EQ(view.numel(), 0);
  EXPECT_EQ(to_string(view), "no tensor");
  EXPECT_FALSE(ConstTensorView(view).present());
}

TEST(TensorView, RankZeroHasOneElement) {
  float value = 3;
  const TensorView view(&value, DType::f32, std::initializer_list<std::int64_t>{});
  EXPECT_TRUE(view.present());
  EXPECT_EQ(view.rank(), 0);
  EXPECT_EQ(view.numel(), 1);
  EXPECT_EQ(view.at<float>(), 3);
}

TEST(TensorView, EmptyNeedsNoMemory) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  EXPECT_EQ(TensorView(nullptr, DType::f32, {kHuge, 512, 0}).numel(), 0);
  const TensorView view(nullptr, DType::f32, {3, 0, 2});
  EXPECT_NE(view.data(), nullptr) << "it would count as absent";
  EXPECT_TRUE(view.present());
  EXPECT_EQ(view.numel(), 0);
  // Sizes that would overflow without the 0 are harmless.
  EXPECT_EQ(TensorView(nullptr, DType::f32, {kBig, 0, kBig}).numel(), 0);
  expect_refused([] { TensorView(nullptr, DType::f32, {3, 2}); }, "data: want a pointer, got null");
}

TEST(TensorView, SliceSharesMemory) {
  std::int32_t data[12];
  for (int n = 0; n < 12; ++n) data[n] = n;
  const ConstTensorView view(data, DType::i32, {3, 4});
  const ConstTensorView part = view.slice(0, 1, 3).slice(1, 2, 4);
  EXPECT_EQ(part.size(0), 2);
  EXPECT_EQ(part.size(1), 2);
  EXPECT_EQ(part.at<std::int32_t>(0, 0), 6);
  EXPECT_EQ(part.at<std::int32_t>(1, 1), 11);
  EXPECT_EQ(to_string(part), "i32 [2, 2] on cpu with strides [4, 1]");
  EXPECT_EQ(view.slice(0, 3, 3).numel(), 0);
  // A stride that nothing is multiplied by may be anything.
  EXPECT_EQ(ConstTensorView(data, DType::f32, {1}, {kBig}).slice(0, 1, 1).data(), data);
  EXPECT_EQ(view.slice(1, 0, 4).data(), data);
}

TEST(TensorView, SliceOutOfBounds) {
  float data[4] = {};
  const TensorView view(data, DType::f32, {4});
  expect_refused([&] { view.slice(0, -1, 2); }, "slice: want 0 <= begin <= end <= 4, got -1 to 2");
  expect_refused([&] { view.slice(0, 3, 2); }, "slice: want 0 <= begin <= end <= 4, got 3 to 2");
  expect_refused([&] { view.slice(0, 0, 5); }, "slice: want 0 <= begin <= end <= 4, got 0 to 5");
  expect_refused([&] { view.slice(1, 0, 1); }, "slice: want a dimension below 1, got 1");
  expect_refused([&] { view.slice(-1, 0, 1); }, "slice: want a dimension below 1, got -1");
}

TEST(TensorView, TransposeExchangesDimensions) {
  float data[6] = {0, 1, 2, 3, 4, 5};
  const TensorView view = TensorView(data, DType::f32, {2, 3}).transpose(0, 1);
  EXPECT_EQ(view.size(0), 3);
  EXPECT_EQ(view.size(1), 2);
  EXPECT_EQ(view.at<float>(2, 1), 5);
  EXPECT_EQ(view.at<float>(1, 0), 1);
  expect_refused([&] { view.transpose(0, 2); }, "transpose: want dimensions below 2, got 0 and 2");
}

TEST(TensorView, ZeroAndNegativeStrides) {
  float data[4] = {0, 1, 2, 3};
  const TensorView reversed(data + 3, DType::f32, {4}, {-1});
  EXPECT_EQ(reversed.at<float>(0), 3);
  EXPECT_EQ(reversed.slice(0, 1, 3).at<float>(1), 1);
  const TensorView repeated(data, DType::f32, {1000, 2}, {0, 1});
  EXPECT_EQ(repeated.at<float>(999, 1), 1);
}

TEST(TensorView, BadShapesAndStrides) {
  float data[4] = {};
  expect_refused([&] { TensorView(data, DType::f32, {2, -1}); },
                 "shape: want sizes of 0 or more, got [2, -1]");
  expect_refused([&] { TensorView(data, DType::f32, {1, 1, 1, 1, 1, 1, 1}); },
                 "shape: want at most 6 dimensions, got [1, 1, 1, 1, 1, 1, 1]");
  expect_refused([&] { TensorView(data, DType::f32, {2, 2}, {1}); },
                 "strides: want one per dimension of shape [2, 2], got [1]");
}

TEST(TensorView, SizesThatOverflow) {
  float data[4] = {};
  expect_refused([&] { TensorView(data, DType::f32, {std::int64_t{1} << 61}); },
                 "shape: want a byte count that fits 63 bits, got [2305843009213693952]");
  expect_refused([&] { TensorView(data, DType::f32, {kBig, kBig}); },
                 "shape: want a byte count that fits 63 bits, got [9223372036854775807, "
                 "9223372036854775807]");
  expect_refused([&] { TensorView(data, DType::f32, {2, 2}, {kBig / 2, 1}); },
                 "strides: want byte offsets that fit 63 bits, got [4611686018427387903, 1] for "
                 "shape [2, 2]");
  expect_refused([&] { TensorView(data, DType::f32, {2, 2}, {kBig, 1}); },
                 "strides: want offsets that fit 63 bits, got [9223372036854775807, 1] for "
                 "shape [2, 2]");
  expect_refused([&] { TensorView(data, DType::f32, {3, 2}, {kBig, 1}); },
                 "strides: want offsets that fit 63 bits, got [9223372036854775807, 1] for "
                 "shape [3, 2]");
  expect_refused([&] { TensorView(data, DType::f32, {2, 2}, {-kBig - 1, 1}); },
                 "strides: want offsets that fit 63 bits, got [-9223372036854775808, 1] for "
                 "shape [2, 2]");
  // The offset of the last element fits, its end does not.
  expect_refused([&] { TensorView(data, DType::u8, {2}, {kBig}); },
                 "strides: want byte offsets that fit 63 bits, got [9223372036854775807] for "
                 "shape [2]");
  EXPECT_EQ(TensorView(data, DType::u8, {1, 2}, {kBig, 1}).numel(), 2);
}

TEST(TensorView, HostAccessIsChecked) {
  float data[4] = {};
  const TensorView view(data, DType::f32, {4});
  EXPECT_THROW(view.at<std::int32_t>(0), Error);
  const TensorView on_gpu(data, DType::f32, {4}, Device{DeviceType::cuda, 2});
  expect_refused([&] { on_gpu.at<float>(0); }, "device: want cpu, got cuda:2");
  EXPECT_EQ(to_string(on_gpu), "f32 [4] on cuda:2");
}

TEST(Tensor, ZeroFilledAndAligned) {
  for (const std::int64_t size : {0, 1, 15, 16, 17, 1000}) {
    const Tensor tensor(DType::u8, {size});
    EXPECT_EQ(tensor.numel(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data()) % 64, 0u);
    for (const std::uint8_t value : tensor.values<std::uint8_t>()) EXPECT_EQ(value, 0);
  }
}

TEST(Tensor, CloneCopiesAndMoveMoves) {
  Tensor tensor(DType::f32, {2, 2});
  tensor.view().at<float>(1, 0) = 5;
  Tensor copy = tensor.clone();
  tensor.view().at<float>(1, 0) = 6;
  EXPECT_EQ(copy.view().at<float>(1, 0), 5);
  const void* memory = copy.data();
  const Tensor moved = std::move(copy);
  EXPECT_EQ(moved.data(), memory);
  EXPECT_EQ(moved.values<float>()[2], 5);
  EXPECT_THROW(moved.values<Half>(), Error);
  EXPECT_EQ(Tensor(DType::f32, {0}).clone().numel(), 0);
}

TEST(Tensor, BorrowedMemoryIsGivenBackByItsOwner) {
  float data[6] = {0, 1, 2, 3, 4, 5};
  int given_back = 0;
  const auto owner = [&] { return std::shared_ptr<void>(data, [&](void*) { ++given_back; }); };
  {
    Tensor tensor = Tensor::borrow(owner(), data, DType::f32, {2, 3});
    EXPECT_EQ(tensor.data(), data);
    EXPECT_EQ(tensor.view().at<float>(1, 2), 5);
    const Tensor copy = tensor.clone();  // of memory of its own
    EXPECT_NE(copy.data(), data);
    Tensor moved = std::move(tensor);
    EXPECT_EQ(given_back, 0);
    moved = Tensor::borrow(owner(), nullptr, DType::f32, {0, 3});
    EXPECT_EQ(given_back, 1);
  }
  EXPECT_EQ(given_back, 2);
  expect_refused([&] { Tensor::borrow(nullptr, data, DType::f32, {6}); },
                 "owner: want one that keeps the memory, got null");
}

TEST(Tensor, MemoryThatCannotBeHad) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the program if an allocation fails";
#endif
  try {
    const Tensor tensor(DType::f32, {std::int64_t{1} << 59});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(int(error.code()), int(ErrorCode::resource)) << error.what();
  }
}

}  // namespace
}  // namespace winnow
