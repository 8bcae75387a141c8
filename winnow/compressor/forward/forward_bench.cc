// Benchmarks of compressor::forward: useful bytes are those of kv, gate and rows.
#include <memory>

#include "winnow/compressor/cases.h"
#include "winnow/compressor/forward/forward.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> forward_benchmarks();

std::vector<testing::Benchmark> forward_benchmarks() {
  std::vector<testing::Benchmark> list;
  for (const BenchShape& shape : bench_shapes()) {
    const std::int64_t elements = 2 * shape.tokens() * shape.columns() + shape.rows() * shape.d;
    testing::Benchmark benchmark = make_benchmark(shape, double(elements * size_of(shape.dtype)));
    if (shape.device == DeviceType::cuda) benchmark.target = 0.85;
    benchmark.prepare = [shape](const testing::Target& target) -> testing::Prepared {
      struct Data {
        CaseInputs inputs;
        Tensor rows;
      };
      const Device device = testing::device_of(target);
      auto data = std::make_shared<Data>(Data{
          make_inputs(shape).on(device), Tensor(shape.dtype, {shape.rows(), shape.d}, device)});
      ForwardArgs args{.rows = data->rows};
      data->inputs.pass_to(args);
      return {[data, args, options = target.options] { forward(args, options); }, {data->rows}};
    };
    list.push_back(std::move(benchmark));
  }
  return list;
}

}  // namespace winnow::compressor
