// Benchmarks of sparse_mla::backward.
#include <memory>

#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/forward/forward.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> backward_benchmarks() {
  constexpr double kTarget = 0.4;
  std::vector<testing::Benchmark> list;
  for (const BenchShape& bench : bench_shapes()) {
    const CaseShape shape = bench.shape;
    list.push_back(make_benchmark(bench, 3 * shape.d_qk + 2 * kValueDim, kTarget));
    list.back().prepare = [shape](const testing::Target& target) -> std::function<void()> {
      require_cpu("sparse_mla::backward", target);
      struct Data {
        CaseInputs inputs;
        StridedTensor out, lse, d_out, dq, dkv;
      };
      auto data = std::make_shared<Data>();
      data->inputs = make_inputs(shape);
      const std::vector<std::int64_t> values = {shape.s_q, shape.h_q, kValueDim};
      data->out = make_output(shape.dtype, values, Layout::dense);
      data->lse = make_output(DType::f32, {shape.s_q, shape.h_q}, Layout::dense);
      data->d_out = make_tensor(shape.dtype, values, Layout::dense);
      data->dq = make_output(shape.dtype, {shape.s_q, shape.h_q, shape.d_qk}, Layout::dense);
      data->dkv = make_output(DType::f32, {shape.s_kv, 1, shape.d_qk}, Layout::dense);
      winnow::testing::Random random(winnow::testing::seed_from(shape.name));
      winnow::testing::fill_normal(data->d_out.view, random);
      ForwardArgs forward_args{.out = data->out.view, .lse = data->lse.view};
      data->inputs.pass_to(forward_args);
      forward(forward_args, target.options);
      BackwardArgs args{.out = data->out.view,
                        .lse = data->lse.view,
                        .d_out = data->d_out.view,
                        .dq = data->dq.view,
                        .dkv = data->dkv.view};
      data->inputs.pass_to(args);
      return [data, args, options = target.options] { backward(args, options); };
    };
  }
  return list;
}

}  // namespace winnow::sparse_mla
