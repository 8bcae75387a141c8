// Step 4: an indexer that has learned nothing picks the top-k.
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {

void run_indexer_step(DemoState& state, StepReport& report) {
  Random random(13);
  state.indexer.emplace(kRowDim, kIndexerDim, random);
  const auto rows = state.layer->rows();
  state.chosen = choose_by_score(state.indexer->score(rows, state.all_queries), state.topk);
  state.stretch_untrained = selection_at(state.chosen, state.stretch_queries);
  const double share =
      captured_share(state.held_out, selection_at(state.chosen, state.held_out_queries));

  const long long weights =
      static_cast<long long>(state.indexer->query_map.size() + state.indexer->key_map.size());
  report.size = format_text("%lld weights, top %lld of up to %lld", weights,
                            static_cast<long long>(state.topk),
                            static_cast<long long>(state.layer->tokens()));
  report.done.push_back("a linear indexer, score = (A x_t).(B x_s), with random A and B");
  report.done.push_back(format_text("captures %.3f of the full attention", share));
  report.require("every choice is an earlier token, none twice, none missing",
                 is_sound(state.chosen));
  report.numbers = {{"dim", kIndexerDim}, {"weights", weights}, {"captured_share", share}};
}

}  // namespace winnow::demo
