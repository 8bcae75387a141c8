// Benchmarks of compressor::step: one new token of each of many sequences. Useful bytes are those
// of the new tokens, which are read once and written to the state, of the windows that are
// complete, and of their rows.
#include <memory>

#include "winnow/compressor/cases.h"
#include "winnow/compressor/step/step.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> step_benchmarks();

std::vector<testing::Benchmark> step_benchmarks() {
  std::vector<testing::Benchmark> list;
  for (BenchShape shape : bench_shapes()) {
    const std::int64_t sequences = shape.device == DeviceType::cpu ? 64 : 128;
    shape.name = shape.name.substr(0, shape.name.rfind('-')) + testing::numbered("-b", sequences);
    shape.lengths.assign(static_cast<std::size_t>(sequences), 1);
    const std::int64_t columns = shape.columns(), ring = columns / shape.d * shape.ratio;
    const std::int64_t complete = sequences / shape.ratio;  // sequences are at all places
    const std::int64_t elements = sequences * columns * 2 + complete * shape.d;
    testing::Benchmark benchmark = make_benchmark(
        shape, double(elements * size_of(shape.dtype)) +
                   4.0 * double((sequences * columns + complete * ring * shape.d) * 2));
    benchmark.prepare = [=](const testing::Target& target) -> testing::Prepared {
      struct Data {
        CaseInputs inputs, turns;
        Tensor first, slots, state, rows;
      };
      CaseShape longest = shape;
      longest.lengths = {4 * shape.ratio};
      const Device device = testing::device_of(target);
      auto data = std::make_shared<Data>(
          Data{make_inputs(shape).on(device), make_inputs(longest).on(device),
               Tensor(DType::i32, {sequences}), Tensor(DType::i32, {sequences}),
               Tensor(DType::f32, {sequences, ring, 2 * columns}, device),
               Tensor(shape.dtype, {sequences, shape.d}, device)});
      for (std::int32_t i = 0; i < sequences; ++i) {
        data->slots.values<std::int32_t>()[static_cast<std::size_t>(i)] = i;
        data->first.values<std::int32_t>()[static_cast<std::size_t>(i)] =
            static_cast<std::int32_t>(2 * shape.ratio + i % shape.ratio);
      }
      data->slots = data->slots.to(device);
      data->first = data->first.to(device);
      StepArgs args{.overlap = shape.overlap, .state = data->state, .rows = data->rows};
      args.kv = data->inputs.kv.view;
      args.gate = data->inputs.gate.view;
      args.position_bias = data->inputs.position_bias.view;
      args.cu_seqlens = data->inputs.cu_seqlens.view;
      args.first_position = data->first;
      args.state_slots = data->slots;
      args.norm_weight = data->inputs.norm_weight.view;
      args.cos = data->turns.cos.view;
      args.sin = data->turns.sin.view;
      return {[data, args, options = target.options] { step(args, options); },
              {data->state, data->rows}};
    };
    list.push_back(std::move(benchmark));
  }
  return list;
}

}  // namespace winnow::compressor
