// The case table of paged_xl::position_term.
#include "winnow/paged_xl/cases.h"
#include "winnow/paged_xl/position_term/position_term_contract.h"
#include "winnow/paged_xl/position_term/position_term_oracle.h"
#include "winnow/testing/repeated.h"

namespace winnow::paged_xl {

std::vector<testing::Benchmark> position_term_benchmarks();

namespace {

using testing::CaseOutcome;
using testing::numbered;
using testing::Target;

std::vector<StepCase> make_cases() {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  std::vector<StepCase> list;
  const auto add_case = [&list](std::initializer_list<DType> dtypes, StepCase shape) {
    for (const DType dtype : dtypes) {
      StepCase next = shape;
      next.dtype = dtype;
      next.name = std::string(to_string(dtype)) + "-" + shape.name;
      list.push_back(next);
      if (dtype == DType::f32) continue;
      next.name = std::string(to_string(dtype)) + "-out-" + shape.name;
      next.matrix_bd_dtype = dtype;
      list.push_back(next);
    }
  };
  for (const std::int64_t head_size : {32, 64, 80, 96, 112, 128, 160, 192, 256}) {
    add_case({f32, f16, bf16}, {.name = numbered("d", head_size), .head_size = head_size});
  }
  add_case({f32, bf16}, {.name = "no-context", .context_lens = {0, 0}});
  add_case({f32, bf16}, {.name = "no-sequence", .context_lens = {}});
  add_case({f32, bf16}, {.name = "splits", .context_lens = {1, 511, 512, 513, 1025, 7, 8, 9}});
  add_case({f32, bf16},
           {.name = "c131072", .num_heads = 2, .head_size = 32, .context_lens = {131072}});
  add_case({f32}, {.name = "nothing-spare", .spare = 0});
  add_case({f32, f16, bf16}, {.name = "wide", .layout = Layout::wide});
  add_case({f32, bf16}, {.name = "reversed", .layout = Layout::reversed});
  add_case({f32, f16, bf16}, {.name = "bias-per-seq", .bias_per_sequence = true});
  testing::add_f64(list, {"d32", "d80", "d256", "no-context", "splits", "nothing-spare", "wide",
                          "reversed", "bias-per-seq"});
  return list;
}

CaseOutcome run_case(const StepCase& shape, const Target& target) {
  const Device device = testing::device_of(target);
  const Step host_step = make_step(shape);
  const Step step = host_step.on(device);
  const StridedTensor there = testing::on(
      device,
      make_unaligned(shape.dtype_of_matrix_bd(),
                     {step.query.view.size(0), shape.num_heads, step.matrix_bd.view.size(2)},
                     shape.layout));
  PositionTermArgs args = step.position_term_args();
  args.matrix_bd = there.view;
  CaseOutcome outcome;
  outcome.backend = position_term(args, target.options);
  const StridedTensor matrix_bd = testing::on({}, there);
  args = host_step.position_term_args();
  args.matrix_bd = matrix_bd.view;
  // Unwritten memory is NaN, and so is what the oracle expects beyond each context.
  outcome.comparisons = {
      testing::compare("matrix_bd", matrix_bd.view, oracle::position_term(args),
                       tolerance(Quantity::matrix_bd, matrix_bd.view.dtype(), 0))};
  return outcome;
}

}  // namespace

testing::Operation position_term_operation() {
  return {"paged_xl::position_term", "the position term that one decode step adds to its logits",
          testing::cases_of(make_cases(), run_case, testing::all_but_f64<StepCase>),
          position_term_benchmarks(), testing::repeated(kPositionTerm, position_term)};
}

}  // namespace winnow::paged_xl
