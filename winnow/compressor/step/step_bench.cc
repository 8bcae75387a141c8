// Benchmarks of compressor::step: one new token of each of many sequences. Useful bytes are those
// of the new tokens, which are read once and written to the state, of the windows that are
// complete, and of their rows.
#include <memory>

#include "winnow/compressor/cases.h"
#include "winnow/compressor/step/step.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> step_benchmarks();

std::vector<testing::Benchmark> step_benchmarks() {
  constexpr std::int64_t kSequences = 128;
  std::vector<testing::Benchmark> list;
  for (CaseShape shape : bench_shapes()) {
    shape.name.replace(shape.name.find("-s8192"), 6, "-b128");
    shape.lengths.assign(kSequences, 1);
    const std::int64_t columns = shape.columns(), ring = columns / shape.d * shape.ratio;
    const std::int64_t complete = kSequences / shape.ratio;  // sequences are at all places
    const std::int64_t elements = kSequences * columns * 2 + complete * shape.d;
    testing::Benchmark benchmark = make_benchmark(
        shape, double(elements * size_of(shape.dtype)) +
                   4.0 * double((kSequences * columns + complete * ring * shape.d) * 2));
    benchmark.prepare = [=](const testing::Target& target) -> testing::Prepared {
      struct Data {
        CaseInputs inputs, turns;
        Tensor first, slots, state, rows;
      };
      CaseShape longest = shape;
      longest.lengths = {4 * shape.ratio};
      auto data = std::make_shared<Data>(Data{
          make_inputs(shape), make_inputs(longest), Tensor(DType::i32, {kSequences}),
          Tensor(DType::i32, {kSequences}), Tensor(DType::f32, {kSequences, ring, 2 * columns}),
          Tensor(shape.dtype, {kSequences, shape.d})});
      for (std::int32_t i = 0; i < kSequences; ++i) {
        data->slots.values<std::int32_t>()[static_cast<std::size_t>(i)] = i;
        data->first.values<std::int32_t>()[static_cast<std::size_t>(i)] =
            static_cast<std::int32_t>(2 * shape.ratio + i % shape.ratio);
      }
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
