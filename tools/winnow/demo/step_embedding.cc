// Step 2: tokens become the queries and the latent rows of an attention layer.
#include <cmath>
#include <numeric>
#include <span>

#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

// Rotary columns must tell the distance of two positions and nothing else.
constexpr double kRotaryTolerance = 1e-5;
// Four unit vectors, each off by up to 2^-9.
constexpr double kRotaryToleranceBf16 = 8e-3;

double rotary_product(const Layer& layer, std::int64_t a, std::int64_t b) {
  const auto rotary = [&](std::int64_t token) {
    return layer.kv().values<float>().subspan(token * kRowDim + kNopeDim, kRopeDim);
  };
  return std::inner_product(rotary(a).begin(), rotary(a).end(), rotary(b).begin(), 0.0);
}

}  // namespace

void run_embedding_step(DemoState& state, StepReport& report) {
  state.layer.emplace(embed(state.document.text), state.placement);
  const Layer& layer = *state.layer;
  const std::int64_t tokens = layer.tokens();
  report.size =
      format_text("q [%lld, %d, %d], kv [%lld, 1, %d], %s", static_cast<long long>(tokens),
                  int(kHeads), int(kRowDim), static_cast<long long>(tokens), int(kRowDim),
                  std::string(to_string(layer.placement().dtype)).c_str());
  report.done.push_back(format_text("a row tells its last %d bytes (%d columns) and its place (%d,",
                                    kContext, int(kNopeDim), int(kRopeDim)));
  report.done.push_back("rotary); heads look nearby, after the same byte or two, or for the alike");
  const bool rounded = layer.placement().dtype == DType::bf16;
  if (rounded) {
    report.done.push_back("q and kv are rounded to bf16 once: all steps see the same numbers;");
    report.done.push_back("sparse_mla::forward and distribution run on " +
                          to_string(layer.placement().device));
  }
  report.require("q and kv are finite", all_finite(layer.q()) && all_finite(layer.kv()));
  double worst = 0;
  for (const std::int64_t distance : {0, 1, 10, 100}) {
    const double here = rotary_product(layer, distance, 0);
    const double there = rotary_product(layer, tokens - 1, tokens - 1 - distance);
    worst = larger(worst, std::fabs(here - there));
  }
  report.at_most("rotary products depend on the distance alone; difference", worst,
                 rounded ? kRotaryToleranceBf16 : kRotaryTolerance);
  report.numbers = {{"heads", kHeads},
                    {"nope_dim", kNopeDim},
                    {"rope_dim", kRopeDim},
                    {"context_bytes", kContext}};
}

}  // namespace winnow::demo
