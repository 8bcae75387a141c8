// Benchmarks of sparse_mla::backward.
#include <memory>

#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/forward/forward.h"

namespace winnow::sparse_mla {

namespace {

std::function<void()> prepare(const CaseShape& shape, bool deterministic,
                              const testing::Target& target) {
  struct Data {
    CaseInputs inputs;
    Tensor out, lse, d_out, dq, dkv, dextra_kv, workspace;
  };
  const Device device = testing::device_of(target);
  const std::vector<std::int64_t> values = {shape.s_q, shape.h_q, kValueDim};
  Tensor d_out(shape.dtype, values);
  winnow::testing::Random random(winnow::testing::seed_from(shape.name));
  winnow::testing::fill_normal_rows(d_out.view(), random);
  auto data = std::make_shared<Data>(
      Data{make_inputs(shape).on(device), Tensor(shape.dtype, values, device),
           Tensor(DType::f32, {shape.s_q, shape.h_q}, device), d_out.to(device),
           Tensor(shape.dtype, {shape.s_q, shape.h_q, shape.d_qk}, device),
           Tensor(DType::f32, {shape.s_kv, 1, shape.d_qk}, device), Tensor(), Tensor()});
  ForwardArgs forward_args{.out = data->out, .lse = data->lse};
  data->inputs.pass_to(forward_args);
  forward(forward_args, target.options);
  BackwardArgs args{
      .out = data->out, .lse = data->lse, .d_out = data->d_out, .dq = data->dq, .dkv = data->dkv};
  data->inputs.pass_to(args);
  if (shape.extra) {
    data->dextra_kv = Tensor(DType::f32, {shape.extra->s_kv, 1, shape.d_qk}, device);
    args.dextra_kv = data->dextra_kv;
  }
  args.deterministic = deterministic;
  // As an engine would: memory for scratch is had once.
  data->workspace = Tensor(DType::u8, {backward_workspace_bytes(args, target.options)}, device);
  args.workspace = data->workspace;
  return [data, args, options = target.options] { backward(args, options); };
}

}  // namespace

std::vector<testing::Benchmark> backward_benchmarks() {
  constexpr double kTarget = 0.4;
  std::vector<testing::Benchmark> list;
  const auto add = [&](testing::Benchmark benchmark, const CaseShape& shape,
                       bool deterministic = false) {
    benchmark.prepare = [=](const testing::Target& target) {
      return prepare(shape, deterministic, target);
    };
    if (deterministic) benchmark.name += "-deterministic";
    list.push_back(std::move(benchmark));
  };
  for (const BenchShape& bench : bench_shapes()) {
    add(make_benchmark(bench, 3 * bench.shape.d_qk + 2 * kValueDim, kTarget), bench.shape);
  }
  // Heads, rows of kv, and the share of the ceiling to reach.
  for (const GpuBenchShape& bench :
       {GpuBenchShape{128, 8192, 0.66}, GpuBenchShape{128, 32768, 0.58},
        GpuBenchShape{128, 131072, 0.54}, GpuBenchShape{64, 8192, 0.55},
        GpuBenchShape{64, 32768, 0.32}, GpuBenchShape{64, 131072, 0.24}}) {
    const CaseShape shape = case_shape(bench);
    add(make_benchmark(bench, 3 * shape.d_qk + 2 * kValueDim), shape);
    const GpuBenchShape promised_nothing{bench.h_q, bench.s_kv, std::nullopt};
    add(make_benchmark(promised_nothing, 3 * shape.d_qk + 2 * kValueDim), shape, true);
  }
  // Rows that every query adds to, in both designs: at least half as fast as random ones must be.
  for (const GpuBenchShape& bench : {GpuBenchShape{128, 8192, 0.28, Choice::hot_rows},
                                     GpuBenchShape{128, 131072, 0.17, Choice::hot_rows},
                                     GpuBenchShape{64, 8192, 0.28, Choice::hot_rows},
                                     GpuBenchShape{64, 32768, 0.16, Choice::hot_rows}}) {
    const CaseShape shape = case_shape(bench);
    add(make_benchmark(bench, 3 * shape.d_qk + 2 * kValueDim), shape);
  }
  // Layers of DeepSeek-V4.
  for (const LayerBenchShape& bench :
       {LayerBenchShape{64, 4, 512, 0.58}, LayerBenchShape{128, 4, 1024, 0.64},
        LayerBenchShape{64, 128, 0, {}}, LayerBenchShape{128, 128, 0, {}}}) {
    const CaseShape shape = case_shape(bench);
    add(make_benchmark(bench, 3 * shape.d_qk + 2 * kValueDim), shape);
    const LayerBenchShape promised_nothing{bench.h_q, bench.compression, bench.extra_topk, {}};
    add(make_benchmark(promised_nothing, 3 * shape.d_qk + 2 * kValueDim), shape, true);
  }
  return list;
}

}  // namespace winnow::sparse_mla
