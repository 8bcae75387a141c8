// The entry of sparse_mla::forward in the list of operations: its cases against the oracle.
#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/sparse_mla/forward/forward_contract.h"
#include "winnow/sparse_mla/forward/forward_oracle.h"
#include "winnow/testing/repeated.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> forward_benchmarks();
testing::Operation forward_operation();

namespace {

testing::CaseOutcome run(const CaseShape& shape, const testing::Target& target) {
  const Device device = testing::device_of(target);
  const CaseInputs inputs = make_inputs(shape);
  const CaseInputs there = inputs.on(device);
  const auto output = [&](DType dtype, std::vector<std::int64_t> sizes) {
    return testing::on(device, make_output(dtype, sizes, shape.layout));
  };
  const StridedTensor out_there = output(shape.dtype, {shape.s_q, shape.h_q, kValueDim});
  const StridedTensor max_logits_there =
      output(accumulator_of(shape.dtype), {shape.s_q, shape.h_q});
  const StridedTensor lse_there = output(accumulator_of(shape.dtype), {shape.s_q, shape.h_q});
  ForwardArgs args{.flash_mla_lse = shape.flash_mla_lse,
                   .out = out_there.view,
                   .max_logits = max_logits_there.view,
                   .lse = lse_there.view};
  there.pass_to(args);
  Tensor workspace;
  workspace = Tensor(DType::u8, {forward_workspace_bytes(args, target.options)}, device);
  args.workspace = workspace;

  testing::CaseOutcome outcome;
  outcome.backend = forward(args, target.options);
  const StridedTensor out = testing::on({}, out_there);
  const StridedTensor max_logits = testing::on({}, max_logits_there);
  const StridedTensor lse = testing::on({}, lse_there);

  const std::vector<std::int64_t> queries = checked_queries(shape);
  oracle::Inputs for_oracle = inputs.for_oracle();
  for_oracle.flash_mla_lse = shape.flash_mla_lse;
  const oracle::Forward expected = oracle::forward(for_oracle, queries);
  const auto compare = [&](std::string_view what, const StridedTensor& actual,
                           std::span<const double> values, Quantity quantity) {
    testing::compare_output(outcome, what, actual, values,
                            tolerance(quantity, shape, expected.largest_logit), queries);
  };
  compare("out", out, expected.out, Quantity::out);
  compare("max_logits", max_logits, expected.max_logits, Quantity::max_logits);
  compare("lse", lse, expected.lse, Quantity::lse);
  return outcome;
}

std::vector<CaseShape> with_own_shapes(std::vector<CaseShape> shapes) {
  // Two blocks of heads share out the rows that they ask for.
  testing::add(
      shapes, {DType::bf16},
      CaseShape{.name = "skv50000-h128", .s_q = 3, .h_q = 128, .s_kv = 50000, .topk = 300});
  // Rows' largest logits come in any of eight tiles, and exceed those before by far.
  testing::add(
      shapes, {DType::bf16},
      CaseShape{
          .name = "later-maxima", .s_q = 2, .h_q = 64, .s_kv = 600, .topk = 512, .logits = 20});
  const CaseShape of_flash_mla{.name = "flash-mla-lse",
                               .h_q = 70,
                               .choice = Choice::some_nothing,
                               .sink = Sink::mixed,
                               .flash_mla_lse = true};
  testing::add(shapes, {DType::f32, DType::f16, DType::bf16, DType::f64}, of_flash_mla);
  CaseShape of_two = of_flash_mla;
  of_two.name = "extra-flash-mla-lse";
  of_two.extra = ExtraShape{.ranges = Ranges::empty};
  testing::add(shapes, {DType::f32, DType::bf16}, of_two);
  // On a GPU of two multiprocessors, as the simulated one, parts of the last item are handed on.
  const CaseShape whole{.name = "parts", .s_q = 5, .h_q = 64, .s_kv = 1100, .topk = 1024};
  testing::add(shapes, {DType::bf16}, whole);
  CaseShape ragged = whole;
  ragged.name = "parts-ragged";
  ragged.s_q = 11;
  ragged.h_q = 16;
  ragged.d_qk = 512;
  ragged.topk = 1000;
  ragged.lengths = Lengths::ragged;
  testing::add(shapes, {DType::bf16}, ragged);
  CaseShape two = whole;
  two.name = "extra-parts";
  two.topk = 700;
  two.extra = ExtraShape{.s_kv = 500, .topk = 400, .lengths = Lengths::ragged};
  testing::add(shapes, {DType::bf16}, two);
  return shapes;
}

}  // namespace

testing::Operation forward_operation() {
  return {"sparse_mla::forward", "top-k sparse MLA attention",
          testing::cases_of(with_extra_shapes(with_own_shapes(with_dense_shapes(case_shapes()))),
                            run, on_gpu, testing::cuda_for_f16<CaseShape>),
          forward_benchmarks(), testing::repeated(kForward, forward)};
}

}  // namespace winnow::sparse_mla
