// Benchmarks of compressor::step: one new token of each of many sequences, whose rows go to a paged
// cache: those of attention, and the indexer's keys. Useful bytes are those of the new tokens,
// which are read once and written to the state, of the windows that are complete, and of their
// rows.
#include <memory>

#include "winnow/cache/cache_cases.h"
#include "winnow/cache/key_page.h"
#include "winnow/compressor/cases.h"
#include "winnow/compressor/step/step.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> step_benchmarks();

namespace {

// DeepSeek-V4's rows, and its keys beside those of CSA.
std::vector<BenchShape> step_shapes() {
  std::vector<BenchShape> list;
  for (BenchShape shape : bench_shapes()) {
    shape.name = shape.name.substr(0, shape.name.rfind('-'));
    list.push_back(shape);
    if (!shape.overlap) continue;
    shape.name = shape.name.substr(0, shape.name.rfind('-')) + "-keys";
    shape.d = 128;
    shape.hadamard = true;
    list.push_back(shape);
  }
  return list;
}

}  // namespace

std::vector<testing::Benchmark> step_benchmarks() {
  std::vector<testing::Benchmark> list;
  for (BenchShape shape : step_shapes()) {
    const std::int64_t sequences = shape.device == DeviceType::cpu ? 64 : 128;
    shape.name += testing::numbered("-b", sequences);
    shape.lengths.assign(static_cast<std::size_t>(sequences), 1);
    const std::int64_t columns = shape.columns(), ring = columns / shape.d * shape.ratio;
    const std::int64_t complete = sequences / shape.ratio;  // sequences are at all places
    const bool keys = shape.hadamard;
    const std::int64_t stored = keys ? shape.d + 4 : sparse_mla::Row584::kBytes;
    testing::Benchmark benchmark = make_benchmark(
        shape, double(sequences * columns * 2 * size_of(shape.dtype) + complete * stored) +
                   4.0 * double((sequences * columns + complete * ring * shape.d) * 2));
    benchmark.in_graph = true;
    if (shape.device == DeviceType::cuda && !keys) benchmark.target_seconds = 8e-6;
    benchmark.prepare = [=](const testing::Target& target) -> testing::Prepared {
      struct Data {
        CaseInputs inputs, turns;
        Tensor first, states, slots, state;
        testing::StridedTensor cache;
      };
      CaseShape longest = shape;
      longest.lengths = {4 * shape.ratio};
      const Device device = testing::device_of(target);
      const std::int64_t pages = sequences / indexer::kPageRows;
      auto data = std::make_shared<Data>(Data{
          make_inputs(shape).on(device), make_inputs(longest).on(device),
          Tensor(DType::i32, {sequences}), Tensor(DType::i32, {sequences}),
          Tensor(DType::i32, {sequences}),
          Tensor(DType::f32, {sequences, ring, 2 * columns}, device),
          testing::on(device,
                      keys ? testing::make_output(DType::u8, {pages, indexer::page_bytes(shape.d)},
                                                  Layout::dense)
                           : sparse_mla::make_cache(sparse_mla::CacheFormat::fp8_584, pages,
                                                    indexer::kPageRows))});
      for (std::int32_t i = 0; i < sequences; ++i) {
        data->states.values<std::int32_t>()[static_cast<std::size_t>(i)] = i;
        data->slots.values<std::int32_t>()[static_cast<std::size_t>(i)] = i;
        data->first.values<std::int32_t>()[static_cast<std::size_t>(i)] =
            static_cast<std::int32_t>(2 * shape.ratio + i % shape.ratio);
      }
      for (Tensor* tensor : {&data->states, &data->slots, &data->first}) {
        *tensor = tensor->to(device);
      }
      StepArgs args{.overlap = shape.overlap, .hadamard = shape.hadamard, .state = data->state};
      (keys ? args.pages : args.cache) = data->cache.view;
      args.slots = data->slots;
      args.kv = data->inputs.kv.view;
      args.gate = data->inputs.gate.view;
      args.position_bias = data->inputs.position_bias.view;
      args.cu_seqlens = data->inputs.cu_seqlens.view;
      args.first_position = data->first;
      args.state_slots = data->states;
      args.norm_weight = data->inputs.norm_weight.view;
      args.cos = data->turns.cos.view;
      args.sin = data->turns.sin.view;
      RunOptions options = target.options;
      options.stream = target.stream;
      return {[data, args, options] { step(args, options); }, {data->state, data->cache.storage}};
    };
    list.push_back(std::move(benchmark));
  }
  return list;
}

}  // namespace winnow::compressor
