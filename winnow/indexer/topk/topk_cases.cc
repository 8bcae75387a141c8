// The entry of indexer::topk in the list of operations. The choice is compared with a sort of the
// operation's own dense scores, exactly; those are compared with the oracle, and the worst chosen
// one with the oracle's.
#include <cmath>
#include <cstring>

#include "winnow/indexer/cases.h"
#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/topk/topk.h"
#include "winnow/indexer/topk/topk_contract.h"
#include "winnow/indexer/topk/topk_oracle.h"
#include "winnow/testing/repeated.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> topk_benchmarks();
testing::Operation topk_operation();

namespace {

void fail(testing::Comparison& comparison, std::int64_t query, const std::string& detail) {
  comparison.error += 1;
  comparison.passed = false;
  if (comparison.detail.empty()) {
    comparison.detail = "query " + std::to_string(query) + ": " + detail;
  }
}

testing::CaseOutcome run(const CaseShape& shape, const testing::Target& target) {
  const CaseInputs inputs = make_inputs(shape);
  const oracle::Inputs in = inputs.for_oracle();
  const Device device = testing::device_of(target);
  const CaseInputs there = inputs.on(device);
  const auto output = [&](DType dtype, std::vector<std::int64_t> dims) {
    return testing::on(device, make_output(dtype, dims, shape.layout));
  };
  const StridedTensor indices_there = output(DType::i32, {shape.s_q, shape.topk});
  const StridedTensor length_there =
      testing::on(device, make_output(DType::i32, {shape.s_q}, Layout::dense));
  const StridedTensor chosen_there = output(DType::f32, {shape.s_q, shape.topk});
  const StridedTensor dense_there = output(DType::f32, {shape.s_q, shape.s_k});
  TopkArgs args{.ties = shape.ties,
                .indices = indices_there.view,
                .length = length_there.view,
                .scores = chosen_there.view};
  there.pass_to(args);
  testing::CaseOutcome outcome;
  outcome.backend = topk(args, target.options);
  ScoresArgs dense_args{.scores = dense_there.view};
  there.pass_to(dense_args);
  scores(dense_args, target.options);

  const StridedTensor indices = testing::on({}, indices_there),
                      length = testing::on({}, length_there);
  const StridedTensor chosen = testing::on({}, chosen_there), dense = testing::on({}, dense_there);
  outcome.comparisons.push_back(testing::check_written("scores of the chosen rows", chosen));
  testing::Comparison choice{"choice", 0, 0, true, ""}, lengths{"length", 0, 0, true, ""};
  testing::Comparison bits{"scores as dense ones", 0, 0, true, ""};
  testing::Comparison zeros{"scores that are 0", 0, 0, true, ""};
  testing::Comparison worst{"worst chosen score", 0, score_tolerance(shape.dtype), true, ""};
  // The chosen scores of each query from the best to the worst: where two rows are as good as
  // equal, another machine may choose the other.
  std::vector<float> ranked;
  std::vector<double> allowed;
  const auto rank = [&](std::int64_t query, double error) {
    std::vector<double> scores = testing::read(chosen.view.slice(0, query, query + 1));
    std::sort(scores.begin(), scores.end(),
              [](double a, double b) { return std::isnan(a) ? false : std::isnan(b) || a > b; });
    ranked.insert(ranked.end(), scores.begin(), scores.end());
    allowed.resize(ranked.size(), error);
  };
  for (const std::int64_t i : checked_queries(shape)) {
    std::vector<oracle::Scored> rows;
    for (std::int64_t t = 0; t < shape.s_k; ++t) {
      if (oracle::visible(in, i, t)) rows.push_back({t, dense.view.at<float>(i, t)});
    }
    const std::vector<std::int64_t> expected =
        oracle::choose(rows, shape.topk, shape.ties == Ties::larger);
    const auto count = static_cast<std::int64_t>(expected.size());
    if (length.view.at<std::int32_t>(i) != count) {
      fail(lengths, i,
           "want " + std::to_string(count) + ", got " +
               std::to_string(length.view.at<std::int32_t>(i)));
    }
    for (std::int64_t j = 0; j < shape.topk; ++j) {
      const std::int64_t want = j < count ? expected[j] : -1;
      const std::int64_t got = indices.view.at<std::int32_t>(i, j);
      if (got != want) {
        fail(choice, i,
             "place " + std::to_string(j) + ": want " + std::to_string(want) + ", got " +
                 std::to_string(got));
        break;
      }
      const float score = chosen.view.at<float>(i, j);
      const float other =
          want < 0 ? -std::numeric_limits<float>::infinity() : dense.view.at<float>(i, want);
      if (std::memcmp(&score, &other, sizeof score) != 0) {
        fail(bits, i,
             "place " + std::to_string(j) + ": want " + std::to_string(other) + ", got " +
                 std::to_string(score));
      }
    }
    // Every chosen score is at least the oracle's k-th, less the tolerance. Of large cases the
    // scores themselves are compared in indexer::scores.
    if (count == 0) rank(i, 0);
    if (shape.s_k > 6000 || shape.order == Order::infinite || count == 0) continue;
    std::vector<std::int64_t> all;
    for (const oracle::Scored& row : rows) all.push_back(row.row);
    const std::vector<oracle::Score> exact = oracle::scores(in, i, all);
    std::vector<double> sorted;
    double magnitude = 1e-30;
    for (std::size_t n = 0; n < exact.size() && zeros_are_exact(shape); ++n) {
      if (exact[n].value == 0 && rows[n].score != 0) {
        fail(zeros, i,
             "row " + std::to_string(rows[n].row) + ": got " + std::to_string(rows[n].score));
      }
    }
    for (const oracle::Score& score : exact) {
      if (std::isnan(score.value)) continue;
      sorted.push_back(score.value);
      magnitude = std::max(magnitude, score.magnitude);
    }
    rank(i, worst.tolerance * magnitude);
    if (static_cast<std::int64_t>(sorted.size()) < count) continue;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const std::vector<oracle::Score> got = oracle::scores(in, i, expected);
    for (const oracle::Score& score : got) {
      const double error = std::max(0.0, sorted[count - 1] - score.value) / magnitude;
      worst.error = std::max(worst.error, error);
      if (!(error <= worst.tolerance)) worst.passed = false;
    }
  }
  for (const testing::Comparison& comparison : {choice, lengths, bits, zeros, worst}) {
    outcome.comparisons.push_back(comparison);
  }
  if (static_cast<std::int64_t>(ranked.size()) == shape.s_q * shape.topk) {
    const ConstTensorView view(ranked.data(), DType::f32, {shape.s_q, shape.topk});
    outcome.samples.push_back(testing::sample("scores of the chosen rows", view, allowed));
    outcome.samples.push_back(testing::sample(
        "length", length.view, std::vector<double>(static_cast<std::size_t>(shape.s_q))));
  }
  return outcome;
}

// The shapes of all operations. sm90 stores scores of up to 32,768 rows (in bf16 with many queries
// 16,384) and chooses with blocks for up to 4,096, 8,192, 16,384 and 32,768; of more rows a warp
// chooses for a query alone (64 heads) or for four (16), where orders of scores make it cut.
std::vector<CaseShape> choice_shapes() {
  std::vector<CaseShape> list = case_shapes();
  const auto add = [&](const CaseShape& shape) {
    winnow::testing::add(list, {DType::bf16, DType::f8_e4m3}, shape);
  };
  for (const std::int64_t s_k : {4096, 4097, 8192, 8193, 16384, 16385, 32767, 32768, 32769}) {
    add({.name = winnow::testing::numbered("sk", s_k) + "-k1000",
         .s_q = 3,
         .h = 16,
         .s_k = s_k,
         .d = 64,
         .topk = 1000});
  }
  add({.name = "sq1-sk8191-k2048", .s_q = 1, .h = 64, .s_k = 8191, .topk = 2048});
  add({.name = "sq1-sk40000-k2048", .s_q = 1, .h = 16, .s_k = 40000, .d = 64, .topk = 2048});
  // Of one query a cluster of blocks chooses. The choices of ranges of rows, of which some have
  // more candidates than a buffer holds, are merged by four blocks for each of two queries.
  for (const std::int64_t s_q : {1, 2}) {
    add({.name = winnow::testing::numbered("sq", s_q) + "-sk33000-k1100",
         .s_q = s_q,
         .h = 16,
         .s_k = 33000,
         .d = 64,
         .topk = 1100,
         .q_start = 8 * 2700 - 1});
  }
  // More candidates than a buffer holds, in few tiles.
  add({.name = "h64-sk33000-equal-from3000",
       .h = 64,
       .s_k = 33000,
       .d = 64,
       .order = Order::equal,
       .q_start = 3000});
  add({.name = "sq140-sk16500", .s_q = 140, .h = 1, .s_k = 16500, .d = 64, .topk = 600});
  add({.name = "sk9001-ragged",
       .s_q = 9,
       .h = 32,
       .s_k = 9001,
       .d = 64,
       .topk = 2000,
       .ranges = Ranges::ragged});
  const auto add_order = [&](std::int64_t h, std::int64_t s_k, const std::string& name, Order order,
                             std::int64_t topk, Ties ties) {
    add({.name =
             winnow::testing::numbered("h", h) + winnow::testing::numbered("-sk", s_k) + "-" + name,
         .h = h,
         .s_k = s_k,
         .d = 64,
         .topk = topk,
         .order = order,
         .ties = ties});
  };
  add_order(16, 12000, "duplicates-larger", Order::duplicates, 512, Ties::larger);
  add_order(16, 12000, "nan", Order::nan, 9000, Ties::smaller);
  add_order(16, 20000, "duplicates", Order::duplicates, 512, Ties::smaller);
  add_order(16, 33000, "zero", Order::zero, 64, Ties::smaller);
  add_order(16, 33000, "duplicates-larger", Order::duplicates, 512, Ties::larger);
  add_order(64, 33000, "random", Order::random, 1024, Ties::smaller);
  add_order(64, 33000, "ascending", Order::ascending, 64, Ties::smaller);
  add_order(64, 33000, "descending", Order::descending, 64, Ties::larger);
  add_order(64, 33000, "equal", Order::equal, 64, Ties::smaller);
  add_order(64, 33000, "zero-larger", Order::zero, 64, Ties::larger);
  add_order(64, 33000, "one-huge", Order::one_huge, 64, Ties::smaller);
  add_order(64, 33000, "duplicates", Order::duplicates, 512, Ties::smaller);
  add_order(64, 33000, "duplicates-larger", Order::duplicates, 512, Ties::larger);
  add_order(64, 33000, "nan", Order::nan, 64, Ties::smaller);
  return list;
}

}  // namespace

testing::Operation topk_operation() {
  const std::vector<CaseShape> shapes = choice_shapes();
  return {"indexer::topk", "the lightning indexer's choice of rows, in bounded memory",
          testing::cases_of(shapes, run, on_gpu, testing::cuda_for_f16<CaseShape>),
          topk_benchmarks(), testing::repeated(kTopk, topk)};
}

}  // namespace winnow::indexer
