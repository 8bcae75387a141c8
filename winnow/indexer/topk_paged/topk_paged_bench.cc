// The benchmarks of indexer::topk_paged: the products on the CPU; on a GPU the bytes of the keys
// and their scales, which is what takes the time of a step there, and with four queries of each
// sequence the products again: 60 % of a copy would be 1.26 PFLOP/s on an H200.
#include <memory>

#include "winnow/indexer/topk_paged/topk_paged_cases.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> topk_paged_benchmarks();

namespace {

testing::Benchmark make_benchmark(std::int64_t b, std::int64_t s_q, std::int32_t rows,
                                  std::int64_t h, DeviceType device) {
  PagedCase shape{.name = testing::numbered("b", b) + testing::numbered("-sq", s_q) +
                          testing::numbered("-h", h) + testing::numbered("-sk", rows),
                  .s_q = s_q,
                  .h = h,
                  .topk = 2048,
                  .table = rows / kPageRows,
                  .num_pages = b * rows / kPageRows};
  shape.context_lens.assign(static_cast<std::size_t>(b), rows);
  testing::Benchmark benchmark;
  benchmark.name = shape.name;
  benchmark.shape = describe(shape);
  const bool by_flops = device == DeviceType::cpu || s_q >= 4;
  if (by_flops) benchmark.flops = 2.0 * double(b * s_q * h) * double(rows) * double(shape.d);
  if (device == DeviceType::cpu) {
    benchmark.ceiling = {testing::Ceiling::Kind::matmul, b * s_q * h, rows, shape.d, 0};
  } else if (by_flops) {
    benchmark.ceiling = {testing::Ceiling::Kind::matmul, 8192, 8192, 8192, 0};
    benchmark.target = 0.97;  // 95 % of what was measured on an H200
  } else {
    benchmark.bytes = double(b) * double(rows) * double(shape.d + 4);
    benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
    benchmark.ceiling.bytes = std::int64_t{4} << 30;
    if (b == 64 && rows == 32768) benchmark.target = 0.6;
  }
  benchmark.device = device;
  benchmark.prepare = [shape](const testing::Target& target) -> testing::Prepared {
    const Device where = testing::device_of(target);
    struct Data {
      PagedStep step;
      Tensor indices, length, workspace;
    };
    auto data = std::make_shared<Data>(Data{PagedStep(shape).on(where), {}, {}, {}});
    data->indices = Tensor(DType::i32, {data->step.b(), shape.s_q, shape.topk}, where);
    data->length = Tensor(DType::i32, {data->step.b(), shape.s_q}, where);
    TopkPagedArgs args = data->step.args();
    args.indices = data->indices;
    args.length = data->length;
    data->workspace = Tensor(DType::u8, {topk_paged_workspace_bytes(args, target.options)}, where);
    args.workspace = data->workspace;
    return {[data, args, options = target.options] { topk_paged(args, options); },
            {data->indices, data->length, data->workspace}};
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> topk_paged_benchmarks() {
  return {make_benchmark(4, 1, 8192, 64, DeviceType::cpu),
          make_benchmark(64, 1, 32768, 64, DeviceType::cuda),
          make_benchmark(64, 2, 32768, 64, DeviceType::cuda),
          make_benchmark(64, 4, 32768, 64, DeviceType::cuda),
          make_benchmark(64, 1, 32768, 32, DeviceType::cuda),
          make_benchmark(1, 1, 131072, 64, DeviceType::cuda),
          make_benchmark(16, 1, 131072, 64, DeviceType::cuda)};
}

}  // namespace winnow::indexer
