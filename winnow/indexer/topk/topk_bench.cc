// Benchmarks of indexer::topk.
#include <memory>
#include <optional>

#include "winnow/indexer/cases.h"
#include "winnow/indexer/topk/topk.h"

namespace winnow::indexer {
namespace {

// The speed of the bf16 product 8192^3, in TFLOP/s, at which the spec's times were measured.
constexpr double kCeilingReference = 770;

struct BenchShape {
  CaseShape shape;
  DeviceType device = DeviceType::cuda;
  std::optional<double> target_ms{};  // at kCeilingReference
};

testing::Prepared prepare(const CaseShape& shape, const testing::Target& target) {
  struct Data {
    CaseInputs inputs;
    Tensor indices, length, workspace;
    TopkArgs args;
  };
  const Device device = testing::device_of(target);
  auto data = std::make_shared<Data>(Data{make_inputs(shape).on(device),
                                          Tensor(DType::i32, {shape.s_q, shape.topk}, device),
                                          Tensor(DType::i32, {shape.s_q}, device),
                                          {},
                                          {}});
  data->args.indices = data->indices;
  data->args.length = data->length;
  data->inputs.pass_to(data->args);
  data->workspace = Tensor(DType::u8, {topk_workspace_bytes(data->args, target.options)}, device);
  data->args.workspace = data->workspace;
  return {[data, options = target.options] { topk(data->args, options); },
          {data->indices, data->length, data->workspace}};
}

testing::Benchmark make_benchmark(const BenchShape& bench) {
  const CaseShape& shape = bench.shape;
  testing::Benchmark benchmark;
  benchmark.name = shape.name;
  benchmark.shape = describe(shape);
  double pairs = double(shape.s_q) * double(shape.s_k);
  if (shape.q_start.has_value()) pairs -= 0.5 * double(shape.s_q) * double(shape.s_q - 1);
  benchmark.flops = 2.0 * pairs * double(shape.h) * double(shape.d);
  benchmark.device = bench.device;
  if (bench.device == DeviceType::cuda) {
    benchmark.ceiling = {testing::Ceiling::Kind::matmul, 8192, 8192, 8192, 0};
  } else {
    benchmark.ceiling = {testing::Ceiling::Kind::matmul, shape.s_q * shape.h, shape.s_k, shape.d,
                         0};
    benchmark.target = 0.5;
  }
  if (bench.target_ms.has_value()) {
    // The share of the ceiling that this time would be.
    benchmark.target = benchmark.flops / (*bench.target_ms * 1e-3) / (kCeilingReference * 1e12);
  }
  benchmark.prepare = [shape](const testing::Target& target) { return prepare(shape, target); };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> topk_benchmarks() {
  std::vector<testing::Benchmark> list;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    list.push_back(make_benchmark({.shape = {.name = std::string(to_string(dtype)) + "-h64-k512",
                                             .dtype = dtype,
                                             .s_q = 64,
                                             .h = 64,
                                             .s_k = 8192,
                                             .topk = 512,
                                             .poison = false},
                                   .device = DeviceType::cpu}));
  }
  // Queries at the end of the cache, as in a prefill of chunks.
  struct Row {
    DType dtype;
    std::int64_t h, s_k;
    std::optional<double> target_ms;
  };
  for (const Row& row : {Row{DType::bf16, 64, 8192, 0.85}, Row{DType::bf16, 64, 32768, 3.7},
                         Row{DType::bf16, 64, 131072, 15.6}, Row{DType::f8_e4m3, 64, 8192, 0.60},
                         Row{DType::f8_e4m3, 64, 32768, 2.25}, Row{DType::f8_e4m3, 64, 131072, 8.7},
                         Row{DType::bf16, 32, 32768, {}}, Row{DType::bf16, 16, 32768, {}}}) {
    list.push_back(
        make_benchmark({.shape = {.name = std::string(to_string(row.dtype)) + "-h" +
                                          std::to_string(row.h) + "-sk" + std::to_string(row.s_k),
                                  .dtype = row.dtype,
                                  .s_q = 4096,
                                  .h = row.h,
                                  .s_k = row.s_k,
                                  .topk = 2048,
                                  .q_start = row.s_k - 4096,
                                  .poison = false},
                        .target_ms = row.target_ms}));
  }
  for (const std::int64_t s_q : {1, 16, 128}) {
    for (const std::int64_t s_k : {32768, 131072}) {
      list.push_back(make_benchmark(
          {.shape = {.name = "bf16-decode-sq" + std::to_string(s_q) + "-sk" + std::to_string(s_k),
                     .dtype = DType::bf16,
                     .s_q = s_q,
                     .h = 64,
                     .s_k = s_k,
                     .topk = 2048,
                     .poison = false}}));
    }
  }
  return list;
}

}  // namespace winnow::indexer
