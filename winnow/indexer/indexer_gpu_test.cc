// What only a GPU can show of topk, scores and backward, beyond the case table: graph capture and
// replays with other ranges, repeats, the size of the workspace, rows past 2^31, rejections.
// quantize_gpu_test has the same of quantize. Skipped without a GPU.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/indexer/backward/backward.h"
#include "winnow/indexer/cases.h"
#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/topk/topk.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/gpu_test.h"

namespace winnow::indexer {
namespace {

using winnow::testing::expect_error;

constexpr Device kGpu{DeviceType::cuda, 0};

class IndexerGpu : public winnow::testing::GpuTest<Backend::sm90> {};

CaseShape small_shape(DType dtype) {
  return {.name = "gpu",
          .dtype = dtype,
          .s_q = 70,
          .h = 32,
          .s_k = 1500,
          .topk = 100,
          .ranges = Ranges::ragged,
          .poison = false};
}

bool same(const Tensor& a, const Tensor& b) {
  return winnow::testing::same_bytes(a.to({}), b.to({}));
}

// The outputs of the operations on one device.
struct Results {
  CaseShape shape;
  Tensor indices, length, chosen, dense, d_scores, dq, dk, d_weights, workspace;

  Results(const CaseShape& s, Device device)
      : shape(s),
        indices(DType::i32, {s.s_q, s.topk}, device),
        length(DType::i32, {s.s_q}, device),
        chosen(DType::f32, {s.s_q, s.topk}, device),
        dense(DType::f32, {s.s_q, s.s_k}, device),
        dq(s.dtype == DType::f16 ? DType::f16 : DType::bf16, {s.s_q, s.h, s.d}, device),
        dk(DType::f32, {s.s_k, s.d}, device),
        d_weights(DType::f32, {s.s_q, s.h}, device),
        workspace(DType::u8, {std::int64_t{64} << 20}, device) {
    Tensor gradients(DType::f32, {s.s_q, s.topk});
    winnow::testing::Random random(9);
    winnow::testing::fill_normal(gradients, random);
    d_scores = gradients.to(device);
  }

  void run(const CaseInputs& inputs, const RunOptions& options = {}) {
    TopkArgs choice{.indices = indices, .length = length, .scores = chosen, .workspace = workspace};
    inputs.pass_to(choice);
    topk(choice, options);
    ScoresArgs all{.scores = dense};
    inputs.pass_to(all);
    scores(all, options);
    BackwardArgs gradients{.indices = indices,
                           .d_scores = d_scores,
                           .deterministic = true,
                           .dq = dq,
                           .dk = dk,
                           .d_weights = d_weights,
                           .workspace = workspace};
    inputs.pass_to(gradients);
    backward(gradients, options);
  }

  void expect_same(const Results& other) const {
    EXPECT_TRUE(same(indices, other.indices));
    EXPECT_TRUE(same(length, other.length));
    EXPECT_TRUE(same(chosen, other.chosen));
    EXPECT_TRUE(same(dense, other.dense));
    EXPECT_TRUE(same(dq, other.dq));
    EXPECT_TRUE(same(dk, other.dk));
    EXPECT_TRUE(same(d_weights, other.d_weights));
  }
};

TEST_F(IndexerGpu, RepeatsAreTheSame) {
  for (const auto& [backend, dtype] :
       {std::pair{Backend::sm90, DType::bf16}, std::pair{Backend::sm90, DType::f8_e4m3},
        std::pair{Backend::cuda, DType::f16}, std::pair{Backend::cuda, DType::bf16},
        std::pair{Backend::cuda, DType::f8_e4m3}}) {
    const RunOptions options{.backend = backend};
    const CaseShape shape = small_shape(dtype);
    const CaseInputs there = make_inputs(shape).on(kGpu);
    Results first(shape, kGpu);
    first.run(there, options);
    for (int repeat = 0; repeat < 20; ++repeat) {
      Results next(shape, kGpu);
      next.run(there, options);
      next.expect_same(first);
      if (HasFailure()) FAIL() << "repeat " << repeat;
    }
  }
}

// Most rows of a plateau have the score 0, which is exact on every backend: so the rows are those
// that the CPU chooses.
TEST_F(IndexerGpu, PlateausOfZerosAreChosenAsOnTheCpu) {
  for (const DType dtype : {DType::bf16, DType::f8_e4m3}) {
    for (const std::int64_t h : {16, 33, 64, 100, 128}) {
      for (const std::int64_t s_k : {1500, 33000}) {  // with stored scores, and without
        for (const Ties ties : {Ties::smaller, Ties::larger}) {
          CaseShape shape = small_shape(dtype);
          shape.s_q = 9;
          shape.h = h;
          shape.s_k = s_k;
          shape.topk = s_k / 2;
          shape.ranges = Ranges::absent;
          shape.order = Order::plateau;
          const CaseInputs inputs = make_inputs(shape);
          const auto choose = [&](const CaseInputs& given, Backend backend) {
            const Device device = backend == Backend::cpu ? Device() : kGpu;
            Tensor indices(DType::i32, {shape.s_q, shape.topk}, device);
            Tensor length(DType::i32, {shape.s_q}, device);
            TopkArgs args{.ties = ties, .indices = indices, .length = length};
            given.pass_to(args);
            topk(args, {.backend = backend});
            return indices.to({});
          };
          const Tensor want = choose(inputs, Backend::cpu);
          const CaseInputs there = inputs.on(kGpu);
          for (const Backend backend : {Backend::sm90, Backend::cuda}) {
            EXPECT_TRUE(winnow::testing::same_bytes(want, choose(there, backend)))
                << to_string(backend) << ", " << to_string(dtype) << ", " << h << " heads, " << s_k
                << " rows";
          }
        }
      }
    }
  }
}

#if WINNOW_WITH_CUDA

// New ranges in the memory of `there`; `length` must then be what `here` says.
void change_ranges(CaseInputs& here, const CaseInputs& there, winnow::testing::Random& random,
                   const CaseShape& shape) {
  for (StridedTensor* limit : {&here.key_start, &here.key_end}) {
    winnow::testing::fill_below(limit->view, random, shape.s_k + 20);
  }
  const auto bytes = static_cast<std::size_t>(shape.s_q) * sizeof(std::int32_t);
  copy_between(there.key_start.view.data(), kGpu, here.key_start.view.data(), {}, bytes);
  copy_between(there.key_end.view.data(), kGpu, here.key_end.view.data(), {}, bytes);
}

void expect_lengths(const Results& results, const CaseInputs& inputs, const CaseShape& shape) {
  const Tensor lengths = results.length.to({});
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    const std::int64_t start = std::max(inputs.key_start.view.at<std::int32_t>(i), 0);
    const std::int64_t end =
        std::min<std::int64_t>(inputs.key_end.view.at<std::int32_t>(i), shape.s_k);
    EXPECT_EQ(lengths.view().at<std::int32_t>(i),
              std::min(shape.topk, std::max<std::int64_t>(0, end - start)))
        << "query " << i;
  }
}

// A graph reads the ranges anew at every launch, whatever the launch before had seen. Must run
// first in its process to show what the name says: `make test-gpu` does.
TEST_F(IndexerGpu, TheFirstCallMayBeCapturedAndReplaysFollowTheRanges) {
  for (const DType dtype : {DType::bf16, DType::f8_e4m3}) {
    const CaseShape shape = small_shape(dtype);
    CaseInputs here = make_inputs(shape);
    const CaseInputs there = here.on(kGpu);
    Results captured(shape, kGpu), eager(shape, kGpu);
    const winnow::testing::CudaStream stream;
    const winnow::testing::Graph graph(stream.stream,
                                       [&] { captured.run(there, stream.options()); });
    winnow::testing::Random random(5);
    for (int replay = 0; replay < 1000; ++replay) {
      change_ranges(here, there, random, shape);
      graph.launch(stream.stream);
      stream.wait();
      expect_lengths(captured, here, shape);
      if (replay % 50 == 0) {
        eager.run(there);
        captured.expect_same(eager);
      }
      if (HasFailure()) FAIL() << "replay " << replay;
    }
  }
}

TEST_F(IndexerGpu, RunsOnTheDeviceOfTheTensors) {
  winnow::testing::expect_runs_on_second_gpu([](Device second) {
    for (const DType dtype : {DType::bf16, DType::f8_e4m3}) {
      const CaseShape shape = small_shape(dtype);
      const CaseInputs inputs = make_inputs(shape);
      Results here(shape, kGpu), there(shape, second);
      here.run(inputs.on(kGpu));
      there.run(inputs.on(second));
      there.expect_same(here);
    }
  });
}

#endif

// Of tensors that are only described: 256 MiB are enough whatever s_q * s_k is.
TEST_F(IndexerGpu, TheWorkspaceIsBounded) {
  alignas(256) static char memory[256];
  const auto view = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView(memory, dtype, shape, kGpu);
  };
  for (const DType dtype : {DType::bf16, DType::f8_e4m3}) {
    for (const std::int64_t s_k : {8192, 131072, 1048576}) {
      for (const std::int64_t s_q : {1, 128, 4096, 131072, 1048576}) {
        for (const std::int64_t topk_rows : {512, 2048, 8192, 1 << 19}) {
          for (const std::int64_t h : {16, 64}) {  // of 16 heads a block takes the most queries
            TopkArgs args{.q = view(dtype, {s_q, h, 128}),
                          .k = view(dtype, {s_k, 128}),
                          .weights = view(DType::f32, {s_q, h}),
                          .indices = view(DType::i32, {s_q, topk_rows}),
                          .length = view(DType::i32, {s_q})};
            if (dtype == DType::f8_e4m3) args.k_scale = view(DType::f32, {s_k});
            for (const Backend backend : {Backend::sm90, Backend::cuda}) {
              EXPECT_LE(topk_workspace_bytes(args, {.backend = backend}), std::int64_t{256} << 20)
                  << to_string(backend) << ", " << to_string(dtype) << ", " << s_q << " x " << s_k
                  << ", topk " << topk_rows;
            }
          }
        }
      }
    }
  }
}

// More queries than the workspace holds scores of go in turns, with the results of calls of their
// own.
TEST_F(IndexerGpu, QueriesGoInTurns) {
  CaseShape shape = small_shape(DType::f8_e4m3);
  shape.s_q = 8200;
  shape.s_k = 8192;
  shape.q_start = 500;
  const CaseInputs there = make_inputs(shape).on(kGpu);
  struct Choice {
    Tensor indices, length, scores;
  };
  const auto choose = [&](std::int64_t begin, std::int64_t end) {
    Choice choice{Tensor(DType::i32, {end - begin, shape.topk}, kGpu),
                  Tensor(DType::i32, {end - begin}, kGpu),
                  Tensor(DType::f32, {end - begin, shape.topk}, kGpu)};
    TopkArgs args{.indices = choice.indices, .length = choice.length, .scores = choice.scores};
    there.pass_to(args);
    for (ConstTensorView* of_queries : {&args.q, &args.weights, &args.key_start, &args.key_end}) {
      *of_queries = of_queries->slice(0, begin, end);
    }
    *args.q_start += begin;
    topk(args);
    return choice;
  };
  const Choice whole = choose(0, shape.s_q);
  for (const auto& [begin, end] : {std::pair{0, 4096}, std::pair{4096, 8200}}) {
    const Choice part = choose(begin, end);
    for (const auto member : {&Choice::indices, &Choice::length, &Choice::scores}) {
      const Tensor of_whole = (whole.*member).to({}), of_part = (part.*member).to({});
      const ConstTensorView expected = of_whole.view().slice(0, begin, end);
      const auto bytes = static_cast<std::size_t>(of_part.numel()) * sizeof(float);  // of either
      EXPECT_EQ(std::memcmp(expected.data(), of_part.data(), bytes), 0)
          << "queries " << begin << " to " << end;
    }
  }
}

// Keys, and rows of scores, whose offsets pass 2^31 elements.
TEST_F(IndexerGpu, MemoryBeyondTwoToTheThirtyOneElements) {
  constexpr std::int64_t kStride = std::int64_t{1} << 22;
  CaseShape shape = small_shape(DType::bf16);
  shape.s_k = 1000;
  const CaseInputs here = make_inputs(shape);
  const CaseInputs near = here.on(kGpu);
  Results expected(shape, kGpu), results(shape, kGpu);
  expected.run(near);

  CaseInputs far = here.on(kGpu);
  const Tensor keys(DType::bf16, {shape.s_k, kStride}, kGpu);
  far.k.view = TensorView(const_cast<void*>(keys.data()), DType::bf16, {shape.s_k, shape.d},
                          {kStride, 1}, kGpu);
  for (std::int64_t t = 0; t < shape.s_k; ++t) {
    copy_between(static_cast<char*>(far.k.view.data()) + t * kStride * 2, kGpu,
                 &here.k.view.at<BFloat16>(t, 0), {}, static_cast<std::size_t>(shape.d) * 2);
  }
  results.run(far);
  results.expect_same(expected);

  constexpr std::int64_t kRow = std::int64_t{1} << 26;  // of 70 queries: 4.7e9 elements, 18 GB
  const Tensor memory(DType::f32, {shape.s_q, kRow}, kGpu);
  ScoresArgs args{.scores = TensorView(const_cast<void*>(memory.data()), DType::f32,
                                       {shape.s_q, shape.s_k}, {kRow, 1}, kGpu)};
  near.pass_to(args);
  scores(args);
  Tensor row(DType::f32, {shape.s_k});
  const Tensor want = expected.dense.to({});
  for (const std::int64_t i : {std::int64_t{0}, shape.s_q / 2, shape.s_q - 1}) {
    copy_between(row.data(), {}, static_cast<const float*>(memory.data()) + i * kRow, kGpu,
                 static_cast<std::size_t>(shape.s_k) * sizeof(float));
    EXPECT_EQ(std::memcmp(row.data(), &want.view().at<float>(i, 0),
                          static_cast<std::size_t>(shape.s_k) * sizeof(float)),
              0)
        << "query " << i;
  }
}

TEST_F(IndexerGpu, RefusesAndWorksOn) {
  const CaseShape shape = small_shape(DType::bf16);
  const CaseInputs host = make_inputs(shape), there = host.on(kGpu);
  Results results(shape, kGpu), again(shape, kGpu);
  results.run(there);
  TopkArgs good{.indices = results.indices, .length = results.length};
  there.pass_to(good);

  TopkArgs mixed = good;
  mixed.k = host.k.view;
  expect_error([&] { topk(mixed); }, ErrorCode::invalid_argument,
               "indexer::topk: k: want device cuda:0, got cpu");
  TopkArgs misaligned = good;
  const Tensor wide(DType::bf16, {shape.s_k, shape.d + 1}, kGpu);
  misaligned.k = wide.view().slice(1, 0, shape.d);
  EXPECT_THROW(topk(misaligned), Error);
  TopkArgs small = good;
  const Tensor little(DType::u8, {256}, kGpu);
  small.workspace = TensorView(const_cast<void*>(little.data()), DType::u8, {256}, kGpu);
  EXPECT_THROW(topk(small), Error);
  EXPECT_THROW(topk(good, {.backend = Backend::cpu}), Error);

  again.run(there);
  again.expect_same(results);
}

}  // namespace
}  // namespace winnow::indexer
