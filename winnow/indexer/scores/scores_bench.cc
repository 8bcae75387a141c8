// Benchmarks of indexer::scores at chosen rows.
#include <memory>

#include "winnow/indexer/cases.h"
#include "winnow/indexer/scores/scores.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> scores_benchmarks();  // for scores_cases.cc

namespace {

testing::Prepared prepare(const CaseShape& shape, const testing::Target& target) {
  struct Data {
    CaseInputs inputs;
    Tensor indices, scores;
    ScoresArgs args;
  };
  const Device device = testing::device_of(target);
  auto data = std::make_shared<Data>(Data{make_inputs(shape).on(device),
                                          chosen_rows(shape).to(device),
                                          Tensor(DType::f32, {shape.s_q, shape.topk}, device),
                                          {}});
  data->args = {.indices = data->indices, .scores = data->scores};
  data->inputs.pass_to(data->args);
  return {[data, options = target.options] { scores(data->args, options); }, {data->scores}};
}

}  // namespace

std::vector<testing::Benchmark> scores_benchmarks() {
  std::vector<testing::Benchmark> list;
  // Targets in ms, at 8,192, 32,768 and 131,072 rows.
  for (const ChosenBench& bench : chosen_benches({0.5, 0.5, 0.8})) {
    testing::Benchmark benchmark = make_chosen_benchmark(bench, /*products=*/1);
    benchmark.prepare = [shape = bench.shape](const testing::Target& target) {
      return prepare(shape, target);
    };
    list.push_back(std::move(benchmark));
  }
  return list;
}

}  // namespace winnow::indexer
