// Benchmarks of compressor::backward: useful bytes are those of kv, gate, rows, their
// gradients, and rstd.
#include <memory>

#include "winnow/compressor/backward/backward.h"
#include "winnow/compressor/cases.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> backward_benchmarks();

std::vector<testing::Benchmark> backward_benchmarks() {
  std::vector<testing::Benchmark> list;
  for (const BenchShape& shape : bench_shapes()) {
    const std::int64_t elements = 4 * shape.tokens() * shape.columns() + 2 * shape.rows() * shape.d;
    const std::int64_t bytes =
        elements * size_of(shape.dtype) + shape.rows() * size_of(accumulator_of(shape.dtype));
    testing::Benchmark benchmark = make_benchmark(shape, double(bytes));
    if (shape.device == DeviceType::cuda) benchmark.target = 0.8;
    benchmark.prepare = [shape](const testing::Target& target) -> testing::Prepared {
      struct Data {
        CaseInputs inputs;
        CaseRows made;
        Tensor d_rows, d_kv, d_gate, d_bias, d_norm, workspace;
      };
      const std::int64_t columns = shape.columns();
      const Device device = testing::device_of(target);
      const auto output = [&](DType dtype, std::initializer_list<std::int64_t> sizes) {
        return Tensor(dtype, sizes, device);
      };
      auto data = std::make_shared<Data>(Data{make_inputs(shape).on(device),
                                              {},
                                              Tensor(shape.dtype, {shape.rows(), shape.d}),
                                              output(shape.dtype, {shape.tokens(), columns}),
                                              output(shape.dtype, {shape.tokens(), columns}),
                                              output(DType::f32, {shape.ratio, columns}),
                                              output(DType::f32, {shape.d}),
                                              Tensor()});
      testing::Random random(1);
      testing::fill_normal_rows(data->d_rows, random);
      data->d_rows = data->d_rows.to(device);
      data->made = make_rows(shape, data->inputs, target.options);
      BackwardArgs args{.d_rows = data->d_rows,
                        .d_kv = data->d_kv,
                        .d_gate = data->d_gate,
                        .d_position_bias = data->d_bias,
                        .d_norm_weight = data->d_norm};
      data->inputs.pass_to(args);
      data->made.pass_to(args);
      data->workspace = Tensor(DType::u8, {backward_workspace_bytes(args, target.options)}, device);
      args.workspace = data->workspace;
      return {[data, args, options = target.options] { backward(args, options); },
              {data->d_kv, data->d_gate, data->d_bias, data->d_norm}};
    };
    list.push_back(std::move(benchmark));
  }
  return list;
}

}  // namespace winnow::compressor
