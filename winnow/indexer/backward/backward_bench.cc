// Benchmarks of indexer::backward.
#include <memory>

#include "winnow/indexer/backward/backward.h"
#include "winnow/indexer/cases.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> backward_benchmarks();

namespace {

testing::Prepared prepare(const CaseShape& shape, bool deterministic,
                          const testing::Target& target) {
  struct Data {
    CaseInputs inputs;
    Tensor indices, d_scores, dq, dk, d_weights, workspace;
    BackwardArgs args;
  };
  const Device device = testing::device_of(target);
  winnow::testing::Random random(winnow::testing::seed_from(shape.name));
  Tensor d_scores(DType::f32, {shape.s_q, shape.topk});
  winnow::testing::fill_normal(d_scores, random);
  const DType dq_dtype = shape.dtype == DType::f8_e4m3 ? DType::bf16 : shape.dtype;
  auto data = std::make_shared<Data>(Data{make_inputs(shape).on(device),
                                          chosen_rows(shape).to(device),
                                          d_scores.to(device),
                                          Tensor(dq_dtype, {shape.s_q, shape.h, shape.d}, device),
                                          Tensor(DType::f32, {shape.s_k, shape.d}, device),
                                          Tensor(DType::f32, {shape.s_q, shape.h}, device),
                                          {},
                                          {}});
  data->args = {.indices = data->indices,
                .d_scores = data->d_scores,
                .deterministic = deterministic,
                .dq = data->dq,
                .dk = data->dk,
                .d_weights = data->d_weights};
  data->inputs.pass_to(data->args);
  data->workspace =
      Tensor(DType::u8, {backward_workspace_bytes(data->args, target.options)}, device);
  data->args.workspace = data->workspace;
  return {[data, options = target.options] { backward(data->args, options); },
          {data->dq, data->dk, data->d_weights, data->workspace}};
}

}  // namespace

std::vector<testing::Benchmark> backward_benchmarks() {
  std::vector<testing::Benchmark> list;
  // Targets in ms, at 8,192, 32,768 and 131,072 rows.
  for (const ChosenBench& bench : chosen_benches({1.7, 1.7, 2.4})) {
    for (const bool deterministic : {false, true}) {
      // Three products: with the keys, into dq and into dk. Nothing is promised of `deterministic`.
      ChosenBench promised = bench;
      if (deterministic) promised.target_ms.reset();
      testing::Benchmark benchmark = make_chosen_benchmark(promised, /*products=*/3);
      if (deterministic) benchmark.name += "-deterministic";
      benchmark.prepare = [shape = bench.shape, deterministic](const testing::Target& target) {
        return prepare(shape, deterministic, target);
      };
      list.push_back(std::move(benchmark));
    }
  }
  return list;
}

}  // namespace winnow::indexer
