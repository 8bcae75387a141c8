// The entry of indexer::scores in the list of operations: its cases against the oracle.
#include <cmath>
#include <cstring>

#include "winnow/indexer/cases.h"
#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/scores/scores_contract.h"
#include "winnow/testing/repeated.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> scores_benchmarks();
testing::Operation scores_operation();

namespace {

// Compares the scores of one query; NaN and infinities must be in the same columns. Appends the
// error that each score may have to `allowed`.
void compare_row(const CaseShape& shape, const std::vector<oracle::Score>& expected,
                 const ConstTensorView& actual, testing::Comparison& comparison,
                 std::vector<double>& allowed) {
  for (std::size_t n = 0; n < expected.size(); ++n) {
    allowed.push_back(score_tolerance(shape.dtype) * expected[n].magnitude);
    const double want = expected[n].value;
    const double got = actual.at<float>(0, static_cast<std::int64_t>(n));
    bool right = std::isnan(want) ? std::isnan(got) : want == got;
    if (std::isfinite(want)) {
      const double error = std::abs(got - want) / std::max(expected[n].magnitude, 1e-30);
      const bool exact = zeros_are_exact(shape) && want == 0;
      right = want == got || (error <= score_tolerance(shape.dtype) && !exact);
      if (!(error <= comparison.error) && want != got) comparison.error = error;
    }
    if (right) continue;
    comparison.passed = false;
    comparison.detail = "column " + std::to_string(n) + ": want " + std::to_string(want) +
                        ", got " + std::to_string(got);
  }
}

// The first rows of the queries: those of the case, or some in front of the keys, among them and
// behind them.
StridedTensor first_rows(const CaseShape& shape, const CaseInputs& inputs) {
  const ConstTensorView given = inputs.key_start.view;
  StridedTensor rows = make_tensor(DType::i32, {shape.s_q}, Layout::dense);
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    const std::int64_t places[] = {-20, 0, shape.s_k / 3 + i, shape.s_k - 30, shape.s_k + 5};
    rows.view.at<std::int32_t>(i) =
        given.present() ? given.at<std::int32_t>(i) : static_cast<std::int32_t>(places[i % 5]);
  }
  return rows;
}

// Scores from each query's first row on, which are the dense ones, bit for bit.
testing::Comparison from_start(const CaseShape& shape, const CaseInputs& inputs, ScoresArgs args,
                               const StridedTensor& dense, const testing::Target& target) {
  const StridedTensor starts = first_rows(shape, inputs);
  const Device device = testing::device_of(target);
  const StridedTensor starts_there = testing::on(device, starts);
  // Rows at multiples of 16 bytes, and others.
  const std::int64_t width = (shape.s_k / 2 + 7) / 4 * 4 + (shape.s_q % 4 == 1 ? 0 : 1);
  const StridedTensor scores_there =
      testing::on(device, make_output(DType::f32, {shape.s_q, width}, shape.layout));
  args.key_start = starts_there.view;
  args.width = width;
  args.scores = scores_there.view;
  scores(args, target.options);
  const StridedTensor got = testing::on({}, scores_there);
  testing::Comparison same = testing::check_written("scores from each first row on", got);
  oracle::Inputs in = inputs.for_oracle();
  in.key_start = starts.view;
  for (const std::int64_t i : checked_queries(shape)) {
    for (std::int64_t c = 0; c < width; ++c) {
      const std::int64_t t = std::int64_t{starts.view.at<std::int32_t>(i)} + c;
      const float want = oracle::visible(in, i, t) ? dense.view.at<float>(i, t) : -HUGE_VALF;
      const float found = got.view.at<float>(i, c);
      if (std::memcmp(&want, &found, sizeof want) == 0) continue;
      same.passed = false;
      same.detail = testing::numbered("query ", i) + testing::numbered(", column ", c) + ": want " +
                    std::to_string(want) + ", got " + std::to_string(found);
    }
  }
  return same;
}

testing::CaseOutcome run(const CaseShape& shape, const testing::Target& target) {
  const CaseInputs inputs = make_inputs(shape);
  const oracle::Inputs in = inputs.for_oracle();
  const Device device = testing::device_of(target);
  const CaseInputs there = inputs.on(device);
  testing::CaseOutcome outcome;

  const StridedTensor dense_there =
      testing::on(device, make_output(DType::f32, {shape.s_q, shape.s_k}, shape.layout));
  ScoresArgs args{.scores = dense_there.view};
  there.pass_to(args);
  outcome.backend = scores(args, target.options);
  const StridedTensor dense = testing::on({}, dense_there);
  outcome.comparisons.push_back(testing::check_written("dense scores", dense));
  testing::Comparison dense_scores{"dense scores", 0, score_tolerance(shape.dtype), true, ""};
  const std::vector<std::int64_t> queries = checked_queries(shape);
  std::vector<std::int64_t> rows;
  std::vector<double> allowed, allowed_at;
  for (std::int64_t t = 0; t < shape.s_k; t += shape.s_k > 10000 ? 97 : 1) rows.push_back(t);
  for (const std::int64_t i : queries) {
    const std::vector<oracle::Score> expected = oracle::scores(in, i, rows);
    Tensor row(DType::f32, {1, static_cast<std::int64_t>(rows.size())});
    for (std::size_t n = 0; n < rows.size(); ++n) {
      row.values<float>()[n] = dense.view.at<float>(i, rows[n]);
    }
    compare_row(shape, expected, row.view(), dense_scores, allowed);
  }
  outcome.comparisons.push_back(dense_scores);
  // Samples are of whole outputs alone.
  if (static_cast<std::int64_t>(allowed.size()) == dense.view.numel()) {
    outcome.samples.push_back(testing::sample("dense scores", dense.view, allowed));
  }

  // Without what the queries do not see: the same bits of what they see.
  const StridedTensor seen_there =
      testing::on(device, make_output(DType::f32, {shape.s_q, shape.s_k}, shape.layout));
  args.scores = seen_there.view;
  args.clean = false;
  scores(args, target.options);
  const StridedTensor seen = testing::on({}, seen_there);
  testing::Comparison same{"dense scores of what is seen", 0, 0, true, ""};
  for (const std::int64_t i : queries) {
    for (const std::int64_t t : rows) {
      const float &want = dense.view.at<float>(i, t), &got = seen.view.at<float>(i, t);
      const bool left = !oracle::visible(in, i, t) &&
                        testing::count_unwritten(ConstTensorView(&got, DType::f32, {1})) == 1;
      if (left || std::memcmp(&want, &got, sizeof want) == 0) continue;
      same.passed = false;
      same.detail = testing::numbered("query ", i) + testing::numbered(", column ", t) + ": want " +
                    std::to_string(want) + ", got " + std::to_string(got);
    }
  }
  outcome.comparisons.push_back(same);
  args.clean = true;
  outcome.comparisons.push_back(from_start(shape, inputs, args, dense, target));

  // Rows by index: random ones, some outside and some that are not visible.
  const std::int64_t topk = shape.topk;
  winnow::testing::Random random(winnow::testing::seed_from(shape.name) + 1);
  const StridedTensor indices = make_tensor(DType::i32, {shape.s_q, topk}, Layout::dense);
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    for (std::int64_t j = 0; j < topk; ++j) {
      indices.view.at<std::int32_t>(i, j) =
          static_cast<std::int32_t>(random.below(shape.s_k + 4) - 2);
    }
  }
  const StridedTensor indices_there = testing::on(device, indices);
  const StridedTensor at_there =
      testing::on(device, make_output(DType::f32, {shape.s_q, topk}, shape.layout));
  args.indices = indices_there.view;
  args.scores = at_there.view;
  scores(args, target.options);
  const StridedTensor at = testing::on({}, at_there);
  outcome.comparisons.push_back(testing::check_written("scores at indices", at));
  testing::Comparison scores_at{"scores at indices", 0, score_tolerance(shape.dtype), true, ""};
  for (const std::int64_t i : queries) {
    std::vector<std::int64_t> chosen;
    for (std::int64_t j = 0; j < std::min<std::int64_t>(topk, 500); ++j) {
      chosen.push_back(indices.view.at<std::int32_t>(i, j));
    }
    compare_row(shape, oracle::scores(in, i, chosen), at.view.slice(0, i, i + 1), scores_at,
                allowed_at);
  }
  outcome.comparisons.push_back(scores_at);
  if (static_cast<std::int64_t>(allowed_at.size()) == at.view.numel()) {
    outcome.samples.push_back(testing::sample("scores at indices", at.view, allowed_at));
  }
  return outcome;
}

}  // namespace

testing::Operation scores_operation() {
  std::vector<CaseShape> shapes = case_shapes();
  // Ties change which rows topk() chooses, not the scores.
  std::erase_if(shapes, [](const CaseShape& shape) { return shape.ties == Ties::larger; });
  return {"indexer::scores", "the lightning indexer's scores, dense or at chosen rows",
          testing::cases_of(shapes, run, on_gpu, testing::cuda_for_f16<CaseShape>),
          scores_benchmarks(), testing::repeated(kScores, scores)};
}

}  // namespace winnow::indexer
