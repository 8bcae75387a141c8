// Step 8: attention over what the trained indexer picks, against attention over everything.
#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/indexer.h"
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

constexpr std::int64_t kSample = 8;
constexpr double kErrorLeft = 0.9;  // of the untrained error at most

// The rows of `all` at the positions.
Tensor rows_at(const Tensor& all, const std::vector<std::int64_t>& positions) {
  const std::int64_t length = all.numel() / all.size(0);
  Tensor result(DType::f32, {static_cast<std::int64_t>(positions.size()), length});
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

  report.size =
      format_text("%lld queries, %d heads, topk %lld", static_cast<long long>(layer.tokens()),
                  int(kHeads), static_cast<long long>(state.topk));
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
