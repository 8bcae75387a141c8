// Steps 4, 7 and 8: an indexer, its training, and attention over what it then picks.
#include <cmath>
#include <numeric>

#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/indexer.h"
#include "tools/winnow/demo/state.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {

// Step 4: an indexer that has learned nothing picks the top-k.
void run_indexer_step(DemoState& state, StepReport& report) {
  Random random(13);
  state.indexer = Indexer(kRowDim, random);
  const auto rows = rows_of(state.layer->kv());
  state.chosen = choose_by_score(state.indexer->project(rows, state.all_queries), state.topk);
  state.stretch_untrained = selection_at(state.chosen, state.stretch_queries);
  const double share =
      captured_share(state.held_out, selection_at(state.chosen, state.held_out_queries));

  const std::int64_t weights = state.indexer->maps.size();
  report.size =
      format_text("%ld weights, top %ld of up to %ld", weights, state.topk, state.layer->tokens());
  report.done.push_back(format_text("a lightning indexer of %ld heads of %ld, with random weights",
                                    kIndexerHeads, kIndexerDim));
  report.done.push_back(format_text("captures %.3f of the full attention", share));
  report.require("every choice is an earlier token, none twice, none missing",
                 is_sound(state.chosen));
  report.numbers = {{"heads", kIndexerHeads},
                    {"dim", kIndexerDim},
                    {"weights", weights},
                    {"captured_share", share}};
}

// Step 7: the indexer learns from the attention distribution.
namespace {

constexpr double kLearningRate = 0.005;
constexpr double kLastRate = 0.1;  // of the learning rate, which falls linearly
constexpr std::int64_t kEvaluateEvery = 4;
// The first and last losses are means of this many steps: a batch is small and its loss jumps.
constexpr std::size_t kLossWindow = 5;

// What training must bring.
constexpr double kLossLeft = 0.8;   // of the first loss at most
constexpr double kGainShare = 0.3;  // of what separates the start, or chance, from the best choice

// KL(dense attention || softmax of the scores over all earlier tokens), mean of the queries.
double dense_loss(const DenseAttention& dense, const Matrix& scores) {
  double loss = 0;
  for (std::size_t row = 0; row < dense.positions.size(); ++row) {
    const std::int64_t i = static_cast<std::int64_t>(row);
    const std::int64_t earlier = dense.positions[row] + 1;
    const double largest = double(scores.row(i).head(earlier).maxCoeff());
    double sum = 0;
    for (std::int64_t token = 0; token < earlier; ++token) {
      sum += std::exp(double(scores(i, token)) - largest);
    }
    for (std::int64_t token = 0; token < earlier; ++token) {
      const double wanted = dense.share(i, token);
      if (wanted <= 0) continue;
      const double log_guess = double(scores(i, token)) - largest - std::log(sum);
      loss += wanted * (std::log(wanted) - log_guess) / double(dense.positions.size());
    }
  }
  return loss;
}

void evaluate(DemoState& state, std::int64_t steps_done) {
  const Projections projections =
      state.indexer->project(rows_of(state.layer->kv()), state.held_out_queries);
  state.curves.evaluated_at.push_back(static_cast<double>(steps_done));
  state.curves.held_out_loss.push_back(dense_loss(state.held_out, all_scores(projections)));
  state.curves.held_out_capture.push_back(
      captured_share(state.held_out, choose_by_score(projections, state.topk)));
}

// One step on a random batch. Returns its loss before the update.
double train_once(DemoState& state, Adam& adam, double learning_rate, Random& random) {
  Layer& layer = *state.layer;
  std::vector<std::int64_t> batch;
  for (std::int64_t i = 0; i < kBatch; ++i) {
    const std::int64_t count = std::ssize(state.training_queries);
    batch.push_back(state.training_queries[random.below(count)]);
  }
  const Projections projections = state.indexer->project(rows_of(layer.kv()), batch);
  // An indexer that saw only its own choice would never hear of the tokens it misses. DSA warms up
  // on dense attention; half of the entries being random is the cheap way to the same end.
  const Selection entries = with_exploration(choose_by_score(projections, state.topk), random);
  const LayerOutput output = layer.forward(entries);
  Tensor teacher = layer.distribution(entries, output.lse);
  for (float& weight : teacher.values<float>()) weight /= static_cast<float>(kHeads);
  const IndexerGradient gradient =
      state.indexer->gradient(rows_of(layer.kv()), projections, entries, teacher.values<float>());
  adam.update(*state.indexer, gradient, learning_rate);
  return gradient.loss;
}

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

}  // namespace

void run_training_step(DemoState& state, StepReport& report) {
  const std::int64_t steps = state.options.steps;
  TrainingCurves& curves = state.curves;
  Adam adam(*state.indexer);
  Random random(17);
  for (std::int64_t step = 0; step < steps; ++step) {
    if (step % kEvaluateEvery == 0) {
      evaluate(state, step);
      state.progress.show(format_text("training: step %ld of %ld, loss %.3f, captured share %.3f",
                                      step, steps, curves.held_out_loss.back(),
                                      curves.held_out_capture.back()));
    }
    const double done = static_cast<double>(step) / static_cast<double>(steps);
    curves.loss.push_back(
        train_once(state, adam, kLearningRate * (1 - (1 - kLastRate) * done), random));
  }
  evaluate(state, steps);
  state.progress.clear();

  const double first_loss = mean(std::span(curves.loss).first(kLossWindow));
  const double last_loss = mean(std::span(curves.loss).last(kLossWindow));
  const double first_share = curves.held_out_capture.front();
  const double last_share = curves.held_out_capture.back();
  const ReferenceShares& references = state.references;
  report.size = format_text("%ld steps of %ld queries x %ld tokens", steps, kBatch, 2 * state.topk);
  report.done.push_back("KL(teacher || softmax of the scores) over the chosen and as many random");
  report.done.push_back(
      "tokens: topk, forward, distribution, scores, backward in every step, then Adam");
  report.done.push_back(format_text("loss %.3f -> %.3f; on held-out queries %.3f -> %.3f",
                                    first_loss, last_loss, curves.held_out_loss.front(),
                                    curves.held_out_loss.back()));
  report.done.push_back(format_text("captured share %.3f -> %.3f (best possible %.3f)", first_share,
                                    last_share, references.best));
  report.at_most("last loss / first loss", last_loss / first_loss, kLossLeft);
  report.at_most("the same on held-out queries",
                 curves.held_out_loss.back() / curves.held_out_loss.front(), kLossLeft);
  report.at_least("captured share against its start", last_share,
                  first_share + kGainShare * (references.best - first_share));
  report.at_least("captured share against random tokens", last_share,
                  references.random + kGainShare * (references.best - references.random));
  report.numbers = {{"steps", steps},
                    {"batch", kBatch},
                    {"learning_rate", kLearningRate},
                    {"first_loss", first_loss},
                    {"last_loss", last_loss},
                    {"loss", curves.loss},
                    {"evaluated_at", curves.evaluated_at},
                    {"held_out_loss", curves.held_out_loss},
                    {"held_out_captured_share", curves.held_out_capture}};
  state.changes.push_back({"loss of the batch (KL)", first_loss, last_loss, ""});
  state.changes.push_back({"loss on held-out queries (KL)", curves.held_out_loss.front(),
                           curves.held_out_loss.back(), ""});
  state.changes.push_back({"captured share of full attention", first_share, last_share,
                           format_text("best %.3f, recent %.3f, random %.3f", references.best,
                                       references.recent, references.random)});
}

// Step 8: attention over what the trained indexer picks, against attention over everything.
namespace {

constexpr double kErrorLeft = 0.9;  // of the untrained error at most

// The rows of `all` at the positions.
Tensor rows_at(const Tensor& all, const std::vector<std::int64_t>& positions) {
  const std::int64_t length = all.numel() / all.size(0);
  Tensor result(DType::f32, {std::ssize(positions), length});
  float* to = result.values<float>().data();
  for (const std::int64_t position : positions) {
    const float* from = all.values<float>().data() + position * length;
    for (std::int64_t c = 0; c < length; ++c) *to++ = from[c];
  }
  return result;
}

}  // namespace

void run_learned_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  const double before =
      relative_error(state.held_out, rows_at(state.output.out, state.held_out_queries));
  state.chosen =
      choose_by_score(state.indexer->project(rows_of(layer.kv()), state.all_queries), state.topk);
  state.output = layer.forward(state.chosen);
  const double after =
      relative_error(state.held_out, rows_at(state.output.out, state.held_out_queries));

  report.size = format_text("%ld queries, %ld heads, topk %ld", layer.tokens(), kHeads, state.topk);
  report.done.push_back("forward over what the trained indexer picks; on held-out queries the");
  report.done.push_back(
      format_text("output is %.3f away from full attention, untrained it was %.3f", after, before));
  report.require("every choice is an earlier token, none twice, none missing",
                 is_sound(state.chosen));
  check_output_against_plain(layer, state.chosen, state.output,
                             spread_rows(layer.tokens(), kSample), report);
  report.at_most("error after training / before", after / before, kErrorLeft);
  report.numbers = {{"output_error_before", before}, {"output_error_after", after}};
  state.changes.push_back({"output's distance from full attention", before, after, "relative"});
}

}  // namespace winnow::demo
