// Step 3: what attention over all earlier tokens looks at. The indexer should find it.
#include <cmath>

#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

constexpr std::int64_t kSample = 3;

// exp(entropy): over how many tokens a query's attention is spread.
double mean_spread(const DenseAttention& dense) {
  double sum = 0;
  for (std::size_t i = 0; i < dense.positions.size(); ++i) {
    double entropy = 0;
    for (std::int64_t token = 0; token <= dense.positions[i]; ++token) {
      const double share = dense.share(static_cast<std::int64_t>(i), token);
      if (share > 0) entropy -= share * std::log(share);
    }
    sum += std::exp(entropy);
  }
  return sum / static_cast<double>(dense.positions.size());
}

}  // namespace

void run_dense_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  state.held_out = layer.dense(state.held_out_queries);
  state.stretch = layer.dense(state.stretch_queries);

  const DenseAttention& dense = state.held_out;
  const Selection best =
      choose_best(dense.positions, state.topk,
                  [&](std::int64_t i, std::int64_t token) { return dense.share(i, token); });
  Random random(11);
  state.references.best = captured_share(dense, best);
  state.references.recent = captured_share(dense, choose_recent(dense.positions, state.topk));
  state.references.random =
      captured_share(dense, choose_random(dense.positions, state.topk, random));
  const double spread = mean_spread(dense);

  report.size = format_text("%zu queries over up to %lld tokens",
                            dense.positions.size() + state.stretch.positions.size(),
                            static_cast<long long>(layer.tokens()));
  report.done.push_back("full attention of the queries kept from training, spread over");
  report.done.push_back(
      format_text("%.0f tokens on average; of it %lld tokens hold: the best %.3f,", spread,
                  static_cast<long long>(state.topk), state.references.best));
  report.done.push_back(format_text("the most recent %.3f, random ones %.3f",
                                    state.references.recent, state.references.random));
  // All earlier tokens, in order: entry j is token j, as in attn_sum.
  const Selection everything = choose_recent(dense.positions, layer.tokens());
  const std::vector<std::int64_t> sample =
      spread_rows(static_cast<std::int64_t>(dense.positions.size()), kSample);
  check_output_against_plain(layer, everything, dense.output, sample, report);
  check_weights_against_plain(layer, everything, dense.attn_sum, sample, report);
  check_row_sums(dense.attn_sum, report);
  check_row_sums(state.stretch.attn_sum, report);
  report.numbers = {{"spread_tokens", spread},
                    {"best_share", state.references.best},
                    {"recent_share", state.references.recent},
                    {"random_share", state.references.random}};
}

}  // namespace winnow::demo
