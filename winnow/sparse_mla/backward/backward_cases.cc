// The entry of sparse_mla::backward in the list of operations: its cases against the oracle.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/backward/backward_contract.h"
#include "winnow/sparse_mla/backward/backward_oracle.h"
#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/testing/repeated.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> backward_benchmarks();
testing::Operation backward_operation();
testing::Operation backward_operation(std::int64_t most_queries);

namespace {

// What can be asked of backward beside the problem itself.
struct Variant {
  std::string suffix;
  bool dq_f32 = false, dkv_as_q = false, delta_given = false, deterministic = false;
  // Inputs that must not contribute are NaN: those of heads whose sink is +inf and of queries that
  // see no entry.
  bool nan_in_dead = false;
};

void fill_dead(const oracle::Inputs& in, std::initializer_list<TensorView> tensors) {
  for (std::int64_t i = 0; i < in.s_q(); ++i) {
    const bool sees_nothing = oracle::visible_entries(in, i).empty();
    for (std::int64_t h = 0; h < in.h_q(); ++h) {
      if (!sees_nothing && in.sink(h) != oracle::kInfinity) continue;
      for (const TensorView& tensor : tensors) {
        winnow::testing::fill(tensor.slice(0, i, i + 1).slice(1, h, h + 1), std::nan(""));
      }
    }
  }
}

StridedTensor round_to(DType dtype, const std::vector<std::int64_t>& shape, Layout layout,
                       std::span<const double> values) {
  StridedTensor tensor = make_output(dtype, shape, layout);
  winnow::testing::fill(tensor.view, values);
  return tensor;
}

testing::CaseOutcome run(const CaseShape& shape, const Variant& variant,
                         const testing::Target& target) {
  const Device device = testing::device_of(target);
  const DType real = accumulator_of(shape.dtype);
  const CaseInputs inputs = make_inputs(shape);
  const oracle::Inputs in = inputs.for_oracle();
  winnow::testing::Random random(winnow::testing::seed_from(shape.name + "-backward"));

  // out and lse of an exact forward, rounded to their dtypes.
  const std::vector<std::int64_t> all = choose(shape.s_q, shape.s_q, 0);
  const std::vector<std::int64_t> values = {shape.s_q, shape.h_q, kValueDim};
  const oracle::Forward softmax = oracle::forward(in, all);
  const StridedTensor lse = round_to(real, {shape.s_q, shape.h_q}, shape.layout, softmax.lse);
  const StridedTensor out = round_to(shape.dtype, values, shape.layout, softmax.out);
  const StridedTensor d_out = make_tensor(shape.dtype, values, shape.layout);
  winnow::testing::fill_normal(d_out.view, random);
  if (shape.free_out) winnow::testing::fill_normal(out.view, random);
  if (variant.nan_in_dead) fill_dead(in, {inputs.q.view, out.view, d_out.view});
  const CaseInputs inputs_there = inputs.on(device);

  StridedTensor delta;
  if (variant.delta_given) {
    delta = make_output(real, {shape.s_q, shape.h_q}, shape.layout);
    winnow::testing::fill_normal(delta.view, random);
  }
  oracle::Gradients given{{}, lse.view, d_out.view, delta.view};
  if (!variant.delta_given) given.out = out.view;

  const auto there = [&](const StridedTensor& tensor) { return testing::on(device, tensor); };
  const StridedTensor out_there = there(out), lse_there = there(lse), d_out_there = there(d_out),
                      delta_there = there(delta);
  const StridedTensor dq_there = there(make_output(
      variant.dq_f32 ? real : shape.dtype, {shape.s_q, shape.h_q, shape.d_qk}, shape.layout));
  const StridedTensor dkv_there = there(make_output(variant.dkv_as_q ? shape.dtype : real,
                                                    {shape.s_kv, 1, shape.d_qk}, shape.layout));
  StridedTensor d_sink_there, dextra_kv_there;
  BackwardArgs args{.lse = lse_there.view,
                    .d_out = d_out_there.view,
                    .delta = delta_there.view,
                    .deterministic = variant.deterministic,
                    .dq = dq_there.view,
                    .dkv = dkv_there.view};
  if (!variant.delta_given) args.out = out_there.view;
  inputs_there.pass_to(args);
  if (args.attn_sink.present()) {
    d_sink_there = there(make_output(real, {shape.h_q}, Layout::dense));
    args.d_sink = d_sink_there.view;
  }

  if (shape.extra) {
    dextra_kv_there = there(make_output(variant.dkv_as_q ? shape.dtype : real,
                                        {shape.extra->s_kv, 1, shape.d_qk}, shape.layout));
    args.dextra_kv = dextra_kv_there.view;
  }

  testing::CaseOutcome outcome;
  outcome.backend = backward(args, target.options);
  const StridedTensor dq = testing::on({}, dq_there), dkv = testing::on({}, dkv_there),
                      d_sink = testing::on({}, d_sink_there),
                      dextra_kv = testing::on({}, dextra_kv_there);

  const std::vector<std::int64_t> queries = checked_queries(shape);
  const std::vector<std::int64_t> rows = checked_rows(shape, inputs);
  const oracle::Backward expected = oracle::backward(in, given, queries, rows);
  const auto compare = [&](std::string_view what, const StridedTensor& actual,
                           std::span<const double> wanted, Quantity quantity,
                           std::span<const std::int64_t> chosen) {
    testing::compare_output(outcome, what, actual, wanted,
                            tolerance(quantity, shape, expected.largest_logit), chosen);
  };
  compare("dq", dq, expected.dq, Quantity::dq, queries);
  // The rows of the two sources follow each other.
  const auto extra_rows = std::ranges::lower_bound(rows, shape.s_kv);
  const auto first_rows = static_cast<std::size_t>(extra_rows - rows.begin());
  const std::span<const double> row_gradients(expected.dkv);
  const std::size_t first_numbers = first_rows * static_cast<std::size_t>(shape.d_qk);
  compare("dkv", dkv, row_gradients.first(first_numbers), Quantity::dkv,
          std::span(rows).first(first_rows));
  if (shape.extra) {
    std::vector<std::int64_t> of_extra(extra_rows, rows.end());
    for (std::int64_t& row : of_extra) row -= shape.s_kv;
    compare("dextra_kv", dextra_kv, row_gradients.subspan(first_numbers), Quantity::dkv, of_extra);
  }
  if (args.d_sink.present()) compare("d_sink", d_sink, expected.d_sink, Quantity::d_sink, {});
  return outcome;
}

}  // namespace

testing::Operation backward_operation() {
  return backward_operation(std::numeric_limits<std::int64_t>::max());
}

// The same cases with s_q cut to `most_queries`, for the simulator.
testing::Operation backward_operation(std::int64_t most_queries) {
  testing::Operation operation;
  operation.name = "sparse_mla::backward";
  operation.summary = "gradients of top-k sparse MLA attention";
  operation.repeat = testing::repeated(kBackward, backward);
  const Variant variants[] = {
      {.suffix = "-dq-f32", .dq_f32 = true},
      {.suffix = "-dkv-as-q", .dkv_as_q = true},
      {.suffix = "-delta", .delta_given = true},
      {.suffix = "-deterministic", .deterministic = true},
      {.suffix = "-all-options",
       .dq_f32 = true,
       .dkv_as_q = true,
       .delta_given = true,
       .deterministic = true},
      {.suffix = "-nan-in-dead", .nan_in_dead = true},
      {.suffix = "-nan-in-dead-deterministic", .deterministic = true, .nan_in_dead = true},
  };
  const auto add = [&](const CaseShape& shape, const Variant& variant) {
    testing::Case one{
        .name = shape.name + variant.suffix,
        .shape = describe(shape),
        .run = [shape,
                variant](const testing::Target& target) { return run(shape, variant, target); },
        .on_gpu = on_gpu(shape),
        .only_gpu = testing::cuda_for_f16(shape)};
    if (shape.extra || shape.ranges != Ranges::absent) one.not_on = Backend::sm100;
    operation.cases.push_back(std::move(one));
  };
  for (CaseShape shape : with_extra_shapes(with_dense_shapes(case_shapes()))) {
    shape.s_q = std::min(shape.s_q, most_queries);
    add(shape, {});
    for (const char* name : {"h16", "d512-h16-k100", "all-rules", "wide", "sink-mixed",
                             "extra-range-list-all-rules"}) {
      if (shape.name != std::string(to_string(shape.dtype)) + "-" + name) continue;
      for (const Variant& variant : variants) {
        // In f64 all gradients are f64 anyway.
        const bool same = variant.dq_f32 || variant.dkv_as_q;
        if (same && shape.dtype == DType::f64) continue;
        // Without mixed sinks no head has one of +inf.
        if (variant.nan_in_dead && shape.sink != Sink::mixed) continue;
        add(shape, variant);
      }
    }
  }
  // More heads than 64 over a cache of several ranges of rows.
  std::vector<CaseShape> own;
  testing::add(
      own, {DType::bf16},
      CaseShape{.name = "skv25000-h128", .s_q = 4, .h_q = 128, .s_kv = 25000, .topk = 200});
  // The same with two lists, and ranges with more heads than one block of them.
  testing::add(own, {DType::bf16},
               CaseShape{.name = "extra-skv25000-h128",
                         .s_q = 4,
                         .h_q = 128,
                         .s_kv = 25000,
                         .topk = 200,
                         .extra = ExtraShape{.s_kv = 5000, .topk = 100}});
  testing::add(own, {DType::bf16},
               CaseShape{.name = "extra-range-range-h130",
                         .s_q = 9,
                         .h_q = 130,
                         .s_kv = 150,
                         .topk = 150,
                         .ranges = Ranges::late,
                         .sink = Sink::mixed,
                         .extra = ExtraShape{.s_kv = 300, .topk = 300, .ranges = Ranges::ragged}});
  // Three tiles or more of every backend, with one block of heads and with two.
  for (const std::int64_t heads : {16, 70}) {
    testing::add(own, {DType::bf16},
                 CaseShape{.name = testing::numbered("h", heads) + "-k600",
                           .s_q = 1,
                           .h_q = heads,
                           .s_kv = 700,
                           .topk = 600});
  }
  for (const CaseShape& shape : own) {
    add(shape, {});
    add(shape, {.suffix = "-deterministic", .deterministic = true});
  }
  operation.benchmarks = backward_benchmarks();
  return operation;
}

}  // namespace winnow::sparse_mla
