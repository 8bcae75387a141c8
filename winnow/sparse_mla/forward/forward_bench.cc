// Benchmarks of sparse_mla::forward.
#include <memory>

#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/forward/forward.h"

namespace winnow::sparse_mla {

namespace {

std::function<void()> prepare(const CaseShape& shape, const testing::Target& target) {
  struct Data {
    CaseInputs inputs;
    Tensor out, max_logits, lse, workspace;
  };
  const Device device = testing::device_of(target);
  auto data = std::make_shared<Data>(Data{
      make_inputs(shape).on(device), Tensor(shape.dtype, {shape.s_q, shape.h_q, kValueDim}, device),
      Tensor(DType::f32, {shape.s_q, shape.h_q}, device),
      Tensor(DType::f32, {shape.s_q, shape.h_q}, device), Tensor()});
  ForwardArgs args{.out = data->out, .max_logits = data->max_logits, .lse = data->lse};
  data->inputs.pass_to(args);
  data->workspace = Tensor(DType::u8, {forward_workspace_bytes(args, target.options)}, device);
  args.workspace = data->workspace;
  return [data, args, options = target.options] { forward(args, options); };
}

}  // namespace

std::vector<testing::Benchmark> forward_benchmarks() {
  constexpr double kTarget = 0.5;
  std::vector<testing::Benchmark> list;
  const auto add = [&](testing::Benchmark benchmark, const CaseShape& shape) {
    benchmark.prepare = [shape](const testing::Target& target) { return prepare(shape, target); };
    list.push_back(std::move(benchmark));
  };
  for (const BenchShape& bench : bench_shapes()) {
    add(make_benchmark(bench, bench.shape.d_qk + kValueDim, kTarget), bench.shape);
  }
  // Heads, rows of kv, and the share of the ceiling to reach.
  for (const GpuBenchShape& bench :
       {GpuBenchShape{128, 8192, 0.93}, GpuBenchShape{128, 32768, 0.86},
        GpuBenchShape{128, 131072, 0.84}, GpuBenchShape{64, 8192, 0.90},
        GpuBenchShape{64, 32768, 0.84}, GpuBenchShape{64, 131072, 0.76}}) {
    const CaseShape shape = case_shape(bench);
    add(make_benchmark(bench, shape.d_qk + kValueDim), shape);
  }
  for (const LayerBenchShape& bench :
       {LayerBenchShape{64, 4, 512, 0.80}, LayerBenchShape{128, 4, 1024, 0.86},
        LayerBenchShape{64, 128, 0, {}}, LayerBenchShape{128, 128, 0, {}}}) {
    const CaseShape shape = case_shape(bench);
    add(make_benchmark(bench, shape.d_qk + kValueDim), shape);
  }
  return list;
}

}  // namespace winnow::sparse_mla
