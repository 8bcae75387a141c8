// Step 6: how much all heads together attend to each chosen row: the teacher of the indexer.
#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

constexpr std::int64_t kSample = 8;

}  // namespace

void run_distribution_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  const Tensor attn_sum = layer.distribution(state.chosen, state.output.lse);
  report.size =
      format_text("%lld queries, %d heads, topk %lld", static_cast<long long>(layer.tokens()),
                  int(kHeads), static_cast<long long>(state.topk));
  report.done.push_back("sparse_mla::distribution of the same rows; divided by the heads it is");
  report.done.push_back("the distribution that the indexer has to match");
  check_row_sums(attn_sum, report);
  check_weights_against_plain(layer, state.chosen, attn_sum, spread_rows(layer.tokens(), kSample),
                              report);
}

}  // namespace winnow::demo
