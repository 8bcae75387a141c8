// The entry of sparse_mla::distribution in the list of operations: its cases against the oracle.

#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/distribution/distribution_contract.h"
#include "winnow/sparse_mla/distribution/distribution_oracle.h"
#include "winnow/testing/repeated.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> distribution_benchmarks();
testing::Operation distribution_operation();

namespace {

testing::CaseOutcome run(const CaseShape& shape, const testing::Target& target) {
  const CaseInputs inputs = make_inputs(shape);
  const oracle::Inputs in = inputs.for_oracle();
  const std::vector<std::int64_t> queries = checked_queries(shape);

  // The lse of the oracle, rounded to its dtype; of queries that are not looked at anything will
  // do.
  const DType real = accumulator_of(shape.dtype);
  const oracle::Forward softmax = oracle::forward(in, queries);
  const StridedTensor lse = make_output(real, {shape.s_q, shape.h_q}, shape.layout);
  winnow::testing::fill(lse.view, 0);
  for (std::size_t n = 0; n < queries.size(); ++n) {
    for (std::int64_t h = 0; h < shape.h_q; ++h) {
      winnow::testing::fill(lse.view.slice(0, queries[n], queries[n] + 1).slice(1, h, h + 1),
                            softmax.lse[n * shape.h_q + h]);
    }
  }
  const Device device = testing::device_of(target);
  const CaseInputs there = inputs.on(device);
  const StridedTensor lse_there = testing::on(device, lse);
  const StridedTensor attn_sum_there =
      testing::on(device, make_output(real, {shape.s_q, shape.topk}, shape.layout));
  DistributionArgs args{.lse = lse_there.view, .attn_sum = attn_sum_there.view};
  there.pass_to(args);
  StridedTensor extra_attn_sum_there;
  if (shape.extra) {
    extra_attn_sum_there =
        testing::on(device, make_output(real, {shape.s_q, shape.extra->topk}, shape.layout));
    args.extra_attn_sum = extra_attn_sum_there.view;
  }

  testing::CaseOutcome outcome;
  outcome.backend = distribution(args, target.options);
  const StridedTensor attn_sum = testing::on({}, attn_sum_there),
                      extra_attn_sum = testing::on({}, extra_attn_sum_there);

  const oracle::Distribution expected = oracle::distribution(in, lse.view, queries);
  const double largest = expected.largest_logit;
  testing::compare_output(outcome, "attn_sum", attn_sum, expected.attn_sum,
                          tolerance(Quantity::attn_sum, shape, largest), queries);

  if (shape.extra) {
    testing::compare_output(outcome, "extra_attn_sum", extra_attn_sum, expected.extra_attn_sum,
                            tolerance(Quantity::attn_sum, shape, largest), queries);
  }

  // Each row sums to the number of heads, or to 0 where nothing is visible.
  std::vector<double> sums, wanted;
  for (const std::int64_t i : queries) {
    double sum = 0;
    for (std::int64_t j = 0; j < shape.topk; ++j) sum += oracle::element(attn_sum.view, i, j);
    for (std::int64_t j = 0; j < in.extra.topk(); ++j) {
      sum += oracle::element(extra_attn_sum.view, i, j);
    }
    sums.push_back(sum);
    wanted.push_back(oracle::visible_entries(in, i).empty() ? 0.0 : double(shape.h_q));
  }
  const std::int64_t rows[] = {static_cast<std::int64_t>(sums.size())};
  outcome.comparisons.push_back(testing::compare("row sums", sums, wanted, rows,
                                                 tolerance(Quantity::row_sums, shape, largest)));
  return outcome;
}

}  // namespace

testing::Operation distribution_operation() {
  // The sink has no part in the distribution.
  std::vector<CaseShape> shapes = with_extra_shapes(with_dense_shapes(case_shapes()));
  std::erase_if(shapes, [](const CaseShape& shape) {
    return shape.sink != Sink::absent && shape.choice == Choice::distinct;
  });
  return {"sparse_mla::distribution",
          "attention distribution summed over heads, the teacher of the indexer",
          testing::cases_of(shapes, run, on_gpu, testing::cuda_for_f16<CaseShape>),
          distribution_benchmarks(), testing::repeated(kDistribution, distribution)};
}

}  // namespace winnow::sparse_mla
