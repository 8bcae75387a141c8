// What only a GPU can show of layout, beyond the case table: indices outside, with and without
// checking mode, graph capture, calls on streams. Skipped without a GPU.
#include <cstdlib>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/gpu_test.h"
#include "winnow/testing/strided.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::expert_parallel {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr std::int64_t kExperts = 8, kRanks = 4, kLocals = 2;

// The outputs of a call, on one device.
struct Outputs {
  Tensor per_rank, per_node, per_expert, in_rank;
  Outputs(std::int64_t tokens, Device device)
      : per_rank(unwritten(DType::i32, {kRanks}, device)),
        per_node(unwritten(DType::i32, {kRanks / kLocals}, device)),
        per_expert(unwritten(DType::i32, {kExperts}, device)),
        in_rank(unwritten(DType::u8, {tokens, kRanks}, device)) {}

  static Tensor unwritten(DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
    Tensor tensor(dtype, shape);
    testing::fill_unwritten(tensor);
    return tensor.to(device);
  }
  LayoutArgs args(const ConstTensorView& indices) {
    return {.expert_indices = indices,
            .experts = kExperts,
            .world_size = kRanks,
            .local_world_size = kLocals,
            .tokens_per_rank = per_rank,
            .tokens_per_node = per_node,
            .tokens_per_expert = per_expert,
            .is_token_in_rank = in_rank};
  }
  bool same(const Outputs& other) const {
    return testing::same_bytes(per_rank.to({}), other.per_rank.to({})) &&
           testing::same_bytes(per_node.to({}), other.per_node.to({})) &&
           testing::same_bytes(per_expert.to({}), other.per_expert.to({})) &&
           testing::same_bytes(in_rank.to({}), other.in_rank.to({}));
  }
};

class LayoutGpu : public testing::GpuTest<Backend::cuda> {
 protected:
  static Tensor make_indices(std::int64_t tokens, std::int64_t topk, std::uint64_t seed) {
    Tensor indices(DType::i32, {tokens, topk});
    testing::Random random(seed);
    choose_experts(indices, random, kExperts, ExpertChoice::duplicates);
    return indices;
  }
};

#if WINNOW_WITH_CUDA

// Must run first in its process to show what the name says: `make test-gpu` does.
TEST_F(LayoutGpu, TheFirstCallMayBeCaptured) {
  const Tensor first = make_indices(300, 3, 1), second = make_indices(300, 3, 2);
  Tensor there = first.to(kGpu);
  Outputs gpu(300, kGpu);
  const testing::CudaStream stream;
  const testing::Graph graph(stream.stream, [&] {
    RunOptions options = stream.options();
    layout(gpu.args(there), options);
    options.check = true;
    testing::expect_error([&] { layout(gpu.args(there), options); }, ErrorCode::unsupported,
                          "expert_parallel::layout: checking mode waits for the stream, which a "
                          "stream in capture does not allow");
  });
  for (const Tensor* indices : {&first, &second, &first}) {
    copy_between(there.data(), kGpu, indices->data(), {},
                 static_cast<std::size_t>(indices->numel()) * sizeof(std::int32_t));
    graph.launch(stream.stream);
    stream.wait();
    Outputs cpu(300, {});
    layout(cpu.args(*indices));
    EXPECT_TRUE(gpu.same(cpu));
  }
}

TEST_F(LayoutGpu, ABadIndexIsNoExpert) {
  for (const std::int32_t bad : {9, -2, std::numeric_limits<std::int32_t>::max(),
                                 std::numeric_limits<std::int32_t>::min()}) {
    Tensor indices = make_indices(70, 5, 3);
    indices.view().at<std::int32_t>(69, 4) = bad;
    indices.view().at<std::int32_t>(31, 0) = bad;
    const Tensor there = indices.to(kGpu);
    Outputs gpu(70, kGpu), cpu(70, {});
    EXPECT_EQ(layout(gpu.args(there)), Backend::cuda);
    indices.view().at<std::int32_t>(69, 4) = indices.view().at<std::int32_t>(31, 0) = -1;
    layout(cpu.args(indices));
    EXPECT_TRUE(gpu.same(cpu)) << bad;
  }
}

TEST_F(LayoutGpu, CheckingModeNamesABadIndexAsTheCpuDoes) {
  Tensor indices = make_indices(70, 5, 3);
  indices.view().at<std::int32_t>(31, 2) = 9;
  RunOptions checking;
  checking.check = true;
  const std::string text =
      "expert_parallel::layout: expert_indices: want -1 to 8 (-1 and 8 name no expert), got 9 "
      "for token 31, k 2";
  const Tensor dense = indices.to(kGpu);
  Outputs gpu(70, kGpu);
  testing::expect_error([&] { layout(gpu.args(dense), checking); }, ErrorCode::invalid_argument,
                        text);
  EXPECT_TRUE(gpu.same(Outputs(70, {})));  // nothing was written
  // With gaps between the rows.
  auto wide = testing::make_tensor(DType::i32, {70, 5}, testing::Layout::wide, {.length = 1});
  for (std::int64_t t = 0; t < 70; ++t) {
    for (std::int64_t k = 0; k < 5; ++k) {
      wide.view.at<std::int32_t>(t, k) = indices.view().at<std::int32_t>(t, k);
    }
  }
  const auto wide_there = testing::on(kGpu, wide);
  testing::expect_error([&] { layout(gpu.args(wide_there.view), checking); },
                        ErrorCode::invalid_argument, text);
  setenv("WINNOW_CHECK", "1", 1);
  testing::expect_error([&] { layout(gpu.args(dense)); }, ErrorCode::invalid_argument, text);
  unsetenv("WINNOW_CHECK");
}

// Every K, whose lanes share a warp in other ways, and more tokens than one pass of the grid.
TEST_F(LayoutGpu, AnyK) {
  for (std::int64_t topk = 1; topk <= 32; ++topk) {
    const std::int64_t tokens = topk == 32 ? 100003 : 1000 + topk;
    const Tensor indices = make_indices(tokens, topk, std::uint64_t(topk)),
                 there = indices.to(kGpu);
    Outputs gpu(tokens, kGpu), cpu(tokens, {});
    layout(gpu.args(there));
    layout(cpu.args(indices));
    EXPECT_TRUE(gpu.same(cpu)) << topk;
  }
}

#endif

}  // namespace
}  // namespace winnow::expert_parallel
