// The benchmarks of sparse_mla::decode: useful FLOPs are those of the products with the real heads.
#include <memory>

#include "winnow/sparse_mla/decode/decode_step_cases.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> decode_benchmarks();

namespace {

testing::Benchmark make_benchmark(DecodeCase shape) {
  shape.name = name_of(shape.format, shape.columns) + testing::numbered("-b", shape.b) +
               testing::numbered("-h", shape.h_q) + testing::numbered("-k", shape.topk);
  shape.poison = false;
  const std::int64_t columns = row_columns(shape.format, shape.columns) + 512;
  const std::int64_t rows = shape.b * shape.s_q * shape.h_q;
  testing::Benchmark benchmark;
  benchmark.name = shape.name;
  benchmark.shape = describe(shape);
  benchmark.flops = 2.0 * double(rows) * double(shape.topk) * double(columns);
  benchmark.ceiling = {testing::Ceiling::Kind::matmul, rows, shape.topk, columns, 0};
  benchmark.prepare = [shape](const testing::Target& target) -> std::function<void()> {
    const Device device = testing::device_of(target);
    struct Data {
      DecodeStep step;
      Tensor workspace;
    };
    auto data = std::make_shared<Data>(Data{DecodeStep(shape).on(device), {}});
    DecodeArgs args = data->step.args();
    if (const std::int64_t bytes = decode_workspace_bytes(args, target.options); bytes > 0) {
      data->workspace = Tensor(DType::u8, {bytes}, device);
      args.workspace = data->workspace;
    }
    return [data, args, options = target.options] { decode(args, options); };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> decode_benchmarks() {
  std::vector<testing::Benchmark> list;
  for (const CacheFormat format : {CacheFormat::fp8_656, CacheFormat::fp8_584, CacheFormat::bf16}) {
    list.push_back(make_benchmark(
        {.name = {}, .format = format, .b = 2, .s_q = 2, .h_q = 128, .topk = 2048, .blocks = 64}));
  }
  list.push_back(make_benchmark({.name = {}, .b = 8, .h_q = 16, .topk = 2048, .blocks = 64}));
  return list;
}

}  // namespace winnow::sparse_mla
