#include "winnow/compressor/cases.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "winnow/compressor/forward/forward.h"

namespace winnow::compressor {
namespace {

using winnow::testing::numbered;
using winnow::testing::Random;
using winnow::testing::RelativeTo;
using winnow::testing::Tolerance;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void fill_part(const TensorView& view, std::int64_t row, std::int64_t rows, std::int64_t column,
               std::int64_t columns, double value) {
  winnow::testing::fill(view.slice(0, row, row + rows).slice(1, column, column + columns), value);
}

// What no window sums up: the tail of each sequence, and with overlap what would go to a window
// that the sequence does not have.
void poison(const CaseShape& shape, const TensorView& view) {
  std::int64_t token = 0;
  for (const std::int64_t length : shape.lengths) {
    const std::int64_t windows = length / shape.ratio, tail = windows * shape.ratio;
    fill_part(view, token + tail, length - tail, 0, shape.columns(), std::nan(""));
    if (shape.overlap && windows > 0) {
      fill_part(view, token + tail - shape.ratio, shape.ratio, 0, shape.d, std::nan(""));
    }
    token += length;
  }
}

void fill_gates(const CaseShape& shape, const TensorView& gate, Random& random) {
  winnow::testing::fill_normal(gate, random, shape.gates == Gates::far ? 200 : 1);
  if (shape.gates == Gates::equal) winnow::testing::fill(gate, 0);
  if (shape.gates != Gates::minus_inf && shape.gates != Gates::nan) return;
  const std::int64_t columns = shape.columns(), tokens = shape.tokens();
  for (std::int64_t t = 0; t < tokens; ++t) {
    fill_part(gate, t, 1, random.below(columns), 1, -kInfinity);
  }
  if (shape.gates != Gates::nan) return;
  fill_part(gate, 2, 1, columns - 1, 1, std::nan(""));
  fill_part(gate, 3, 1, columns - 2, 1, kInfinity);
  fill_part(gate, 0, shape.ratio, columns - 3, 1, -kInfinity);
}

std::vector<CaseShape> make_shapes() {
  std::vector<CaseShape> list;
  const auto add = [&list](const CaseShape& shape) {
    testing::add(list, {DType::f32, DType::f16, DType::bf16}, shape);
  };
  add({.name = "overlap"});
  add({.name = "plain", .overlap = false});
  add({.name = "csa", .lengths = {41, 6}, .d = 512, .norm = true, .positions = true, .pairs = 32});
  add({.name = "keys", .d = 128, .norm = true, .hadamard = true, .pairs = 32});
  add({.name = "hca",
       .lengths = {300, 127, 128},
       .ratio = 128,
       .d = 512,
       .overlap = false,
       .norm = true,
       .pairs = 32});
  add({.name = "overlap-128", .lengths = {400}, .ratio = 128});
  add({.name = "largest", .lengths = {300, 129}, .ratio = 128, .d = 512, .norm = true});
  // Of many slots, but not of the most, and columns that fill no block.
  add({.name = "large-overlap",
       .lengths = {260, 49, 100},
       .ratio = 50,
       .d = 104,
       .norm = true,
       .positions = true,
       .pairs = 10});
  add({.name = "large-strided",
       .lengths = {230, 99},
       .ratio = 100,
       .d = 72,
       .overlap = false,
       .norm = true,
       .positions = true,
       .pairs = 3,
       .layout = Layout::wide});
  add({.name = "many-large", .lengths = {131 * 65}, .ratio = 65, .d = 40, .overlap = false});
  for (const bool overlap : {false, true}) {
    const std::string kind = overlap ? "-overlap" : "-plain";
    for (const std::int64_t ratio : {1, 2, 3, 7, 31}) {
      add({.name = numbered("ratio", ratio) + kind,
           .ratio = ratio,
           .d = 24,
           .overlap = overlap,
           .norm = true,
           .positions = true,
           .pairs = 3});
    }
    for (const std::int64_t d : {8, 16, 40, 104, 512}) {
      add({.name = numbered("d", d) + kind, .d = d, .overlap = overlap, .pairs = d / 2});
    }
  }
  add({.name = "hadamard", .d = 8, .hadamard = true});
  add({.name = "hadamard-groups", .ratio = 8, .d = 8, .hadamard = true});
  add({.name = "norm", .norm = true});
  add({.name = "rotated", .positions = true, .pairs = 5});
  add({.name = "no-pairs", .pairs = 0});
  add({.name = "wide-result", .norm = true, .pairs = 8, .wide = true});
  add({.name = "no-sequence", .lengths = {}});
  add({.name = "no-token", .lengths = {0, 0}, .norm = true});
  add({.name = "no-row", .lengths = {3, 2, 1}});
  add({.name = "many",
       .lengths = std::vector<std::int64_t>(100, 9),
       .d = 8,
       .positions = true,
       .pairs = 2});
  // More than a warp of backward finds at a time, on one multiprocessor.
  add({.name = "many-windows",
       .lengths = {60, 0, 19},
       .ratio = 1,
       .d = 512,
       .norm = true,
       .positions = true,
       .pairs = 32});
  add({.name = "far", .gates = Gates::far});
  add({.name = "equal", .gates = Gates::equal});
  add({.name = "minus-inf", .gates = Gates::minus_inf});
  add({.name = "nan", .gates = Gates::nan});
  for (const auto& [name, layout] : {std::pair("strided", Layout::wide),
                                     {"reversed", Layout::reversed},
                                     {"broadcast", Layout::broadcast}}) {
    add({.name = name,
         .norm = true,
         .positions = true,
         .pairs = 8,
         .layout = layout,
         .poison = layout != Layout::broadcast});
  }
  testing::add_f64(list, {"overlap", "plain", "csa", "keys", "hca", "ratio3-overlap", "norm",
                          "rotated", "no-row", "far", "strided"});
  return list;
}

}  // namespace

std::int64_t CaseShape::tokens() const {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

std::int64_t CaseShape::rows() const {
  std::int64_t sum = 0;
  for (const std::int64_t length : lengths) sum += length / ratio;
  return sum;
}

const std::vector<CaseShape>& case_shapes() {
  static const std::vector<CaseShape> shapes = make_shapes();
  return shapes;
}

std::string describe(const CaseShape& shape) {
  return "tokens " + std::to_string(shape.tokens()) + ", sequences " +
         std::to_string(shape.lengths.size()) + ", ratio " + std::to_string(shape.ratio) + ", d " +
         std::to_string(shape.d);
}

CaseInputs make_inputs(const CaseShape& shape) {
  Random random(winnow::testing::seed_from(shape.name));
  const DType real = accumulator_of(shape.dtype);
  const auto n = static_cast<std::int64_t>(shape.lengths.size());
  CaseInputs inputs;
  inputs.overlap = shape.overlap;
  inputs.hadamard = shape.hadamard;
  inputs.kv = make_tensor(shape.dtype, {shape.tokens(), shape.columns()}, shape.layout);
  inputs.gate = make_tensor(shape.dtype, {shape.tokens(), shape.columns()}, shape.layout);
  inputs.position_bias =
      make_tensor(real, {shape.ratio, shape.columns()},
                  shape.layout == Layout::broadcast ? Layout::wide : shape.layout);
  constexpr std::int64_t kMany = 1 << 22;  // more than drawing number by number is good for
  if (inputs.kv.view.numel() > kMany) {
    winnow::testing::fill_normal_rows(inputs.kv.view, random);
    winnow::testing::fill_normal_rows(inputs.gate.view, random);
  } else {
    winnow::testing::fill_normal(inputs.kv.view, random);
    fill_gates(shape, inputs.gate.view, random);
  }
  winnow::testing::fill_normal(inputs.position_bias.view, random,
                               shape.gates == Gates::equal ? 0 : 1);
  if (shape.poison) {
    poison(shape, inputs.kv.view);
    poison(shape, inputs.gate.view);
  }
  inputs.cu_seqlens = make_tensor(DType::i32, {n + 1}, Layout::dense);
  inputs.cu_rows = make_tensor(DType::i32, {n + 1}, Layout::dense);
  if (shape.positions) inputs.first_position = make_tensor(DType::i32, {n}, Layout::dense);
  std::int32_t token = 0, row = 0;
  std::int64_t positions = 1;
  for (std::int64_t i = 0; i <= n; ++i) {
    inputs.cu_seqlens.view.at<std::int32_t>(i) = token;
    inputs.cu_rows.view.at<std::int32_t>(i) = row;
    if (i == n) break;
    const std::int64_t length = shape.lengths[static_cast<std::size_t>(i)];
    const std::int64_t first = shape.positions ? random.below(50) : 0;
    if (shape.positions) {
      inputs.first_position.view.at<std::int32_t>(i) = static_cast<std::int32_t>(first);
    }
    token += static_cast<std::int32_t>(length);
    row += static_cast<std::int32_t>(length / shape.ratio);
    positions = std::max(positions, first + length);
  }
  if (shape.norm) {
    inputs.norm_weight = make_tensor(real, {shape.d}, Layout::dense);
    winnow::testing::fill_uniform(inputs.norm_weight.view, random, 0.5, 1.5);
  }
  if (shape.pairs > 0) {
    inputs.cos = make_tensor(real, {positions, shape.pairs}, shape.layout);
    inputs.sin = make_tensor(real, {positions, shape.pairs}, shape.layout);
    for (std::int64_t p = 0; p < positions; ++p) {
      for (std::int64_t k = 0; k < shape.pairs; ++k) {
        const double angle = double(p) * std::pow(10000.0, -double(k) / double(shape.pairs));
        fill_part(inputs.cos.view, p, 1, k, 1, std::cos(angle));
        fill_part(inputs.sin.view, p, 1, k, 1, std::sin(angle));
      }
    }
  }
  return inputs;
}

CaseInputs CaseInputs::on(Device device) const {
  CaseInputs there;
  for (const auto member : {&CaseInputs::kv, &CaseInputs::gate, &CaseInputs::position_bias,
                            &CaseInputs::cu_seqlens, &CaseInputs::cu_rows, &CaseInputs::norm_weight,
                            &CaseInputs::cos, &CaseInputs::sin, &CaseInputs::first_position}) {
    there.*member = testing::on(device, this->*member);
  }
  there.overlap = overlap;
  there.hadamard = hadamard;
  return there;
}

CaseRows make_rows(const CaseShape& shape, const CaseInputs& inputs, const RunOptions& options) {
  if (!shape.norm) return {};
  const Device device = inputs.kv.view.device();
  CaseRows made{
      testing::on(device, make_output(shape.rows_dtype(), {shape.rows(), shape.d}, shape.layout)),
      testing::on(device, make_output(accumulator_of(shape.dtype), {shape.rows()}, Layout::dense))};
  ForwardArgs args;
  inputs.pass_to(args);
  made.pass_to(args);
  forward(args, options);
  return made;
}

Tolerance rows_tolerance(DType rows) {
  switch (rows) {
    case DType::f64:
      return {1e-13, RelativeTo::row};
    case DType::f32:
      return {2e-6, RelativeTo::row};
    case DType::f16:  // half a unit in the last place
      return {0x1p-11 + 2e-6, RelativeTo::row};
    default:
      return {0x1p-8 + 2e-6, RelativeTo::row};
  }
}

Tolerance gradient_tolerance(DType narrowest) {
  switch (narrowest) {
    case DType::f64:
      return {1e-11};
    case DType::f32:
      return {2e-5};
    default:
      return {1e-2, RelativeTo::tensor, 1e-5};
  }
}

Tolerance bias_gradient_tolerance(const CaseShape& shape) {
  const DType sums = accumulator_of(shape.dtype);
  if (!shape.norm || shape.rows_dtype() == sums) return gradient_tolerance(sums);
  return {1e-3};
}

std::vector<BenchShape> bench_shapes() {
  std::vector<BenchShape> list;
  const auto add = [&](DType dtype, std::int64_t tokens, DeviceType device) {
    for (const bool overlap : {true, false}) {
      BenchShape shape;
      shape.name = std::string(to_string(dtype)) + (overlap ? "-csa" : "-hca") +
                   testing::numbered("-s", tokens);
      shape.dtype = dtype;
      shape.lengths = {tokens};
      shape.ratio = overlap ? 4 : 128;
      shape.d = 512;
      shape.overlap = overlap;
      shape.norm = true;
      shape.pairs = 32;
      shape.poison = false;
      shape.device = device;
      list.push_back(shape);
    }
  };
  add(DType::f32, 8192, DeviceType::cpu);
  add(DType::bf16, 8192, DeviceType::cpu);
  add(DType::bf16, 131072, DeviceType::cuda);
  return list;
}

testing::Benchmark make_benchmark(const BenchShape& shape, double bytes) {
  testing::Benchmark benchmark;
  benchmark.name = shape.name;
  benchmark.shape = describe(shape);
  benchmark.bytes = bytes;
  benchmark.device = shape.device;
  benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
  benchmark.ceiling.bytes =
      static_cast<std::int64_t>(shape.device == DeviceType::cpu ? bytes / 2 : bytes);
  return benchmark;
}

}  // namespace winnow::compressor
