// The checks at the entry point: which arguments pass, and the messages of those that do not.
#include "winnow/core/check.h"

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/testing/expect.h"

namespace winnow {
namespace {

alignas(64) float g_data[256];
const Check kCheck("room::operation");

void expect_refused(const std::function<void()>& call, const std::string& text) {
  testing::expect_error(call, ErrorCode::invalid_argument, "room::operation: " + text);
}

ConstTensorView dense(std::initializer_list<std::int64_t> shape, DType dtype = DType::f32) {
  return {g_data, dtype, shape};
}
ConstTensorView strided(std::initializer_list<std::int64_t> shape,
                        std::initializer_list<std::int64_t> strides) {
  return {g_data + 128, DType::f32, shape, strides};
}

TEST(Check, Error) {
  const Error error(ErrorCode::timeout, "op", "arg", "this", "that");
  EXPECT_STREQ(error.what(), "op: arg: want this, got that");
  EXPECT_EQ(error.operation(), "op");
  EXPECT_EQ(error.argument(), "arg");
  EXPECT_EQ(int(error.code()), int(ErrorCode::timeout));
  const Error whole(ErrorCode::internal, "op", "broken");
  EXPECT_STREQ(whole.what(), "op: broken");
  EXPECT_EQ(whole.argument(), "");
  const std::runtime_error& base = error;  // who knows no Winnow can still catch it
  EXPECT_STREQ(base.what(), "op: arg: want this, got that");
}

TEST(Check, Rank) {
  kCheck.rank("x", dense({2, 3}), 2, "[a, b]");
  expect_refused([] { kCheck.rank("x", dense({2, 3}), 3, "[a, b, c]"); },
                 "x: want 3 dimensions [a, b, c], got shape [2, 3]");
  expect_refused([] { kCheck.rank("x", {}, 1, "[a]"); }, "x: want a tensor [a], got none");
}

TEST(Check, Workspace) {
  alignas(256) static std::uint8_t memory[512];
  const auto workspace = [](std::int64_t bytes, std::int64_t offset = 0) {
    return TensorView(memory + offset, DType::u8, {bytes});
  };
  kCheck.workspace(workspace(512), 512, {});
  kCheck.workspace(workspace(512), 100, {});
  expect_refused([&] { kCheck.workspace(workspace(511), 512, {}); },
                 "workspace: want 512 bytes or more, got 511");
  expect_refused([&] { kCheck.workspace(workspace(256, 64), 10, {}); },
                 "workspace: want memory aligned to 256 bytes, got an address 64 bytes beyond");
  expect_refused([&] { kCheck.workspace(workspace(512), 512, {DeviceType::cuda, 0}); },
                 "workspace: want device cuda:0, got cpu");
  expect_refused([&] { kCheck.workspace({memory, DType::f32, {128}}, 512, {}); },
                 "workspace: want dtype u8, got f32");
  expect_refused([&] { kCheck.workspace({memory, DType::u8, {16, 16}}, 16, {}); },
                 "workspace: want shape [bytes=256], got [16, 16]");
}

TEST(Check, Shape) {
  kCheck.shape("x", dense({2, 3}), {{"a", 2}, {"3", 3}});
  kCheck.shape("x", dense({0, 3}), {{"a", 0}, {"b", 3}});
  expect_refused([] { kCheck.shape("x", dense({2, 3}), {{"a", 2}, {"4", 4}}); },
                 "x: want shape [a=2, 4], got [2, 3]");
  expect_refused([] { kCheck.shape("x", dense({2, 3}), {{"a", 2}}); },
                 "x: want shape [a=2], got [2, 3]");
  expect_refused([] { kCheck.shape("x", {}, {{"a", 2}}); },
                 "x: want a tensor of shape [a=2], got none");
}

TEST(Check, DTypeOfAList) {
  kCheck.dtype("x", dense({2}), {DType::bf16, DType::f32});
  expect_refused([] { kCheck.dtype("x", dense({2}, DType::i64), {DType::f32}); },
                 "x: want dtype f32, got i64");
  expect_refused([] { kCheck.dtype("x", dense({2}, DType::u8), {DType::f32, DType::f16}); },
                 "x: want dtype f32 or f16, got u8");
}

// A GPU backend may take less than the contract: a tensor there gets that list, and what else the
// CPU takes where that would help.
TEST(Check, DTypeOnAGpu) {
  const auto on_gpu = [](DType dtype) {
    return ConstTensorView(g_data, dtype, {2}, Device{DeviceType::cuda, 0});
  };
  const auto check = [](const ConstTensorView& view) {
    kCheck.dtype("x", view, {DType::f32, DType::f16, DType::bf16}, {DType::bf16, DType::f16});
  };
  check(dense({2}));
  check(on_gpu(DType::bf16));
  check(on_gpu(DType::f16));
  expect_refused([&] { check(on_gpu(DType::f32)); },
                 "x: want dtype bf16 or f16 on a GPU (the CPU takes f32), got f32");
  expect_refused([&] { check(on_gpu(DType::i64)); }, "x: want dtype bf16 or f16, got i64");
  expect_refused([&] { check(dense({2}, DType::i64)); },
                 "x: want dtype f32 or f16 or bf16, got i64");
}

TEST(Check, ContiguousRows) {
  kCheck.contiguous_rows("x", dense({2, 3}));
  kCheck.contiguous_rows("x", strided({2, 3}, {-50, 1}));
  kCheck.contiguous_rows("x", strided({2, 1}, {1, 7}));  // one element has no stride to speak of
  kCheck.contiguous_rows("x", strided({0, 3}, {1, 7}));
  expect_refused([] { kCheck.contiguous_rows("x", strided({2, 3}, {6, 2})); },
                 "x: want stride 1 in the last dimension, got strides [6, 2]");
  expect_refused([] { kCheck.contiguous_rows("x", strided({2, 3}, {1, 0})); },
                 "x: want stride 1 in the last dimension, got strides [1, 0]");
  expect_refused([] { kCheck.contiguous_rows("x", strided({2, 3}, {3, -1})); },
                 "x: want stride 1 in the last dimension, got strides [3, -1]");
}

TEST(Check, Alignment) {
  kCheck.aligned("x", dense({4, 4}), 16);
  kCheck.aligned("x", strided({1, 4}, {5, 1}), 16);  // the stride of a single row is never used
  const auto* bytes = reinterpret_cast<const char*>(g_data);
  for (const int offset : {1, 2, 4, 8}) {
    const ConstTensorView view(bytes + offset, DType::f32, {4, 4});
    expect_refused([&] { kCheck.aligned("x", view, 16); },
                   "x: want memory aligned to 16 bytes, got an address " + std::to_string(offset) +
                       " bytes beyond");
  }
  expect_refused([] { kCheck.aligned("x", strided({2, 4}, {5, 1}), 16); },
                 "x: want memory aligned to 16 bytes, got strides [5, 1]");
  kCheck.aligned("x", ConstTensorView(bytes + 1, DType::f32, {0, 4}), 16);
}

TEST(Check, DistinctElements) {
  kCheck.distinct_elements("x", dense({2, 3, 4}));
  kCheck.distinct_elements("x", strided({2, 3}, {-3, 1}));
  kCheck.distinct_elements("x", strided({3, 2}, {1, 3}));
  kCheck.distinct_elements("x", strided({1, 3}, {0, 1}));
  kCheck.distinct_elements("x", strided({5, 0}, {0, 1}));
  expect_refused([] { kCheck.distinct_elements("x", strided({2, 3}, {0, 1})); },
                 "x: want an output whose elements do not share memory, got shape [2, 3] with "
                 "strides [0, 1]");
  expect_refused([] { kCheck.distinct_elements("x", strided({2, 3}, {2, 1})); },
                 "x: want an output whose elements do not share memory, got shape [2, 3] with "
                 "strides [2, 1]");
  expect_refused([] { kCheck.distinct_elements("x", strided({2, 3}, {-2, 1})); },
                 "x: want an output whose elements do not share memory, got shape [2, 3] with "
                 "strides [-2, 1]");
}

TEST(Check, SharedMemory) {
  const auto at = [](std::int64_t element, std::initializer_list<std::int64_t> shape,
                     std::initializer_list<std::int64_t> strides) {
    return ConstTensorView(reinterpret_cast<const char*>(g_data) + 4 * element, DType::f32, shape,
                           strides);
  };
  EXPECT_TRUE(share_memory(at(0, {4}, {1}), at(3, {4}, {1})));
  EXPECT_FALSE(share_memory(at(0, {4}, {1}), at(4, {4}, {1})));
  EXPECT_FALSE(share_memory(at(0, {4}, {1}), at(2, {0}, {1})));
  EXPECT_FALSE(share_memory(at(0, {4}, {1}), ConstTensorView{}));
  constexpr std::int64_t kNeverFollowed = std::numeric_limits<std::int64_t>::max() - 2;
  EXPECT_TRUE(share_memory(at(0, {1, 4}, {kNeverFollowed, 1}), at(3, {4}, {1})));
  EXPECT_FALSE(share_memory(at(0, {1, 4}, {kNeverFollowed, 1}), at(4, {4}, {1})));
  // Columns of one buffer, also backwards.
  EXPECT_FALSE(share_memory(at(0, {3, 2}, {4, 1}), at(2, {3, 2}, {4, 1})));
  EXPECT_FALSE(share_memory(at(0, {3, 2}, {4, 1}), at(10, {3, 2}, {-4, 1})));
  EXPECT_TRUE(share_memory(at(0, {3, 3}, {4, 1}), at(2, {3, 2}, {4, 1})));
  // All pairs of small views, against the bytes themselves.
  std::vector<ConstTensorView> views;
  for (std::int64_t begin = 0; begin < 6; ++begin) {
    for (const std::int64_t outer : {0, 2, 3, 5}) {
      for (const std::int64_t inner : {1, 2}) {
        views.push_back(at(begin, {2, 2}, {outer, inner}));
        views.push_back(at(begin, {3, 1}, {outer, inner}));
      }
    }
  }
  const auto elements = [](const ConstTensorView& view) {
    std::set<const float*> found;
    for (std::int64_t i = 0; i < view.size(0); ++i) {
      for (std::int64_t j = 0; j < view.size(1); ++j) found.insert(&view.at<float>(i, j));
    }
    return found;
  };
  for (const ConstTensorView& a : views) {
    for (const ConstTensorView& b : views) {
      bool shared = false;
      for (const float* element : elements(a)) shared = shared || elements(b).contains(element);
      EXPECT_EQ(share_memory(a, b), shared) << to_string(a) << " and " << to_string(b);
    }
  }
}

TEST(Check, DeviceOfTheOthers) {
  const ConstTensorView on_gpu(g_data, DType::f32, {2}, Device{DeviceType::cuda, 1});
  kCheck.device("x", on_gpu, {DeviceType::cuda, 1});
  expect_refused([&] { kCheck.device("x", on_gpu, {DeviceType::cuda, 0}); },
                 "x: want device cuda:0, got cuda:1");
  expect_refused([&] { kCheck.device("x", on_gpu, {}); }, "x: want device cpu, got cuda:1");
  const ConstTensorView on_cpu(g_data, DType::f32, {2}, Device{DeviceType::cpu, 5});
  expect_refused([&] { kCheck.device("x", on_cpu, {}); }, "x: want device cpu, got cpu:5");
}

TEST(Check, AnyRule) {
  kCheck.that(true, "x", "this", "that");
  expect_refused([] { kCheck.that(false, "x", "this", "that"); }, "x: want this, got that");
}

TEST(Check, InputAndOutputCheckEverything) {
  const Device cpu;
  kCheck.input("x", strided({2, 3}, {0, 1}), {{"a", 2}, {"b", 3}}, {DType::f32}, cpu);
  const TensorView output(g_data, DType::f32, {2, 3}, {0, 1});
  expect_refused(
      [&] { kCheck.output("x", output, {{"a", 2}, {"b", 3}}, {DType::f32}, cpu); },
      "x: want an output whose elements do not share memory, got shape [2, 3] with strides [0, 1]");
  const ConstTensorView odd(reinterpret_cast<const char*>(g_data) + 2, DType::f32, {2});
  expect_refused([&] { kCheck.input("x", odd, {{"a", 2}}, {DType::f32}, cpu); },
                 "x: want memory aligned to 4 bytes, got an address 2 bytes beyond");
}

}  // namespace
}  // namespace winnow
