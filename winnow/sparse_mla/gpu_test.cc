// What only a GPU can show of the sparse MLA kernels, beyond the case table: repeats, streams,
// graph capture, sizes past 2^31, rejections. The CPU backend is the reference. Skipped without a
// GPU.
#include <array>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/sparse_mla/test_gpu.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::sparse_mla {
namespace {

// Outputs of both operations on one device.
struct Results {
  Tensor out, max_logits, lse, attn_sum, extra_attn_sum;

  Results(const CaseShape& shape, Device device)
      : out(shape.dtype, {shape.s_q, shape.h_q, kValueDim}, device),
        max_logits(DType::f32, {shape.s_q, shape.h_q}, device),
        lse(DType::f32, {shape.s_q, shape.h_q}, device),
        attn_sum(DType::f32, {shape.s_q, shape.topk}, device),
        extra_attn_sum(DType::f32, {shape.s_q, shape.extra ? shape.extra->topk : 0}, device) {}

  // Both operations on inputs of the same device; `lse` may come from another result.
  void run(const CaseInputs& inputs, const RunOptions& options = {}) {
    ForwardArgs args{.out = out, .max_logits = max_logits, .lse = lse};
    inputs.pass_to(args);
    forward(args, options);
    DistributionArgs distribution_args{.lse = lse, .attn_sum = attn_sum};
    inputs.pass_to(distribution_args);
    if (inputs.extra.kv.view.present()) distribution_args.extra_attn_sum = extra_attn_sum;
    distribution(distribution_args, options);
  }
};

void expect_same(const Results& gpu, const Results& cpu, const CaseShape& shape) {
  expect_close("out", gpu.out, cpu.out, Quantity::out, shape);
  expect_close("lse", gpu.lse, cpu.lse, Quantity::lse, shape);
  expect_close("max_logits", gpu.max_logits, cpu.max_logits, Quantity::max_logits, shape);
  expect_close("attn_sum", gpu.attn_sum, cpu.attn_sum, Quantity::attn_sum, shape);
  if (!shape.extra) return;
  expect_close("extra_attn_sum", gpu.extra_attn_sum, cpu.extra_attn_sum, Quantity::attn_sum, shape);
}

// The GPU gives these bits again and again.
void expect_repeats(const Results& first, const CaseInputs& inputs, const CaseShape& shape) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Results next(shape, kGpu);
    next.run(inputs);
    for (Tensor Results::* result : {&Results::out, &Results::lse, &Results::max_logits,
                                     &Results::attn_sum, &Results::extra_attn_sum}) {
      ASSERT_TRUE(same_bytes(next.*result, first.*result)) << "repeat " << repeat;
    }
  }
}

void expect_same_as_cpu(const CaseInputs& inputs, const CaseShape& shape, bool repeats = false) {
  Results cpu(shape, {}), gpu(shape, kGpu);
  cpu.run(inputs);
  const CaseInputs there = inputs.on(kGpu);
  gpu.run(there);
  expect_same(gpu, cpu, shape);
  if (repeats) expect_repeats(gpu, there, shape);
}

class SparseMlaGpu : public GpuTest {};

TEST_F(SparseMlaGpu, MixedLengthsInOneLaunch) {
  for (const std::int64_t heads : {16, 64, 128, 192}) {
    CaseShape shape = small_shape("mixed-lengths");
    shape.h_q = heads;
    CaseInputs inputs = make_inputs(shape);
    inputs.topk_length = testing::make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    const std::int32_t lengths[] = {0, 1, 63, 64, 65, 128, 129, 200, 1000, -5};
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      inputs.topk_length.view.at<std::int32_t>(i) = lengths[(i * 7) % 10];
    }
    expect_same_as_cpu(inputs, shape);
  }
}

TEST_F(SparseMlaGpu, TwentyRepeatsAreBitwiseEqual) {
  for (const std::int64_t heads : {64, 128, 192}) {
    CaseShape shape = small_shape("repeats");
    shape.h_q = heads;
    shape.s_kv = 5000;
    shape.topk = 2048;
    const CaseInputs inputs = make_inputs(shape).on(kGpu);
    Results first(shape, kGpu);
    first.run(inputs);
    expect_repeats(first, inputs, shape);
  }
}

// Where items do not fill a last round, parts of them are handed on from block to block.
TEST_F(SparseMlaGpu, AWorkspaceChangesNoBit) {
  int handed_on = 0;
  for (const std::int64_t queries : {132, 140, 190, 263, 265, 301, 700}) {
    for (const bool ragged : {false, true}) {
      CaseShape shape = small_shape("workspace");
      shape.s_q = queries;
      shape.h_q = queries % 2 == 0 ? 64 : 100;
      shape.s_kv = 5000;
      shape.topk = ragged ? 2000 : 2048;
      if (queries % 5 == 0) shape.extra = ExtraShape{.s_kv = 3000, .topk = 900};
      if (ragged) shape.lengths = Lengths::ragged;
      const CaseInputs inputs = make_inputs(shape).on(kGpu);
      Results without(shape, kGpu);
      without.run(inputs);
      ForwardArgs args;
      inputs.pass_to(args);
      Results with(shape, kGpu);
      args.out = with.out, args.lse = with.lse, args.max_logits = with.max_logits;
      const std::int64_t bytes = forward_workspace_bytes(args);
      if (bytes == 0) continue;
      ++handed_on;
      Tensor workspace(DType::u8, {bytes}, kGpu);
      args.workspace = workspace;
      for (int repeat = 0; repeat < 5; ++repeat) {
        forward(args);
        ASSERT_TRUE(same_bytes(with.out, without.out)) << queries << ragged;
        ASSERT_TRUE(same_bytes(with.lse, without.lse)) << queries << ragged;
        ASSERT_TRUE(same_bytes(with.max_logits, without.max_logits)) << queries << ragged;
      }
    }
  }
  EXPECT_GE(handed_on, 4);
}

TEST_F(SparseMlaGpu, MoreQueriesThanAGridDimension) {
  CaseShape shape = small_shape("many-queries");
  shape.s_q = 70000;
  shape.h_q = 2;
  shape.topk = 70;
  const CaseInputs inputs = make_inputs(shape);
  expect_same_as_cpu(inputs, shape);
}

// 64 rows of a cache that spans 6 GB: their offsets pass 2^31 elements.
TEST_F(SparseMlaGpu, CacheBeyondTwoToTheThirtyOneElements) {
  constexpr std::int64_t kRows = 100000, kStride = 30000;
  CaseShape shape = small_shape("far-rows");
  shape.s_q = 3;
  shape.s_kv = 64;
  shape.topk = 64;
  const CaseInputs near = make_inputs(shape);
  Results cpu(shape, {}), gpu(shape, kGpu);
  cpu.run(near);

  CaseInputs far = near.on(kGpu);
  const Tensor storage(DType::bf16, {kRows, kStride}, kGpu);
  const auto far_row = [](std::int64_t t) { return t * ((kRows - 1) / 63); };
  for (std::int64_t t = 0; t < shape.s_kv; ++t) {
    copy_between(static_cast<char*>(const_cast<void*>(storage.data())) + far_row(t) * kStride * 2,
                 kGpu, &near.kv.view.at<BFloat16>(t, 0, 0), {}, std::size_t(shape.d_qk) * 2);
  }
  Tensor indices(DType::i32, {shape.s_q, 1, shape.topk});
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    for (std::int64_t j = 0; j < shape.topk; ++j) {
      indices.view().at<std::int32_t>(i, 0, j) =
          static_cast<std::int32_t>(far_row(near.indices.view.at<std::int32_t>(i, 0, j)));
    }
  }
  far.indices = testing::on(kGpu, {indices.clone(), {}});
  Tensor indices_there = indices.to(kGpu);
  far.indices.view = indices_there;
  far.kv.view = TensorView(const_cast<void*>(storage.data()), DType::bf16, {kRows, 1, shape.d_qk},
                           {kStride, kStride, 1}, kGpu);
  gpu.run(far);
  expect_same(gpu, cpu, shape);
}

// Dense attention: ranges of every length and place in one launch, empty ones among them, and
// results that are the same run after run.
TEST_F(SparseMlaGpu, DenseRangesOfEveryPlace) {
  for (const std::int64_t heads : {16, 64, 128, 192}) {
    CaseShape shape = small_shape("dense-places");
    shape.h_q = heads;
    shape.topk = shape.s_kv;
    shape.ranges = Ranges::ragged;
    CaseInputs inputs = make_inputs(shape);
    const std::int32_t places[] = {0, 1, 63, 64, 65, 127, 128, 500, 999, 1000};
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      inputs.key_start.view.at<std::int32_t>(i) = places[i % 10];
      inputs.key_end.view.at<std::int32_t>(i) = places[i / 10 % 10];
    }
    testing::Random random(1);
    testing::fill_normal(inputs.kv.view, random);  // all rows are seen now
    expect_same_as_cpu(inputs, shape, true);
  }
}

// Two sources: ranges of every length and place beside lists of every length, in one launch.
TEST_F(SparseMlaGpu, TwoSourcesOfEveryPlace) {
  for (const std::int64_t heads : {16, 64, 128, 192}) {
    for (const bool range_first : {false, true}) {
      CaseShape shape = small_shape("two-places");
      shape.h_q = heads;
      shape.d_qk = heads == 128 ? 576 : 512;
      shape.q_start = 700;
      shape.lengths = range_first ? Lengths::absent : Lengths::ragged;
      shape.ranges = range_first ? Ranges::ragged : Ranges::absent;
      if (range_first) shape.topk = shape.s_kv;
      shape.extra = ExtraShape{.s_kv = 500, .topk = range_first ? 130 : 500, .k_stride = 2};
      shape.extra->lengths = range_first ? Lengths::ragged : Lengths::absent;
      shape.extra->ranges = range_first ? Ranges::absent : Ranges::ragged;
      shape.poison = false;
      CaseInputs inputs = make_inputs(shape);
      SourceInputs& ranged = range_first ? inputs : inputs.extra;
      const std::int32_t places[] = {0, 1, 63, 64, 65, 127, 128, 250, 499, 500};
      for (std::int64_t i = 0; i < shape.s_q; ++i) {
        ranged.key_start.view.at<std::int32_t>(i) = places[i % 10];
        ranged.key_end.view.at<std::int32_t>(i) = places[i / 10 % 10];
      }
      expect_same_as_cpu(inputs, shape, true);
    }
  }
}

#if WINNOW_WITH_CUDA
// A graph reads the ranges anew at every launch.
TEST_F(SparseMlaGpu, DenseRangesChangeInAGraph) {
  CaseShape shape = small_shape("dense-graph");
  shape.topk = shape.s_kv;
  shape.ranges = Ranges::ragged;
  shape.poison = false;
  CaseInputs inputs = make_inputs(shape);
  const CaseInputs there = inputs.on(kGpu);
  Results gpu(shape, kGpu);
  const testing::CudaStream stream;
  const testing::Graph graph(stream.stream, [&] { gpu.run(there, stream.options()); });
  testing::Random random(2);
  for (int launch = 0; launch < 20; ++launch) {
    for (StridedTensor* limit : {&inputs.key_start, &inputs.key_end}) {
      testing::fill_below(limit->view, random, shape.s_kv + 20);
    }
    for (const auto& [to, from] : {std::pair{&there.key_start, &inputs.key_start},
                                   std::pair{&there.key_end, &inputs.key_end}}) {
      copy_between(to->view.data(), kGpu, from->view.data(), {},
                   static_cast<std::size_t>(shape.s_q) * sizeof(std::int32_t));
    }
    graph.launch(stream.stream);
    stream.wait();
    Results cpu(shape, {});
    cpu.run(inputs);
    expect_same(gpu, cpu, shape);
  }
}
#endif

template <class Call>
void expect_refused(const Call& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << text;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST_F(SparseMlaGpu, RefusesAndWorksOn) {
  const CaseShape shape = small_shape("refusals");
  const CaseInputs host = make_inputs(shape);
  const CaseInputs inputs = host.on(kGpu);
  Results gpu(shape, kGpu), cpu(shape, {});
  ForwardArgs good{.out = gpu.out, .max_logits = gpu.max_logits, .lse = gpu.lse};
  inputs.pass_to(good);

  ForwardArgs mixed = good;
  mixed.kv = host.kv.view;
  expect_refused([&] { forward(mixed); }, "kv: want device cuda:0, got cpu");
  ForwardArgs misaligned = good;
  const Tensor wide(DType::bf16, {shape.s_kv, 1, shape.d_qk + 1}, kGpu);
  misaligned.kv = wide.view().slice(2, 0, shape.d_qk);
  expect_refused([&] { forward(misaligned); }, "kv: want memory aligned to 16 bytes");
  CaseShape f32 = shape;
  f32.dtype = DType::f32;
  const CaseInputs wrong = make_inputs(f32).on(kGpu);
  Results f32_results(f32, kGpu);
  expect_refused([&] { f32_results.run(wrong); },
                 "q: want dtype bf16 or f16 on a GPU (the CPU takes f32), got f32");
  ForwardArgs elsewhere = good;
  elsewhere.q = ConstTensorView(good.q.data(), DType::bf16, good.q.shape(), {DeviceType::cuda, 99});
  expect_refused([&] { forward(elsewhere); }, "kv: want device cuda:99, got cuda:0");
  expect_refused([&] { forward(good, {.backend = Backend::cpu}); },
                 "backend: want one that supports tensors on cuda:0, got cpu");

  cpu.run(host);
  gpu.run(inputs);
  expect_same(gpu, cpu, shape);
}

// Everything is checked, sizes included, on tensors that are only described.
TEST_F(SparseMlaGpu, ADryRunAsksTheBackend) {
  const auto ask = [](DType dtype, std::int64_t s_q, std::int64_t h_q, std::int64_t topk) {
    char address[256];
    const auto view = [&](DType type, std::initializer_list<std::int64_t> shape) {
      const auto aligned = (reinterpret_cast<std::uintptr_t>(address) + 255) / 256 * 256;
      return TensorView(reinterpret_cast<void*>(aligned), type, shape, kGpu);
    };
    const TensorView q = view(dtype, {s_q, h_q, 576}), kv = view(dtype, {100, 1, 576});
    const TensorView indices = view(DType::i32, {s_q, 1, topk}),
                     lse = view(accumulator_of(dtype), {s_q, h_q});
    const TensorView out = view(dtype, {s_q, h_q, kValueDim});
    const RunOptions dry{.dry_run = true};
    EXPECT_EQ(forward({.q = q, .kv = kv, .indices = indices, .out = out}, dry), Backend::sm90);
    EXPECT_EQ(distribution({.q = q,
                            .kv = kv,
                            .indices = indices,
                            .lse = lse,
                            .attn_sum = view(accumulator_of(dtype), {s_q, topk})},
                           dry),
              Backend::sm90);
  };
  ask(DType::bf16, 4096, 128, 2048);
  expect_refused([&] { ask(DType::f32, 1, 1, 1); },
                 "q: want dtype bf16 or f16 on a GPU (the CPU takes f32), got f32");
  expect_refused([&] { ask(DType::f64, 1, 1, 1); },
                 "q: want dtype bf16 or f16 on a GPU (the CPU takes f64), got f64");
  expect_refused([&] { ask(DType::bf16, std::int64_t{1} << 24, 128, 1); },
                 "sm90: want topk and s_q * h_q up to 2^30, got topk 1, s_q 16777216, h_q 128");
}

#if WINNOW_WITH_CUDA

using winnow::testing::CudaStream;
using winnow::testing::Graph;

// One capture, replayed with new numbers in the same memory: equal to running anew. Whatever the
// first call loads, it loads under capture too: `make test-gpu` runs this test in a process of its
// own.
TEST_F(SparseMlaGpu, TheFirstCallMayBeCapturedAndReplayedWithNewData) {
  const CaseShape shape = small_shape("graph");
  CaseInputs inputs = make_inputs(shape).on(kGpu);
  Results captured(shape, kGpu), eager(shape, kGpu);
  const CudaStream stream;
  const Graph graph(stream.stream, [&] { captured.run(inputs, stream.options()); });

  for (int replay = 0; replay < 1000; ++replay) {
    if (replay % 100 == 0) {
      CaseShape other = shape;
      other.name += std::to_string(replay);
      const CaseInputs fresh = make_inputs(other);
      for (StridedTensor CaseInputs::* member :
           {&CaseInputs::q, static_cast<StridedTensor CaseInputs::*>(&CaseInputs::kv),
            static_cast<StridedTensor CaseInputs::*>(&CaseInputs::indices)}) {
        const Tensor& from = (fresh.*member).storage;
        copy_between((inputs.*member).storage.data(), kGpu, from.data(), {},
                     std::size_t(from.numel() * size_of(from.dtype())));
      }
    }
    graph.launch(stream.stream);
    if (replay % 100 != 0 && replay % 100 != 99) continue;
    stream.wait();
    eager.run(inputs);
    ASSERT_TRUE(same_bytes(captured.out, eager.out)) << "replay " << replay;
    ASSERT_TRUE(same_bytes(captured.attn_sum, eager.attn_sum)) << "replay " << replay;
  }
}

TEST_F(SparseMlaGpu, RunsOnTheDeviceOfTheTensors) {
  const CaseShape shape = small_shape("second-gpu");
  const CaseInputs inputs = make_inputs(shape);
  testing::expect_runs_on_second_gpu([&](Device second) {
    Results cpu(shape, {}), gpu(shape, second);
    cpu.run(inputs);
    gpu.run(inputs.on(second));
    expect_same(gpu, cpu, shape);
  });
}

#endif

}  // namespace
}  // namespace winnow::sparse_mla
