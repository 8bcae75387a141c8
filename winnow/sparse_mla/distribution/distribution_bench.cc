// Benchmarks of sparse_mla::distribution.
#include <memory>

#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/forward/forward.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> distribution_benchmarks() {
  constexpr double kTarget = 0.4;
  std::vector<testing::Benchmark> list;
  for (const BenchShape& bench : bench_shapes()) {
    const CaseShape shape = bench.shape;
    list.push_back(make_benchmark(bench, shape.d_qk, kTarget));
    list.back().prepare = [shape](const testing::Target& target) -> std::function<void()> {
      require_cpu("sparse_mla::distribution", target);
      struct Data {
        CaseInputs inputs;
        StridedTensor out, lse, attn_sum;
      };
      auto data = std::make_shared<Data>();
      data->inputs = make_inputs(shape);
      data->out = make_output(shape.dtype, {shape.s_q, shape.h_q, kValueDim}, Layout::dense);
      data->lse = make_output(DType::f32, {shape.s_q, shape.h_q}, Layout::dense);
      data->attn_sum = make_output(DType::f32, {shape.s_q, shape.topk}, Layout::dense);
      ForwardArgs forward_args{.out = data->out.view, .lse = data->lse.view};
      data->inputs.pass_to(forward_args);
      forward(forward_args, target.options);
      DistributionArgs args{.lse = data->lse.view, .attn_sum = data->attn_sum.view};
      data->inputs.pass_to(args);
      return [data, args, options = target.options] { distribution(args, options); };
    };
  }
  return list;
}

}  // namespace winnow::sparse_mla
