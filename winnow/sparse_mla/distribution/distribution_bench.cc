// Benchmarks of sparse_mla::distribution.
#include <memory>

#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/forward/forward.h"

namespace winnow::sparse_mla {

namespace {

std::function<void()> prepare(const CaseShape& shape, const testing::Target& target) {
  struct Data {
    CaseInputs inputs;
    Tensor out, lse, attn_sum, extra_attn_sum;
  };
  const Device device = testing::device_of(target);
  auto data = std::make_shared<Data>(Data{
      make_inputs(shape).on(device), Tensor(shape.dtype, {shape.s_q, shape.h_q, kValueDim}, device),
      Tensor(DType::f32, {shape.s_q, shape.h_q}, device),
      Tensor(DType::f32, {shape.s_q, shape.topk}, device), Tensor()});
  ForwardArgs forward_args{.out = data->out, .lse = data->lse};
  data->inputs.pass_to(forward_args);
  forward(forward_args, target.options);
  DistributionArgs args{.lse = data->lse, .attn_sum = data->attn_sum};
  data->inputs.pass_to(args);
  if (shape.extra) {
    data->extra_attn_sum = Tensor(DType::f32, {shape.s_q, shape.extra->topk}, device);
    args.extra_attn_sum = data->extra_attn_sum;
  }
  return [data, args, options = target.options] { distribution(args, options); };
}

}  // namespace

std::vector<testing::Benchmark> distribution_benchmarks() {
  constexpr double kTarget = 0.4;
  std::vector<testing::Benchmark> list;
  const auto add = [&](testing::Benchmark benchmark, const CaseShape& shape) {
    benchmark.prepare = [shape](const testing::Target& target) { return prepare(shape, target); };
    list.push_back(std::move(benchmark));
  };
  for (const BenchShape& bench : bench_shapes()) {
    add(make_benchmark(bench, bench.shape.d_qk, kTarget), bench.shape);
  }
  // Heads, rows of kv, and the share of the ceiling to reach.
  for (const GpuBenchShape& bench :
       {GpuBenchShape{128, 8192, 0.68}, GpuBenchShape{128, 32768, 0.65},
        GpuBenchShape{128, 131072, 0.54}, GpuBenchShape{64, 8192, 0.57},
        GpuBenchShape{64, 32768, 0.53}, GpuBenchShape{64, 131072, 0.35}}) {
    const CaseShape shape = case_shape(bench);
    add(make_benchmark(bench, shape.d_qk), shape);
  }
  for (const LayerBenchShape& bench :
       {LayerBenchShape{64, 4, 512, {}}, LayerBenchShape{128, 4, 1024, {}},
        LayerBenchShape{64, 128, 0, {}}, LayerBenchShape{128, 128, 0, {}}}) {
    const CaseShape shape = case_shape(bench);
    add(make_benchmark(bench, shape.d_qk), shape);
  }
  return list;
}

}  // namespace winnow::sparse_mla
