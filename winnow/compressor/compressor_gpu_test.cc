// What only a GPU can show of the compressor, beyond the case tables: that steps give the bits of
// forward(), lists that do not fit, with and without checking mode, tensors at odd addresses, the
// workspace, graph capture. Skipped without a GPU.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/cache/cache_cases.h"
#include "winnow/cache/key_page.h"
#include "winnow/compressor/backward/backward.h"
#include "winnow/compressor/cases.h"
#include "winnow/compressor/forward/forward.h"
#include "winnow/compressor/step/step.h"
#include "winnow/core/device_memory.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/gpu_test.h"

namespace winnow::compressor {
namespace {

using winnow::testing::same_bytes;

constexpr Device kGpu{DeviceType::cuda, 0};

class CompressorGpu : public winnow::testing::GpuTest<Backend::cuda> {};

#if WINNOW_WITH_CUDA

CaseShape shape_of(DType dtype, std::int64_t ratio, bool overlap, std::int64_t d,
                   std::vector<std::int64_t> lengths) {
  return {.name = "gpu",
          .dtype = dtype,
          .lengths = std::move(lengths),
          .ratio = ratio,
          .d = d,
          .overlap = overlap,
          .norm = true,
          .hadamard = d == 128,
          .pairs = 32,
          .poison = false};
}

Tensor list_of(const std::vector<std::int32_t>& numbers) {
  Tensor list(DType::i32, {static_cast<std::int64_t>(numbers.size())});
  std::copy(numbers.begin(), numbers.end(), list.values<std::int32_t>().begin());
  return list.to(kGpu);
}

Tensor unwritten(DType dtype, std::initializer_list<std::int64_t> sizes) {
  Tensor tensor(dtype, sizes);
  winnow::testing::fill_unwritten(tensor);
  return tensor.to(kGpu);
}

// Must run first in its process to show what the name says: `make test-gpu` does.
TEST_F(CompressorGpu, TheFirstCallMayBeCaptured) {
  const CaseShape shape = shape_of(DType::bf16, 4, true, 512, {41, 6});
  const CaseInputs inputs = make_inputs(shape).on(kGpu);
  Tensor captured = unwritten(DType::bf16, {shape.rows(), 512});
  ForwardArgs args{.rows = captured};
  inputs.pass_to(args);
  const winnow::testing::CudaStream stream;
  const winnow::testing::Graph graph(stream.stream, [&] { forward(args, stream.options()); });
  graph.launch(stream.stream);
  stream.wait();
  Tensor rows = unwritten(DType::bf16, {shape.rows(), 512});
  args.rows = rows;
  EXPECT_EQ(forward(args), Backend::cuda);
  EXPECT_TRUE(same_bytes(captured.to({}), rows.to({})));
}

// A sequence whose tokens come in calls that end where `ends` says.
struct Stepped {
  Tensor state, rows;

  Stepped(const CaseShape& shape, const CaseInputs& inputs, const std::vector<int>& ends)
      : state(unwritten(DType::f32,
                        {2, shape.columns() / shape.d * shape.ratio + 3, 2 * shape.columns()})),
        rows(unwritten(shape.dtype, {shape.tokens(), shape.d})) {
    int begin = 0;
    for (const int end : ends) {
      const Tensor cu_seqlens = list_of({0, end - begin}), first = list_of({begin}),
                   slot = list_of({1});
      StepArgs args{.overlap = shape.overlap, .hadamard = shape.hadamard, .state = state};
      args.kv = inputs.kv.view.slice(0, begin, end);
      args.gate = inputs.gate.view.slice(0, begin, end);
      args.position_bias = inputs.position_bias.view;
      args.cu_seqlens = cu_seqlens;
      args.first_position = first;
      args.state_slots = slot;
      args.norm_weight = inputs.norm_weight.view;
      args.cos = inputs.cos.view;
      args.sin = inputs.sin.view;
      args.rows = rows.view().slice(0, begin, end);
      EXPECT_EQ(step(args), Backend::cuda);
      synchronize(kGpu);
      begin = end;
    }
  }
};

TEST_F(CompressorGpu, StepsGiveTheBitsOfForwardAndOfAPrompt) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const auto& [ratio, overlap, d] :
         {std::tuple(4, true, 512), {4, true, 128}, {128, false, 512}, {7, true, 64}}) {
      const int tokens = 3 * ratio + 290;
      const CaseShape shape = shape_of(dtype, ratio, overlap, d, {tokens});
      SCOPED_TRACE(describe(shape));
      const CaseInputs inputs = make_inputs(shape).on(kGpu);
      Tensor rows = unwritten(dtype, {shape.rows(), d});
      ForwardArgs args{.rows = rows};
      inputs.pass_to(args);
      forward(args);
      const Tensor expected = rows.to({});
      std::vector<int> single;
      for (int token = 1; token <= tokens; ++token) single.push_back(token);
      const Stepped prompt(shape, inputs, {tokens}), tokenwise(shape, inputs, single),
          mixed(shape, inputs, {1, 3, ratio + 5, 2 * ratio + 50, tokens});
      const std::int64_t bytes = d * size_of(dtype);
      for (const Stepped* stepped : {&prompt, &tokenwise, &mixed}) {
        const Tensor got = stepped->rows.to({});
        for (std::int64_t w = 0; w < shape.rows(); ++w) {
          EXPECT_EQ(
              std::memcmp(static_cast<const char*>(got.data()) + ((w + 1) * ratio - 1) * bytes,
                          static_cast<const char*>(expected.data()) + w * bytes,
                          static_cast<std::size_t>(bytes)),
              0)
              << "window " << w;
        }
        EXPECT_TRUE(same_bytes(stepped->state.to({}), prompt.state.to({})));
      }
    }
  }
}

// Numbers that do not fit are refused in checking mode, and lead nowhere outside without it (run
// under compute-sanitizer to see that).
TEST_F(CompressorGpu, ListsThatDoNotFit) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max(), kLeast = -kMost - 1;
  const CaseShape shape = shape_of(DType::bf16, 4, true, 128, {20, 11});
  const CaseInputs inputs = make_inputs(shape).on(kGpu);
  Tensor rows(DType::bf16, {shape.rows(), 128}, kGpu), rstd(DType::f32, {shape.rows()}, kGpu),
      d_kv(DType::bf16, {31, 256}, kGpu), d_gate(DType::bf16, {31, 256}, kGpu),
      d_bias(DType::f32, {4, 256}, kGpu), d_norm(DType::f32, {128}, kGpu),
      state(DType::f32, {2, 8, 512}, kGpu), of_tokens(DType::bf16, {31, 128}, kGpu);
  for (const std::int32_t bad : {-1, 3, 32, kMost, kLeast}) {
    for (int which = 0; which < 4; ++which) {
      std::vector<std::int32_t> seqlens = {0, 20, 31}, of_rows = {0, 5, 7}, first = {0, 8},
                                slots = {0, 1};
      const char* const argument = std::array{"cu_seqlens", "cu_rows", "first_position",
                                              "state_slots"}[static_cast<std::size_t>(which)];
      (which == 0 ? seqlens : which == 1 ? of_rows : which == 2 ? first : slots)[1] = bad;
      const Tensor cu_seqlens = list_of(seqlens), cu_rows = list_of(of_rows),
                   first_position = list_of(first), state_slots = list_of(slots);
      const auto pass = [&](auto args) {
        inputs.pass_to(args);
        args.cu_seqlens = cu_seqlens;
        args.first_position = first_position;
        if constexpr (requires { args.cu_rows; }) args.cu_rows = cu_rows;
        return args;
      };
      const auto ways = {
          std::function([&](const RunOptions& options) {
            if (which < 3) forward(pass(ForwardArgs{.rows = rows, .rstd = rstd}), options);
          }),
          std::function([&](const RunOptions& options) {
            if (which == 3) return;
            backward(pass(BackwardArgs{.rows = rows,
                                       .rstd = rstd,
                                       .d_rows = rows,
                                       .d_kv = d_kv,
                                       .d_gate = d_gate,
                                       .d_position_bias = d_bias,
                                       .d_norm_weight = d_norm}),
                     options);
          }),
          std::function([&](const RunOptions& options) {
            if (which == 1) return;
            step(pass(StepArgs{.state_slots = state_slots, .state = state, .rows = of_tokens}),
                 options);
          })};
      for (const auto& call : ways) {
        call({});
        synchronize(kGpu);
        const bool fits = (which == 2 && bad > 0 && bad < 20) || (which == 3 && bad < 0);
        if (fits) continue;
        try {
          call({.check = true});
        } catch (const Error& error) {
          EXPECT_TRUE(error.argument() == argument || error.argument() == "cu_rows" ||
                      error.argument() == "cos")
              << error.what();
        }
      }
    }
  }
}

TEST_F(CompressorGpu, OddAddressesAndAGivenWorkspace) {
  for (const auto& [ratio, overlap] : {std::pair(4, true), {128, false}}) {
    const CaseShape shape = shape_of(DType::bf16, ratio, overlap, 512, {300});
    const CaseInputs inputs = make_inputs(shape).on(kGpu);
    Tensor d_rows(DType::bf16, {shape.rows(), 512});
    winnow::testing::Random random(1);
    winnow::testing::fill_normal(d_rows, random);
    const Tensor d_rows_there = d_rows.to(kGpu);
    const std::int64_t columns = shape.columns();
    const auto results = [&](const ConstTensorView& kv, const TensorView& workspace) {
      Tensor rows(DType::bf16, {shape.rows(), 512}, kGpu), rstd(DType::f32, {shape.rows()}, kGpu),
          d_kv(DType::bf16, {300, columns}, kGpu), d_gate(DType::bf16, {300, columns}, kGpu),
          d_bias(DType::f32, {ratio, columns}, kGpu), d_norm(DType::f32, {512}, kGpu);
      ForwardArgs args{.rows = rows, .rstd = rstd};
      inputs.pass_to(args);
      args.kv = kv;
      forward(args);
      BackwardArgs gradients{.rows = rows,
                             .rstd = rstd,
                             .d_rows = d_rows_there,
                             .d_kv = d_kv,
                             .d_gate = d_gate,
                             .d_position_bias = d_bias,
                             .d_norm_weight = d_norm};
      inputs.pass_to(gradients);
      gradients.kv = kv;
      gradients.workspace = workspace;
      backward(gradients);
      std::vector<Tensor> list;
      for (const Tensor* tensor : {&rows, &rstd, &d_kv, &d_gate, &d_bias, &d_norm}) {
        list.push_back(tensor->to({}));
      }
      return list;
    };
    Tensor odd(DType::bf16, {300, columns + 1}, kGpu);
    const Tensor kv = winnow::testing::on({}, inputs.kv).storage;
    Tensor wide(DType::bf16, {300, columns + 1});
    for (std::int64_t t = 0; t < 300; ++t) {
      std::memcpy(static_cast<char*>(wide.data()) + (t * (columns + 1) + 1) * 2,
                  static_cast<const char*>(kv.data()) + t * columns * 2, std::size_t(columns) * 2);
    }
    odd = wide.to(kGpu);
    const auto expected = results(inputs.kv.view, {});
    const CaseRows made = make_rows(shape, inputs);
    BackwardArgs args{.d_rows = d_rows_there};
    made.pass_to(args);
    Tensor d_kv(DType::bf16, {300, columns}, kGpu), d_gate(DType::bf16, {300, columns}, kGpu),
        d_bias(DType::f32, {ratio, columns}, kGpu), d_norm(DType::f32, {512}, kGpu);
    inputs.pass_to(args);
    args.d_kv = d_kv;
    args.d_gate = d_gate;
    args.d_position_bias = d_bias;
    args.d_norm_weight = d_norm;
    const std::int64_t bytes = backward_workspace_bytes(args);
    Tensor workspace(DType::u8, {bytes}, kGpu), small(DType::u8, {bytes - 1}, kGpu);
    args.workspace = small;
    EXPECT_THROW(backward(args), Error);
    const auto of_workspace = results(inputs.kv.view, workspace);
    const auto at_odd = results(odd.view().slice(1, 1, columns + 1), {});
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bytes(of_workspace[i], expected[i])) << i;
      EXPECT_TRUE(same_bytes(at_odd[i], expected[i])) << i;
    }
  }
}

// Slots are read when a graph runs, and those beyond the cache lead nowhere.
TEST_F(CompressorGpu, StoresWhereSlotsSayWhenAGraphRuns) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max(), kLeast = -kMost - 1;
  for (const std::int64_t d : {512, 128, 64}) {
    const CaseShape shape = shape_of(DType::bf16, 4, true, d, {4, 4});
    const CaseInputs inputs = make_inputs(shape).on(kGpu);
    const std::int64_t slots_of_all = 2 * indexer::kPageRows;
    const Tensor first = list_of({0, 4}), states = list_of({0, 1});
    Tensor slots = list_of(std::vector<std::int32_t>(8, 0));
    const auto put = [&](std::int32_t one, std::int32_t other) {
      const Tensor list = list_of({kMost, kMost, kMost, one, kLeast, kLeast, 5, other});
      copy_between(slots.data(), kGpu, list.data(), kGpu, 8 * sizeof(std::int32_t));
    };
    // Around it is memory that must stay as it is.
    const auto make = [&] {
      return d == 512 ? sparse_mla::make_cache(sparse_mla::CacheFormat::fp8_584, 2,
                                               indexer::kPageRows, 512, Layout::wide)
                      : testing::make_output(DType::u8, {2, indexer::page_bytes(d)}, Layout::wide);
    };
    const StridedTensor unwritten_cache = make(), cache = winnow::testing::on(kGpu, make());
    Tensor state(DType::f32, {2, 8, 4 * d}, kGpu);
    StepArgs args{.state_slots = states, .state = state};
    inputs.pass_to(args);
    args.first_position = first;
    (d == 512 ? args.cache : args.pages) = cache.view;
    args.slots = slots;
    put(kMost, kLeast);
    const winnow::testing::CudaStream stream;
    const winnow::testing::Graph graph(stream.stream, [&] { step(args, stream.options()); });
    const auto stored = [&] {
      graph.launch(stream.stream);
      stream.wait();
      return cache.storage.to({});
    };
    for (const auto& [one, other] : {std::pair(kMost, kLeast),
                                     {std::int32_t(slots_of_all), -1},
                                     {-2, std::int32_t(slots_of_all)}}) {
      put(one, other);
      EXPECT_TRUE(same_bytes(stored(), unwritten_cache.storage)) << one << " " << other;
      if (one == -2) {
        EXPECT_THROW(step(args, {.check = true}), Error);
      }
    }
    put(3, 100);
    const Tensor once = stored();
    EXPECT_FALSE(same_bytes(once, unwritten_cache.storage));
    put(100, 3);
    const Tensor swapped = stored();
    EXPECT_FALSE(same_bytes(swapped, once));
    put(3, 100);
    EXPECT_TRUE(same_bytes(stored(), once));
  }
}

#endif

}  // namespace
}  // namespace winnow::compressor
