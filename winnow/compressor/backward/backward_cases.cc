// The entry of compressor::backward in the list of operations: its cases against the oracle.
#include "winnow/compressor/backward/backward.h"
#include "winnow/compressor/backward/backward_contract.h"
#include "winnow/compressor/backward/backward_oracle.h"
#include "winnow/compressor/cases.h"
#include "winnow/testing/repeated.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> backward_benchmarks();
testing::Operation backward_operation();

namespace {

testing::CaseOutcome run(const CaseShape& shape, const testing::Target& target) {
  const Device device = testing::device_of(target);
  const CaseInputs inputs = make_inputs(shape), there = inputs.on(device);
  const DType narrow = shape.rows_dtype(), real = accumulator_of(shape.dtype);
  testing::Random random(testing::seed_from(shape.name) + 1);
  const StridedTensor d_rows = make_tensor(narrow, {shape.rows(), shape.d}, shape.layout);
  testing::fill_normal(d_rows.view, random);
  const auto output = [&](DType dtype, const std::vector<std::int64_t>& sizes) {
    return testing::on(device,
                       make_output(dtype, sizes, sizes.size() > 1 ? shape.layout : Layout::dense));
  };
  const StridedTensor d_kv = output(narrow, {shape.tokens(), shape.columns()});
  const StridedTensor d_gate = output(narrow, {shape.tokens(), shape.columns()});
  const StridedTensor d_bias = output(real, {shape.ratio, shape.columns()});
  const StridedTensor d_norm = shape.norm ? output(real, {shape.d}) : StridedTensor{};
  const StridedTensor d_rows_there = testing::on(device, d_rows);
  const CaseRows made = make_rows(shape, there, target.options);
  BackwardArgs args{.d_rows = d_rows_there.view,
                    .d_kv = d_kv.view,
                    .d_gate = d_gate.view,
                    .d_position_bias = d_bias.view,
                    .d_norm_weight = d_norm.view};
  there.pass_to(args);
  made.pass_to(args);
  testing::CaseOutcome outcome;
  outcome.backend = backward(args, target.options);
  inputs.pass_to(args);
  args.d_rows = d_rows.view;
  const oracle::Gradients expected = oracle::backward(args);
  const testing::Tolerance of_tokens = gradient_tolerance(narrow),
                           of_sums = gradient_tolerance(real),
                           of_biases = bias_gradient_tolerance(shape);
  const auto compare = [&](std::string_view what, const StridedTensor& got,
                           const oracle::Vector& wanted, const testing::Tolerance& tolerance) {
    testing::compare_output(outcome, what, testing::on({}, got), wanted, tolerance);
  };
  compare("d_kv", d_kv, expected.kv.values, of_tokens);
  compare("d_gate", d_gate, expected.gate.values, of_tokens);
  compare("d_position_bias", d_bias, expected.bias.values, of_biases);
  if (shape.norm) compare("d_norm_weight", d_norm, expected.norm_weight, of_sums);
  return outcome;
}

}  // namespace

testing::Operation backward_operation() {
  return {"compressor::backward", "gradients of the rows that stand for several tokens",
          testing::cases_of(case_shapes(), run, testing::all_but_f64<CaseShape>),
          backward_benchmarks(), testing::repeated(kBackward, backward)};
}

}  // namespace winnow::compressor
