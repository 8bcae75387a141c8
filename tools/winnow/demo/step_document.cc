// Step 1: the bytes of the document are the tokens.
#include <algorithm>
#include <set>

#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

// An indexer that may keep one token in 16 has something to choose.
constexpr std::int64_t kTokensPerChoice = 16;
constexpr std::int64_t kMaxTopk = 128;
// One query in so many is held out.
constexpr std::int64_t kHeldOutEvery = 16;

// The stretch for the picture: about three quarters into the text, where queries have much to look
// back to, from the beginning of a line if one is near, else of a word.
std::int64_t stretch_begin(const std::string& text) {
  const std::int64_t last = static_cast<std::int64_t>(text.size()) - kStretch;
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
  const std::int64_t tokens = static_cast<std::int64_t>(text.size());
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
  report.size = format_text("%lld tokens, %lld different", static_cast<long long>(tokens),
                            static_cast<long long>(different));
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

}  // namespace winnow::demo
