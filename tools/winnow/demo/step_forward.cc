// Step 5: attention over what the untrained indexer picked.
#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

constexpr std::int64_t kSample = 8;

}  // namespace

void run_forward_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  state.output = layer.forward(state.chosen);
  report.size =
      format_text("%lld queries, %d heads, topk %lld", static_cast<long long>(layer.tokens()),
                  int(kHeads), static_cast<long long>(state.topk));
  report.done.push_back("sparse_mla::forward over the chosen rows, q_start 0, k_stride 1");
  report.require("out and lse are finite",
                 all_finite(state.output.out) && all_finite(state.output.lse));
  check_output_against_plain(layer, state.chosen, state.output,
                             spread_rows(layer.tokens(), kSample), report);
}

}  // namespace winnow::demo
