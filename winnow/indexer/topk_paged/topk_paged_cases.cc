// The case table of indexer::topk_paged. A call that chooses every row gives the scores, which are
// compared with the oracle's; the choice must be a sort of them, exactly.
#include "winnow/indexer/topk_paged/topk_paged_cases.h"

#include <cmath>
#include <cstring>

#include "winnow/indexer/topk/topk_oracle.h"
#include "winnow/indexer/topk_paged/topk_paged_contract.h"
#include "winnow/testing/repeated.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> topk_paged_benchmarks();
testing::Operation topk_paged_operation();

std::vector<PagedCase> paged_cases() {
  using testing::numbered;
  const std::vector<std::int32_t> ragged = {300, 1, 511, 64, 65};
  std::vector<PagedCase> list;
  for (const std::int64_t d : {64, 128}) {
    list.push_back({.name = numbered("d", d), .context_lens = ragged, .d = d});
  }
  for (const std::int64_t h : {1, 3, 32, 64, 128}) {
    list.push_back({.name = numbered("h", h), .context_lens = {200, 500}, .h = h});
  }
  for (const std::int64_t topk : {1, 63, 200, 512, 2048}) {
    list.push_back({.name = numbered("k", topk), .context_lens = ragged, .topk = topk});
  }
  for (const std::int64_t s_q : {2, 5, 9}) {
    list.push_back({.name = numbered("sq", s_q), .context_lens = ragged, .s_q = s_q, .topk = 40});
  }
  list.push_back({.name = "no-sequence"});
  list.push_back({.name = "no-query", .context_lens = ragged, .s_q = 0});
  list.push_back({.name = "no-page", .context_lens = ragged, .num_pages = 0, .absent = false});
  list.push_back({.name = "no-table", .context_lens = ragged, .table = 0});
  list.push_back({.name = "lengths-out-of-range",
                  .context_lens = {-1, 0, 513, INT32_MAX, INT32_MIN, 3},
                  .s_q = 4});
  list.push_back(
      {.name = "long", .context_lens = {7500}, .topk = 512, .table = 118, .num_pages = 150});
  for (const std::int64_t s_q : {1, 2}) {
    list.push_back({.name = numbered("long-h64-sq", s_q),
                    .context_lens = {7500, 900},
                    .s_q = s_q,
                    .h = 64,
                    .topk = 300,
                    .table = 118,
                    .num_pages = 150});
  }
  list.push_back({.name = "h64-sq4", .context_lens = {500, 66}, .s_q = 4, .h = 64, .topk = 300});
  list.push_back({.name = "h128-sq3", .context_lens = {300, 130}, .s_q = 3, .h = 128});
  list.push_back({.name = "batches",  // of keys that two blocks of the choice hold at a time
                  .context_lens = {33000},
                  .h = 1,
                  .topk = 1000,
                  .table = 516,
                  .num_pages = 520});
  list.push_back({.name = "shared", .context_lens = ragged, .num_pages = 5});
  list.push_back({.name = "absent", .context_lens = ragged, .s_q = 2, .absent = true});
  list.push_back(
      {.name = "absent-positions", .context_lens = ragged, .positions = true, .absent = true});
  list.push_back({.name = "positions", .context_lens = ragged, .s_q = 2, .positions = true});
  list.push_back({.name = "bf16-weights", .context_lens = ragged, .weights_dtype = DType::bf16});
  for (const Ties ties : {Ties::smaller, Ties::larger}) {
    const std::string name = ties == Ties::smaller ? "smaller" : "larger";
    list.push_back({.name = "equal-" + name, .context_lens = ragged, .ties = ties, .equal = true});
    list.push_back(
        {.name = "nan-" + name, .context_lens = ragged, .topk = 300, .ties = ties, .nan = true});
  }
  for (const std::int64_t h : {16, 64, 128}) {  // three queries: as many columns as there may be
    for (const Ties ties : {Ties::smaller, Ties::larger}) {
      list.push_back(
          {.name = numbered("h", h) + "-plateau" + (ties == Ties::larger ? "-larger" : ""),
           .context_lens = ragged,
           .s_q = h == 16 ? 1 : 3,
           .h = h,
           .topk = 200,
           .ties = ties,
           .plateau = true});
    }
  }
  // A length for each query: growing and falling, empty, equal, out of range; in one group of
  // queries, in several, and over many tiles.
  list.push_back({.name = "lengths-of-queries",
                  .context_lens = {70, 70, 71, 500, 3, 200, 0, 0, 0, 64, 0, 65},
                  .s_q = 3,
                  .topk = 100,
                  .of_queries = true});
  list.push_back({.name = "lengths-of-queries-h64",
                  .context_lens = {130, 129, 128, 127, 1, 2, 400, 5, 512, 0, 512, 0},
                  .s_q = 4,
                  .h = 64,
                  .topk = 200,
                  .of_queries = true});
  list.push_back({.name = "lengths-of-queries-groups",
                  .context_lens = {300, 10, 20, 30, 511, 5, 9, 8, 7, 6, 0, 0, 0, 0, 1},
                  .s_q = 5,
                  .h = 128,
                  .ties = Ties::larger,
                  .layout = Layout::wide,
                  .of_queries = true});
  list.push_back({.name = "lengths-of-queries-out-of-range",
                  .context_lens = {-1, INT32_MAX, INT32_MIN, 513, 512, 0},
                  .s_q = 2,
                  .topk = 600,
                  .absent = true,
                  .of_queries = true});
  list.push_back({.name = "lengths-of-queries-long",  // of which clusters choose
                  .context_lens = {33000, 129, 32800, 32769},
                  .s_q = 2,
                  .h = 1,
                  .topk = 500,
                  .table = 516,
                  .num_pages = 530,
                  .positions = true,
                  .of_queries = true});
  list.push_back({.name = "wide", .context_lens = ragged, .s_q = 2, .layout = Layout::wide});
  list.push_back(
      {.name = "reversed", .context_lens = ragged, .s_q = 2, .layout = Layout::reversed});
  list.push_back({.name = "broadcast", .context_lens = ragged, .layout = Layout::broadcast});
  return list;
}

namespace {

struct Outputs {
  StridedTensor indices, length, scores;
  Outputs(const PagedStep& step, std::int64_t topk, Device device) {
    const auto make = [&](DType dtype, std::vector<std::int64_t> dims) {
      return testing::on(device, testing::make_output(dtype, dims, step.shape.layout));
    };
    indices = make(DType::i32, {step.b(), step.shape.s_q, topk});
    length = make(DType::i32, {step.b(), step.shape.s_q});
    scores = make(DType::f32, {step.b(), step.shape.s_q, topk});
  }
  void fetch() {
    for (StridedTensor* tensor : {&indices, &length, &scores}) *tensor = testing::on({}, *tensor);
  }
};

Backend call(TopkPagedArgs args, Outputs& outputs, const RunOptions& options, Device device) {
  args.indices = outputs.indices.view;
  args.length = outputs.length.view;
  args.scores = outputs.scores.view;
  Tensor workspace;
  workspace = Tensor(DType::u8, {topk_paged_workspace_bytes(args, options)}, device);
  args.workspace = workspace;
  const Backend backend = topk_paged(args, options);
  outputs.fetch();
  return backend;
}

void fail(testing::Comparison& comparison, std::int64_t i, std::int64_t j,
          const std::string& detail) {
  comparison.error += 1;
  comparison.passed = false;
  if (!comparison.detail.empty()) return;
  comparison.detail =
      "sequence " + std::to_string(i) + ", query " + std::to_string(j) + ": " + detail;
}

testing::CaseOutcome run(const PagedCase& shape, const testing::Target& target) {
  const Device device = testing::device_of(target);
  const PagedStep step(shape), there = step.on(device);
  testing::CaseOutcome outcome;
  Outputs chosen(step, shape.topk, device);
  outcome.backend = call(there.args(), chosen, target.options, device);
  TopkPagedArgs all_args = there.args();
  all_args.positions = true;
  const std::int64_t room = std::max<std::int64_t>(shape.table * 64, 1);
  Outputs all(step, room, device);
  call(all_args, all, target.options, device);

  testing::Comparison choice{"choice", 0, 0, true, ""}, lengths{"length", 0, 0, true, ""};
  testing::Comparison bits{"scores of the choice", 0, 0, true, ""};
  testing::Comparison exact{"scores", 0, score_tolerance(DType::f8_e4m3), true, ""};
  std::vector<double> allowed(static_cast<std::size_t>(all.scores.view.numel()));
  for (std::int64_t i = 0; i < step.b(); ++i) {
    for (std::int64_t j = 0; j < shape.s_q; ++j) {
      const auto [rows, want] = step.wanted(i, j);
      const auto seen = static_cast<std::int64_t>(rows.size());
      std::vector<oracle::Scored> scored;
      for (std::int64_t n = 0; n < seen; ++n) {
        if (all.indices.view.at<std::int32_t>(i, j, n) != rows[n]) {
          fail(choice, i, j, "not every row is chosen where all should be");
        }
        const double got = all.scores.view.at<float>(i, j, n);
        scored.push_back({rows[n], got});
        const double error = std::abs(got - want[n].value) / std::max(want[n].magnitude, 1e-30);
        if (std::isnan(want[n].value) != std::isnan(got) || error > exact.tolerance ||
            (shape.plateau && want[n].value == 0 && got != 0)) {
          fail(exact, i, j, "row " + std::to_string(rows[n]));
        }
        if (!std::isnan(error)) exact.error = std::max(exact.error, error);
        allowed[(i * shape.s_q + j) * room + n] = exact.tolerance * want[n].magnitude;
      }
      const std::vector<std::int64_t> expected =
          oracle::choose(scored, shape.topk, shape.ties == Ties::larger);
      const auto count = static_cast<std::int64_t>(expected.size());
      if (chosen.length.view.at<std::int32_t>(i, j) != count ||
          all.length.view.at<std::int32_t>(i, j) != seen) {
        fail(lengths, i, j, "want " + std::to_string(count) + " and " + std::to_string(seen));
      }
      std::size_t at = 0;  // of the row in `scored`
      for (std::int64_t n = 0; n < shape.topk; ++n) {
        std::int64_t index = -1;
        float score = -std::numeric_limits<float>::infinity();
        if (n < count) {
          while (scored[at].row != expected[n]) ++at;
          score = static_cast<float>(scored[at].score);
          index = shape.positions ? expected[n] : step.page(i, expected[n]) * 64 + expected[n] % 64;
        }
        if (chosen.indices.view.at<std::int32_t>(i, j, n) != index) {
          fail(choice, i, j,
               "place " + std::to_string(n) + ": want " + std::to_string(index) + ", got " +
                   std::to_string(chosen.indices.view.at<std::int32_t>(i, j, n)));
        }
        const float got = chosen.scores.view.at<float>(i, j, n);
        if (std::memcmp(&got, &score, sizeof got) != 0) {
          fail(bits, i, j, "place " + std::to_string(n));
        }
      }
    }
  }
  outcome.comparisons = {choice, lengths, bits, exact,
                         testing::check_written("chosen scores", chosen.scores)};
  outcome.samples = {
      testing::sample("scores", all.scores.view, allowed),
      testing::sample("length", chosen.length.view, std::vector<double>(step.b() * shape.s_q))};
  return outcome;
}

}  // namespace

testing::Operation topk_paged_operation() {
  const auto on_gpu = [](const PagedCase&) { return true; };
  return {"indexer::topk_paged", "the lightning indexer's choice of rows from a paged cache",
          testing::cases_of<PagedCase>(paged_cases(), run, on_gpu), topk_paged_benchmarks(),
          testing::repeated(kTopkPaged, topk_paged)};
}

}  // namespace winnow::indexer
