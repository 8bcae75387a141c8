// Steps 1 to 3, 5 and 6: a layer over a document, and what its attention looks at.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <span>

#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/state.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {

// Step 1: the bytes of the document are the tokens.
namespace {

// An indexer that may keep one token in 16 has something to choose.
constexpr std::int64_t kTokensPerChoice = 16;
constexpr std::int64_t kMaxTopk = 128;
// One query in this many is held out.
constexpr std::int64_t kHeldOutEvery = 16;

// The stretch for the picture: about three quarters into the text, where queries have much to look
// back to, from the beginning of a line if one is near, else of a word.
std::int64_t stretch_begin(const std::string& text) {
  const std::int64_t last = std::ssize(text) - kStretch;
  const std::int64_t middle = last * 3 / 4;
  const std::int64_t end = std::min(last, middle + 2 * kStretch);
  for (const char before : {'\n', ' '}) {
    for (std::int64_t begin = middle; begin < end; ++begin) {
      if (text[static_cast<std::size_t>(begin) - 1] == before) return begin;
    }
  }
  return middle;
}

}  // namespace

Selection selection_at(const Selection& all, const std::vector<std::int64_t>& positions) {
  Selection result;
  result.positions = positions;
  result.topk = all.topk;
  for (const std::int64_t position : positions) {
    const std::span<const std::int32_t> row = all.row(position);
    result.entries.insert(result.entries.end(), row.begin(), row.end());
  }
  return result;
}

void run_document_step(DemoState& state, StepReport& report) {
  const std::string& text = state.document.text;
  const std::int64_t tokens = std::ssize(text);
  state.topk = std::clamp<std::int64_t>(tokens / kTokensPerChoice, 1, kMaxTopk);
  const std::int64_t begin = stretch_begin(text);
  for (std::int64_t t = 0; t < tokens; ++t) {
    state.all_queries.push_back(t);
    const bool in_stretch = t >= begin && t < begin + kStretch;
    // Queries with few earlier tokens can keep them all and tell nothing.
    const bool held_out = t % kHeldOutEvery == kHeldOutEvery / 2 && t >= 2 * state.topk;
    if (in_stretch) state.stretch_queries.push_back(t);
    if (held_out) state.held_out_queries.push_back(t);
    if (!in_stretch && !held_out && t > 0) state.training_queries.push_back(t);
  }
  const std::int64_t different = std::ssize(std::set<char>(text.begin(), text.end()));
  report.size = format_text("%ld tokens, %ld different", tokens, different);
  report.done.push_back((state.document.truncated ? "the beginning of " : "all of ") +
                        state.document.name);
  report.done.push_back(format_text(
      "every byte is a token; %zu queries to train on, %zu held out, %zu for the picture",
      state.training_queries.size(), state.held_out_queries.size(), state.stretch_queries.size()));
  report.require("UTF-8 text in whole characters", [&] {
    std::span<const char> rest = text;
    while (!rest.empty()) {
      const std::size_t length = utf8_character_length(rest);
      if (length == 0) return false;
      rest = rest.subspan(length);
    }
    return true;
  }());
  report.numbers = {{"file", state.document.name},
                    {"tokens", tokens},
                    {"different_tokens", different},
                    {"truncated", state.document.truncated},
                    {"topk", state.topk},
                    {"training_queries", std::ssize(state.training_queries)},
                    {"held_out_queries", std::ssize(state.held_out_queries)},
                    {"picture_queries", std::ssize(state.stretch_queries)},
                    {"picture_begin", begin}};
}

// Step 2: tokens become the queries and the latent rows of an attention layer.
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
      format_text("q [%ld, %ld, %ld], kv [%ld, 1, %ld], %s", tokens, kHeads, kRowDim, tokens,
                  kRowDim, std::string(to_string(layer.placement().dtype)).c_str());
  report.done.push_back(
      format_text("a row tells its last %d bytes (%ld columns) and its place (%ld,", kContext,
                  kNopeDim, kRopeDim));
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

// Step 3: what attention over all earlier tokens looks at. The indexer should find it.
namespace {

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

  report.size =
      format_text("%zu queries over up to %ld tokens",
                  dense.positions.size() + state.stretch.positions.size(), layer.tokens());
  report.done.push_back("full attention of the queries kept from training, spread over");
  report.done.push_back(format_text("%.0f tokens on average; of it %ld tokens hold: the best %.3f,",
                                    spread, state.topk, state.references.best));
  report.done.push_back(format_text("the most recent %.3f, random ones %.3f",
                                    state.references.recent, state.references.random));
  // All earlier tokens, in order: entry j is token j, as in attn_sum.
  const Selection everything = choose_recent(dense.positions, layer.tokens());
  const std::vector<std::int64_t> sample = spread_rows(std::ssize(dense.positions), 3);
  check_output_against_plain(layer, everything, dense.output, sample, report);
  check_weights_against_plain(layer, everything, dense.attn_sum, sample, report);
  check_row_sums(dense.attn_sum, report);
  check_row_sums(state.stretch.attn_sum, report);
  report.numbers = {{"spread_tokens", spread},
                    {"best_share", state.references.best},
                    {"recent_share", state.references.recent},
                    {"random_share", state.references.random}};
}

// Step 5: attention over what the untrained indexer picked.
void run_forward_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  state.output = layer.forward(state.chosen);
  report.size = format_text("%ld queries, %ld heads, topk %ld", layer.tokens(), kHeads, state.topk);
  report.done.push_back("sparse_mla::forward over the chosen rows, q_start 0, k_stride 1");
  report.require("out and lse are finite",
                 all_finite(state.output.out) && all_finite(state.output.lse));
  check_output_against_plain(layer, state.chosen, state.output,
                             spread_rows(layer.tokens(), kSample), report);
}

// Step 6: how much all heads together attend to each chosen row: the teacher of the indexer.
void run_distribution_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  const Tensor attn_sum = layer.distribution(state.chosen, state.output.lse);
  report.size = format_text("%ld queries, %ld heads, topk %ld", layer.tokens(), kHeads, state.topk);
  report.done.push_back("sparse_mla::distribution of the same rows; divided by the heads it is");
  report.done.push_back("the distribution that the indexer has to match");
  check_row_sums(attn_sum, report);
  check_weights_against_plain(layer, state.chosen, attn_sum, spread_rows(layer.tokens(), kSample),
                              report);
}

}  // namespace winnow::demo
