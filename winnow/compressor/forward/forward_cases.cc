// The entry of compressor::forward in the list of operations: its cases against the oracle.
#include "winnow/compressor/cases.h"
#include "winnow/compressor/forward/forward.h"
#include "winnow/compressor/forward/forward_contract.h"
#include "winnow/compressor/forward/forward_oracle.h"
#include "winnow/testing/repeated.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> forward_benchmarks();
testing::Operation forward_operation();

namespace {

testing::CaseOutcome run(const CaseShape& shape, const testing::Target& target) {
  const Device device = testing::device_of(target);
  const CaseInputs inputs = make_inputs(shape), there = inputs.on(device);
  const StridedTensor rows =
      testing::on(device, make_output(shape.rows_dtype(), {shape.rows(), shape.d}, shape.layout));
  const DType real = accumulator_of(shape.dtype);
  const StridedTensor rstd =
      shape.norm ? testing::on(device, make_output(real, {shape.rows()}, Layout::dense))
                 : StridedTensor{};
  ForwardArgs args{.rows = rows.view, .rstd = rstd.view};
  there.pass_to(args);
  testing::CaseOutcome outcome;
  outcome.backend = forward(args, target.options);
  inputs.pass_to(args);
  testing::compare_output(outcome, "rows", testing::on({}, rows), oracle::forward(args),
                          rows_tolerance(shape.rows_dtype()));
  if (shape.norm) {
    testing::compare_output(outcome, "rstd", testing::on({}, rstd), oracle::rstd(args),
                            rows_tolerance(real));
  }
  return outcome;
}

}  // namespace

testing::Operation forward_operation() {
  return {"compressor::forward", "rows that stand for several tokens each",
          testing::cases_of(case_shapes(), run, testing::all_but_f64<CaseShape>),
          forward_benchmarks(), testing::repeated(kForward, forward)};
}

}  // namespace winnow::compressor
