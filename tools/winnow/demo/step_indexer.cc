// Step 4: an indexer that has learned nothing picks the top-k.
#include "tools/winnow/demo/indexer.h"
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {

void run_indexer_step(DemoState& state, StepReport& report) {
  Random random(13);
  state.indexer = std::make_shared<Indexer>(kRowDim, random);
  const auto rows = rows_of(state.layer->kv());
  state.chosen = choose_by_score(state.indexer->project(rows, state.all_queries), state.topk);
  state.stretch_untrained = selection_at(state.chosen, state.stretch_queries);
  const double share =
      captured_share(state.held_out, selection_at(state.chosen, state.held_out_queries));

  const long long weights = static_cast<long long>(state.indexer->maps.size());
  report.size = format_text("%lld weights, top %lld of up to %lld", weights,
                            static_cast<long long>(state.topk),
                            static_cast<long long>(state.layer->tokens()));
  report.done.push_back(
      format_text("a lightning indexer of %lld heads of %lld, with random weights",
                  static_cast<long long>(kIndexerHeads), static_cast<long long>(kIndexerDim)));
  report.done.push_back(format_text("captures %.3f of the full attention", share));
  report.require("every choice is an earlier token, none twice, none missing",
                 is_sound(state.chosen));
  report.numbers = {{"heads", kIndexerHeads},
                    {"dim", kIndexerDim},
                    {"weights", weights},
                    {"captured_share", share}};
}

}  // namespace winnow::demo
