// Benchmarks of sparse_mla::forward.
#include <algorithm>
#include <memory>

#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/forward/forward.h"

namespace winnow::sparse_mla {

namespace {

// in_list_order: over lists that ascend, as topk() writes them.
std::function<void()> prepare(const CaseShape& shape, const testing::Target& target,
                              bool in_list_order) {
  struct Data {
    CaseInputs inputs;
    Tensor out, max_logits, lse, workspace;
  };
  const Device device = testing::device_of(target);
  const CaseInputs inputs = make_inputs(shape);
  if (in_list_order) {
    auto* const first = static_cast<std::int32_t*>(inputs.indices.view.data());
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      std::sort(first + i * shape.topk, first + (i + 1) * shape.topk);
    }
  }
  auto data = std::make_shared<Data>(
      Data{inputs.on(device), Tensor(shape.dtype, {shape.s_q, shape.h_q, kValueDim}, device),
           Tensor(DType::f32, {shape.s_q, shape.h_q}, device),
           Tensor(DType::f32, {shape.s_q, shape.h_q}, device), Tensor()});
  ForwardArgs args{.in_list_order = in_list_order,
                   .out = data->out,
                   .max_logits = data->max_logits,
                   .lse = data->lse};
  data->inputs.pass_to(args);
  data->workspace = Tensor(DType::u8, {forward_workspace_bytes(args, target.options)}, device);
  args.workspace = data->workspace;
  return [data, args, options = target.options] { forward(args, options); };
}

}  // namespace

std::vector<testing::Benchmark> forward_benchmarks() {
  constexpr double kTarget = 0.5;
  std::vector<testing::Benchmark> list;
  const auto add = [&](testing::Benchmark benchmark, const CaseShape& shape,
                       bool in_list_order = false) {
    if (in_list_order) benchmark.name += "-list-order";
    benchmark.prepare = [shape, in_list_order](const testing::Target& target) {
      return prepare(shape, target, in_list_order);
    };
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
  for (const auto& [heads, rows] : {std::pair{128, 8192}, {128, 32768}, {64, 131072}}) {
    const GpuBenchShape bench{heads, rows, {}};
    const CaseShape shape = case_shape(bench);
    add(make_benchmark(bench, shape.d_qk + kValueDim), shape, true);
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
