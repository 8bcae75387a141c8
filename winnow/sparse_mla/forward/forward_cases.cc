// The entry of sparse_mla::forward in the list of operations: its cases against the oracle.
#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/sparse_mla/forward/forward_oracle.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> forward_benchmarks();
testing::Operation forward_operation();

namespace {

testing::CaseOutcome run(const CaseShape& shape, const testing::Target& target) {
  require_cpu("sparse_mla::forward", target);
  const CaseInputs inputs = make_inputs(shape);
  const StridedTensor out =
      make_output(shape.dtype, {shape.s_q, shape.h_q, kValueDim}, shape.layout);
  const StridedTensor max_logits = make_output(DType::f32, {shape.s_q, shape.h_q}, shape.layout);
  const StridedTensor lse = make_output(DType::f32, {shape.s_q, shape.h_q}, shape.layout);
  ForwardArgs args{.out = out.view, .max_logits = max_logits.view, .lse = lse.view};
  inputs.pass_to(args);

  testing::CaseOutcome outcome;
  outcome.backend = forward(args, target.options);

  const std::vector<std::int64_t> queries = checked_queries(shape);
  const oracle::Forward expected = oracle::forward(inputs.for_oracle(), queries);
  const auto compare = [&](std::string_view what, const StridedTensor& actual,
                           std::span<const double> values, Quantity quantity) {
    outcome.comparisons.push_back(check_written(what, actual));
    outcome.comparisons.push_back(testing::compare(
        what, actual.view, values, tolerance(quantity, shape, expected.largest_logit), queries));
  };
  compare("out", out, expected.out, Quantity::out);
  compare("max_logits", max_logits, expected.max_logits, Quantity::max_logits);
  compare("lse", lse, expected.lse, Quantity::lse);
  return outcome;
}

}  // namespace

testing::Operation forward_operation() {
  testing::Operation operation;
  operation.name = "sparse_mla::forward";
  operation.summary = "top-k sparse MLA attention";
  for (const CaseShape& shape : case_shapes()) {
    operation.cases.push_back({shape.name, describe(shape), [shape](const testing::Target& target) {
                                 return run(shape, target);
                               }});
  }
  operation.benchmarks = forward_benchmarks();
  return operation;
}

}  // namespace winnow::sparse_mla
