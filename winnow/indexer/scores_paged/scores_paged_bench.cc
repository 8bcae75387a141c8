// The benchmarks of indexer::scores_paged: steps of topk_paged, without targets so far.
#include <memory>

#include "winnow/indexer/scores_paged/scores_paged.h"
#include "winnow/indexer/topk_paged/topk_paged_cases.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> scores_paged_benchmarks();

namespace {

testing::Benchmark make_benchmark(std::int64_t b, std::int64_t s_q, std::int32_t rows,
                                  std::int64_t h, DeviceType device) {
  auto [shape, benchmark] = make_paged_benchmark(b, s_q, rows, h, device);
  benchmark.shape = describe(shape);
  // Beside the keys, the scores.
  if (benchmark.bytes > 0) benchmark.bytes += 4.0 * double(b * s_q) * double(rows);
  benchmark.prepare = [shape = shape](const testing::Target& target) -> testing::Prepared {
    const Device where = testing::device_of(target);
    struct Data {
      PagedStep step;
      Tensor scores;
    };
    auto data = std::make_shared<Data>(Data{PagedStep(shape).on(where), {}});
    data->scores = Tensor(DType::f32, {data->step.b(), shape.s_q, shape.table * kPageRows}, where);
    ScoresPagedArgs args{.scores = data->scores};
    data->step.pass_to(args);
    return {[data, args, options = target.options] { scores_paged(args, options); },
            {data->scores}};
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> scores_paged_benchmarks() {
  return {make_benchmark(4, 1, 8192, 64, DeviceType::cpu),
          make_benchmark(64, 1, 32768, 64, DeviceType::cuda),
          make_benchmark(64, 2, 32768, 64, DeviceType::cuda),
          make_benchmark(64, 4, 32768, 64, DeviceType::cuda),
          make_benchmark(64, 1, 32768, 32, DeviceType::cuda),
          make_benchmark(1, 1, 131072, 64, DeviceType::cuda)};
}

}  // namespace winnow::indexer
