// The entry of indexer::scores_paged in the list of operations: the steps of topk_paged, whose
// scores are compared with the oracle's.
#include <cmath>
#include <cstring>

#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/scores_paged/scores_paged.h"
#include "winnow/indexer/scores_paged/scores_paged_contract.h"
#include "winnow/indexer/topk_paged/topk_paged_cases.h"
#include "winnow/testing/repeated.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> scores_paged_benchmarks();
testing::Operation scores_paged_operation();

namespace {

struct DenseCase {
  PagedCase step;
  std::string name;
  std::int64_t max_context;
  bool clean = true;
};
std::string describe(const DenseCase& shape) {
  return describe(shape.step) + testing::numbered(", max_context ", shape.max_context) +
         (shape.clean ? "" : ", not clean");
}

std::vector<DenseCase> make_cases() {
  std::vector<DenseCase> list;
  for (const PagedCase& step : paged_cases()) {
    // Other cases differ in what is chosen.
    if (step.ties == Ties::larger || step.positions || step.name.starts_with('k')) continue;
    list.push_back({step, step.name, step.table * 64});
  }
  const PagedCase lengths{
      .name = "lengths", .context_lens = {300, 1, 511, 64, 65}, .s_q = 3, .h = 64, .absent = true};
  for (const std::int64_t columns : {0, 1, 63, 130, 301, 512, 513, 9000, 20000}) {
    list.push_back({lengths, testing::numbered("columns", columns), columns});
  }
  PagedCase of_queries = lengths;
  of_queries.context_lens = {70, 70, 71, 500, 3, 200, 0, 0, 0, 64, 0, 65};
  of_queries.of_queries = true;
  for (const std::int64_t columns : {66, 512, 700}) {
    list.push_back({lengths, testing::numbered("left", columns), columns, false});
    list.push_back({of_queries, testing::numbered("left-of-queries", columns), columns, false});
  }
  PagedCase no_page = lengths;
  no_page.num_pages = 0;
  list.push_back({no_page, "left-no-page", 400, false});
  PagedCase strided = lengths;
  strided.layout = Layout::wide;
  list.push_back({strided, "columns700-wide", 700});
  strided.layout = Layout::reversed;
  list.push_back({strided, "left700-reversed", 700, false});
  PagedCase many = lengths;  // more groups than a launch has
  many.context_lens.clear();
  for (std::int32_t i = 0; i < 700; ++i) many.context_lens.push_back(i % 5);
  many.s_q = 1, many.h = 2, many.d = 64, many.table = 1, many.absent = false;
  list.push_back({many, "many-sequences", 67});
  return list;
}

// Whether query j of sequence i has the bits that scores() gives it for the same keys.
testing::Comparison compare_with_scores(const PagedStep& step, std::int64_t i, std::int64_t j,
                                        const StridedTensor& scores,
                                        const testing::Target& target) {
  const Device device = testing::device_of(target);
  const std::int64_t h = step.shape.h, d = step.shape.d;
  const PagedStep::Keys keys = step.keys(i, j);
  const StridedTensor q = testing::make_tensor(DType::f8_e4m3, {1, h, d}, Layout::dense);
  const StridedTensor weights =
      testing::make_tensor(step.shape.weights_dtype, {1, h}, Layout::dense);
  for (std::int64_t head = 0; head < h; ++head) {
    std::memcpy(&q.view.at<Float8E4M3>(0, head, 0), &step.q.view.at<Float8E4M3>(i, j, head, 0),
                static_cast<std::size_t>(d));
  }
  const std::size_t row = static_cast<std::size_t>(h * size_of(step.shape.weights_dtype));
  std::memcpy(weights.view.data(), step.weights.view.slice(0, i, i + 1).slice(1, j, j + 1).data(),
              row);
  const std::int64_t rows = keys.k.view.size(0);
  const StridedTensor dense_there =
      testing::on(device, testing::make_output(DType::f32, {1, rows}, Layout::dense));
  const StridedTensor q_there = testing::on(device, q), k_there = testing::on(device, keys.k);
  const StridedTensor weights_there = testing::on(device, weights),
                      scale_there = testing::on(device, keys.k_scale);
  indexer::scores({.q = q_there.view,
                   .k = k_there.view,
                   .weights = weights_there.view,
                   .k_scale = scale_there.view,
                   .scores = dense_there.view},
                  target.options);
  const StridedTensor dense = testing::on({}, dense_there);
  testing::Comparison same{"scores as those of indexer::scores", 0, 0, true, ""};
  for (const std::int64_t t : keys.rows) {
    if (t >= scores.view.size(2)) break;
    const float &want = dense.view.at<float>(0, t), &got = scores.view.at<float>(i, j, t);
    if (std::memcmp(&want, &got, sizeof want) == 0) continue;
    same.passed = false;
    same.detail = testing::numbered("sequence ", i) + testing::numbered(", query ", j) +
                  testing::numbered(", position ", t) + ": want " + std::to_string(want) +
                  ", got " + std::to_string(got);
  }
  return same;
}

testing::CaseOutcome run(const DenseCase& shape, const testing::Target& target) {
  const Device device = testing::device_of(target);
  const PagedStep step(shape.step), there = step.on(device);
  const std::int64_t columns = shape.max_context;
  const StridedTensor scores_there = testing::on(
      device,
      testing::make_output(DType::f32, {step.b(), shape.step.s_q, columns}, shape.step.layout));
  ScoresPagedArgs args{.clean = shape.clean, .scores = scores_there.view};
  there.pass_to(args);
  testing::CaseOutcome outcome;
  outcome.backend = scores_paged(args, target.options);
  const StridedTensor scores = testing::on({}, scores_there);

  testing::Comparison exact{"scores", 0, score_tolerance(DType::f8_e4m3), true, ""};
  testing::Comparison rest{"entries without a score", 0, 0, true, ""};
  std::vector<double> allowed;
  for (std::int64_t i = 0; i < step.b(); ++i) {
    for (std::int64_t j = 0; j < shape.step.s_q; ++j) {
      const auto fail = [&](testing::Comparison& comparison, std::int64_t t, float got) {
        comparison.passed = false;
        comparison.detail = testing::numbered("sequence ", i) + testing::numbered(", query ", j) +
                            testing::numbered(", position ", t) + ": got " + std::to_string(got);
      };
      const auto [rows, want] = step.wanted(i, j);
      std::size_t next = 0;  // of the rows
      for (std::int64_t t = 0; t < columns; ++t) {
        const float& got = scores.view.at<float>(i, j, t);
        allowed.push_back(0);
        if (next == rows.size() || rows[next] != t) {
          const bool written = shape.clean || t < step.visible(i, j);
          const bool right =
              written ? got == -std::numeric_limits<float>::infinity()
                      : testing::count_unwritten(ConstTensorView(&got, DType::f32, {1})) == 1;
          if (!right) fail(rest, t, got);
          continue;
        }
        const oracle::Score& score = want[next++];
        allowed.back() = exact.tolerance * score.magnitude;
        const double error = std::abs(double(got) - score.value) / std::max(score.magnitude, 1e-30);
        const bool nan = std::isnan(score.value);
        const bool zero = shape.step.plateau && score.value == 0;
        if (nan != std::isnan(got) || error > exact.tolerance || (zero && got != 0)) {
          fail(exact, t, got);
        }
        if (!std::isnan(error)) exact.error = std::max(exact.error, error);
      }
    }
  }
  outcome.comparisons = {exact, rest};
  // Of the first query that sees a row.
  for (std::int64_t n = 0; n < step.b() * shape.step.s_q; ++n) {
    const std::int64_t i = n / shape.step.s_q, j = n % shape.step.s_q;
    if (step.visible(i, j) == 0) continue;
    outcome.comparisons.push_back(compare_with_scores(step, i, j, scores, target));
    break;
  }
  if (!shape.clean) return outcome;
  outcome.comparisons.push_back(testing::check_written("scores", scores));
  outcome.samples = {testing::sample("scores", scores.view, allowed)};
  return outcome;
}

}  // namespace

testing::Operation scores_paged_operation() {
  const auto on_gpu = [](const DenseCase&) { return true; };
  return {"indexer::scores_paged", "the lightning indexer's scores over a paged cache",
          testing::cases_of<DenseCase>(make_cases(), run, on_gpu), scores_paged_benchmarks(),
          testing::repeated(kScoresPaged, scores_paged)};
}

}  // namespace winnow::indexer
