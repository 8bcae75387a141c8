// What only a GPU can show of backward, beyond the case table: order and streams, graph capture,
// scratch memory, hot rows. Skipped without a GPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/sparse_mla/test_gpu.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::sparse_mla {
namespace {

// A problem with the outputs of backward, on one device. Outputs begin as NaN.
struct Step {
  CaseShape shape;
  CaseInputs inputs;
  Tensor out, lse, d_out, dq, dkv, dextra_kv, d_sink;

  // On the CPU, with out and lse of forward.
  explicit Step(const CaseShape& case_shape)
      : shape(case_shape),
        inputs(make_inputs(shape)),
        out(shape.dtype, {shape.s_q, shape.h_q, kValueDim}),
        lse(DType::f32, {shape.s_q, shape.h_q}),
        d_out(shape.dtype, {shape.s_q, shape.h_q, kValueDim}) {
    winnow::testing::Random random(winnow::testing::seed_from(shape.name + "-d-out"));
    winnow::testing::fill_normal(d_out, random);
    redo_forward();
    make_outputs({});
  }
  Step(const Step& host, Device device)
      : shape(host.shape),
        inputs(host.inputs.on(device)),
        out(host.out.to(device)),
        lse(host.lse.to(device)),
        d_out(host.d_out.to(device)) {
    make_outputs(device);
  }

  void redo_forward() {
    ForwardArgs args{.out = out, .lse = lse};
    inputs.pass_to(args);
    forward(args);
  }
  void make_outputs(Device device) {
    const auto unwritten = [device](DType dtype, std::vector<std::int64_t> sizes) {
      Tensor tensor(dtype, sizes);
      winnow::testing::fill_unwritten(tensor);
      return tensor.to(device);
    };
    dq = unwritten(shape.dtype, {shape.s_q, shape.h_q, shape.d_qk});
    dkv = unwritten(DType::f32, {shape.s_kv, 1, shape.d_qk});
    if (shape.extra) dextra_kv = unwritten(DType::f32, {shape.extra->s_kv, 1, shape.d_qk});
    if (inputs.attn_sink.view.present()) d_sink = unwritten(DType::f32, {shape.h_q});
  }
  BackwardArgs args() {
    BackwardArgs result{.out = out, .lse = lse, .d_out = d_out, .dq = dq, .dkv = dkv};
    if (inputs.attn_sink.view.present()) result.d_sink = d_sink;
    if (shape.extra) result.dextra_kv = dextra_kv;
    inputs.pass_to(result);
    return result;
  }
  void run(bool deterministic = false) {
    BackwardArgs all = args();
    all.deterministic = deterministic;
    backward(all);
  }
};

void expect_close(const Step& gpu, const Step& cpu) {
  expect_close("dq", gpu.dq, cpu.dq, Quantity::dq, cpu.shape);
  expect_close("dkv", gpu.dkv, cpu.dkv, Quantity::dkv, cpu.shape);
  if (cpu.shape.extra) {
    expect_close("dextra_kv", gpu.dextra_kv, cpu.dextra_kv, Quantity::dkv, cpu.shape);
  }
  if (cpu.d_sink.numel() > 0) {
    expect_close("d_sink", gpu.d_sink, cpu.d_sink, Quantity::d_sink, cpu.shape);
  }
}

void expect_same_as_cpu(Step& cpu) {
  Step gpu(cpu, kGpu);
  cpu.run();
  gpu.run();
  expect_close(gpu, cpu);
}

class BackwardGpu : public GpuTest {};

CaseShape shape_with_sink(const std::string& name) {
  CaseShape shape = small_shape(name);
  shape.sink = Sink::finite;
  return shape;
}

TEST_F(BackwardGpu, MixedLengthsInOneLaunch) {
  for (const std::int64_t heads : {16, 64, 128, 192}) {
    CaseShape shape = shape_with_sink("mixed-lengths");
    shape.h_q = heads;
    Step cpu(shape);
    cpu.inputs.topk_length = testing::make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    const std::int32_t lengths[] = {0, 1, 63, 64, 65, 128, 129, 200, 1000, -5};
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      cpu.inputs.topk_length.view.at<std::int32_t>(i) = lengths[(i * 7) % 10];
    }
    cpu.redo_forward();
    expect_same_as_cpu(cpu);
  }
}

// So long that the fused kernel itself forms delta, of queries of all lengths; two for each block
// and more.
TEST_F(BackwardGpu, LongQueries) {
  for (const std::int64_t d_qk : {576, 512}) {
    CaseShape shape = shape_with_sink("long-queries");
    shape.s_q = 280;
    shape.h_q = 40;
    shape.d_qk = d_qk;
    shape.s_kv = 3000;
    shape.topk = 1100;
    Step cpu(shape);
    cpu.inputs.topk_length = testing::make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    const std::int32_t lengths[] = {0, 1100, 1, 1024, 128, 1030, 1100, 300};
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      cpu.inputs.topk_length.view.at<std::int32_t>(i) = lengths[(i / 7 + i) % 8];
    }
    cpu.redo_forward();
    expect_same_as_cpu(cpu);
  }
}

// Every query chooses the same rows, so that all additions meet there.
TEST_F(BackwardGpu, RowsThatEveryQueryChooses) {
  CaseShape shape = shape_with_sink("hot-rows");
  shape.s_q = 1000;
  shape.h_q = 8;
  Step cpu(shape);
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    for (std::int64_t j = 0; j < shape.topk; ++j) {
      cpu.inputs.indices.view.at<std::int32_t>(i, 0, j) = static_cast<std::int32_t>(j % 3);
    }
  }
  cpu.redo_forward();
  expect_same_as_cpu(cpu);
}

// The same call again and again, in memory that is not cleared between: equal but for the order of
// the additions.
TEST_F(BackwardGpu, RepeatsAgree) {
  CaseShape shape = shape_with_sink("repeats");
  shape.s_kv = 5000;
  shape.topk = 2048;
  Step first(Step(shape), kGpu);
  first.run();
  Step next(Step(shape), kGpu);
  for (int repeat = 0; repeat < 20; ++repeat) {
    next.run();
    expect_close(next, first);
  }
}

TEST_F(BackwardGpu, DeterministicRepeatsAreBitwiseEqual) {
  for (const std::int64_t heads : {16, 64, 192}) {
    for (const Choice choice : {Choice::repeated, Choice::one_row}) {
      CaseShape shape = shape_with_sink("deterministic");
      shape.h_q = heads;
      shape.choice = choice;
      Step cpu(shape), first(cpu, kGpu), next(cpu, kGpu);
      cpu.run();
      first.run(true);
      expect_close(first, cpu);
      for (int repeat = 0; repeat < 10; ++repeat) {
        next.run(true);
        ASSERT_EQ(numbers(next.dq), numbers(first.dq)) << "repeat " << repeat;
        ASSERT_EQ(numbers(next.dkv), numbers(first.dkv)) << "repeat " << repeat;
        ASSERT_EQ(numbers(next.d_sink), numbers(first.d_sink)) << "repeat " << repeat;
      }
    }
  }
}

// A layer of DeepSeek-V4, smaller: a window of the last 128 rows beside a list or a range of rows
// that stand for 4 tokens each. Many more queries than blocks, so that neighbours add to the same
// rows at the same time, and a tail whose items are cut.
TEST_F(BackwardGpu, WindowBesideCompressedRows) {
  for (const std::int64_t heads : {40, 64, 130}) {
    for (const Ranges extra : {Ranges::absent, Ranges::whole}) {
      for (const std::int64_t d_qk : {512, 576}) {
        CaseShape shape = shape_with_sink("window");
        shape.s_q = 700;
        shape.h_q = heads;
        shape.d_qk = d_qk;
        shape.s_kv = shape.topk = 900;
        shape.ranges = Ranges::whole;
        shape.q_start = 200;
        shape.extra = ExtraShape{.s_kv = 225, .topk = 100, .ranges = extra, .k_stride = 4};
        if (extra != Ranges::absent) shape.extra->topk = shape.extra->s_kv;
        Step cpu(shape);
        for (std::int32_t i = 0; i < shape.s_q; ++i) {
          cpu.inputs.key_start.view.at<std::int32_t>(i) = 200 + i - 127;
        }
        cpu.redo_forward();
        Step gpu(cpu, kGpu), first(cpu, kGpu), next(cpu, kGpu);
        cpu.run();
        gpu.run();
        expect_close(gpu, cpu);
        for (Step* step : {&first, &next}) step->run(true);
        expect_close(first, cpu);
        EXPECT_TRUE(same_bytes(first.dq, next.dq) && same_bytes(first.dkv, next.dkv) &&
                    same_bytes(first.dextra_kv, next.dextra_kv) &&
                    same_bytes(first.d_sink, next.d_sink))
            << heads << " heads, d_qk " << d_qk;
      }
    }
  }
}

// The workspace does not grow with the rows that a range may have.
TEST_F(BackwardGpu, RangesTakeNoMemory) {
  CaseShape shape = shape_with_sink("ranges-memory");
  shape.s_q = 8;
  shape.ranges = Ranges::whole;
  const auto bytes_of = [&](std::int64_t rows, bool deterministic) {
    shape.s_kv = shape.topk = rows;
    Step gpu(Step(shape), kGpu);
    BackwardArgs args = gpu.args();
    args.deterministic = deterministic;
    return backward_workspace_bytes(args) - rows * shape.d_qk * 4;
  };
  // Deterministic: 20 bytes of each row's scale and bound, and its integers.
  EXPECT_LT(bytes_of(20000, false) - bytes_of(1000, false), 1000);
  EXPECT_LT(bytes_of(20000, true) - bytes_of(1000, true), 19000 * 40);
}

// Rounding to integers costs no more than rounding P and dS to bf16: in the worst row the error is
// below twice that of the f32 sums. Queries of very different sizes, and logits that leave most
// entries nothing.
TEST_F(BackwardGpu, DeterministicIsAsExact) {
  for (const std::int64_t heads : {64, 128}) {
    for (const double logits : {1.0, 8.0}) {
      CaseShape shape = shape_with_sink("deterministic-exact");
      shape.s_q = 600;
      shape.h_q = heads;
      shape.s_kv = 700;
      shape.topk = 600;
      shape.logits = logits;
      Step cpu(shape);
      auto* const d_out = static_cast<BFloat16*>(cpu.d_out.data());
      const std::int64_t values = heads * kValueDim;
      for (std::int64_t i = 0; i < shape.s_q * values; ++i) {
        d_out[i] =
            BFloat16(std::ldexp(static_cast<float>(d_out[i]), -static_cast<int>(i / values % 30)));
      }
      Step sums(cpu, kGpu), integers(cpu, kGpu);
      cpu.run();
      sums.run();
      integers.run(true);
      const std::vector<double> exact = numbers(cpu.dkv), a = numbers(sums.dkv),
                                b = numbers(integers.dkv);
      const auto columns = static_cast<std::size_t>(shape.d_qk);
      double worst = 0;
      for (std::size_t row = 0; row < exact.size() / columns; ++row) {
        double of_sums = 0, of_integers = 0;
        for (std::size_t n = row * columns; n < (row + 1) * columns; ++n) {
          of_sums += (a[n] - exact[n]) * (a[n] - exact[n]);
          of_integers += (b[n] - exact[n]) * (b[n] - exact[n]);
        }
        if (of_sums > 0) worst = std::max(worst, std::sqrt(of_integers / of_sums));
      }
      EXPECT_LT(worst, 2) << heads << " heads, logits " << logits;
      std::printf("error of integers beside that of sums, %d heads, logits %g: %g\n",
                  static_cast<int>(heads), logits, worst);
    }
  }
}

// Three chunks of queries: P and dS of 1056 take what memory there is for them, and the fused
// kernel takes 62 rounds of 132. Rows keep their scale from one chunk to the next, or lose it where
// the gradients of the first are smaller, or 0. With 17,000 queries a row is chosen some two
// hundred times in a chunk: thousands of times would leave an addend too few bits for the
// tolerance.
TEST_F(BackwardGpu, DeterministicInChunks) {
  struct Chunks {
    std::int64_t heads, queries, first, rows, topk;
  };
  for (const auto& [heads, queries, chunk, rows, topk] :
       {Chunks{128, 2500, 1056, 100, 2048}, Chunks{2, 17000, 8184, 2000, 100}}) {
    CaseShape shape = shape_with_sink("deterministic-chunks");
    shape.s_q = queries;
    shape.h_q = heads;
    shape.s_kv = rows;
    shape.topk = topk;
    shape.choice = Choice::repeated;
    Step all(shape);
    all.inputs.topk_length = testing::make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      all.inputs.topk_length.view.at<std::int32_t>(i) = static_cast<std::int32_t>(i % 90);
    }
    all.redo_forward();
    const std::vector<double> values = numbers(all.d_out);
    for (const double share : {1.0, 1.0 / 64, 0.0}) {
      Step cpu(all, Device{});
      auto* const d_out = static_cast<BFloat16*>(cpu.d_out.data());
      for (std::int64_t i = 0; i < chunk * heads * kValueDim; ++i) {
        d_out[i] = BFloat16(static_cast<float>(share * values[static_cast<std::size_t>(i)]));
      }
      Step first(cpu, kGpu), next(cpu, kGpu);
      cpu.run();
      for (Step* step : {&first, &next}) step->run(true);
      expect_close(first, cpu);
      EXPECT_TRUE(same_bytes(first.dq, next.dq) && same_bytes(first.dkv, next.dkv))
          << heads << " heads, " << share;
    }
  }
}

TEST_F(BackwardGpu, WorkspaceOfTheCaller) {
  const CaseShape shape = shape_with_sink("workspace");
  Step cpu(shape), gpu(cpu, kGpu);
  BackwardArgs args = gpu.args();
  const std::int64_t bytes = backward_workspace_bytes(args);
  EXPECT_GE(bytes, shape.s_kv * shape.d_qk * 4);
  EXPECT_EQ(backward_workspace_bytes(cpu.args()), 0);
  Tensor scratch(DType::u8, {bytes});
  std::memset(scratch.data(), 0xff, static_cast<std::size_t>(bytes));  // NaN wherever it is read
  Tensor there = scratch.to(kGpu);
  args.workspace = there;
  backward(args);
  cpu.run();
  expect_close(gpu, cpu);
}

#if WINNOW_WITH_CUDA

// One capture, with the memory of the pool and with memory of the caller, replayed with new numbers
// in the same tensors.
TEST_F(BackwardGpu, GraphReplaysWithNewData) {
  const CaseShape shape = shape_with_sink("graph");
  for (const bool own_memory : {false, true}) {
    Step cpu(shape), gpu(cpu, kGpu);
    BackwardArgs args = gpu.args();
    Tensor workspace;
    if (own_memory) {
      workspace = Tensor(DType::u8, {backward_workspace_bytes(args)}, kGpu);
      args.workspace = workspace;
    }
    const winnow::testing::CudaStream stream;
    const winnow::testing::Graph graph(stream.stream, [&] { backward(args, stream.options()); });
    for (int replay = 0; replay < 100; ++replay) {
      if (replay % 25 == 0) {
        winnow::testing::Random random(static_cast<std::uint64_t>(replay) + 1);
        winnow::testing::fill_normal(cpu.d_out, random);
        copy_between(gpu.d_out.data(), kGpu, cpu.d_out.data(), {},
                     std::size_t(cpu.d_out.numel() * size_of(shape.dtype)));
      }
      graph.launch(stream.stream);
      if (replay % 25 != 24) continue;
      stream.wait();
      cpu.run();
      expect_close(gpu, cpu);
    }
  }
}

TEST_F(BackwardGpu, RunsOnTheDeviceOfTheTensors) {
  testing::expect_runs_on_second_gpu([&](Device second) {
    Step cpu(shape_with_sink("second-gpu")), gpu(cpu, second);
    gpu.run();
    cpu.run();
    expect_close(gpu, cpu);
  });
}

#endif

}  // namespace
}  // namespace winnow::sparse_mla
