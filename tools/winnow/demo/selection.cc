#include "tools/winnow/demo/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace winnow::demo {
namespace {

Selection empty_selection(std::span<const std::int64_t> positions, std::int64_t topk) {
  Selection result;
  result.positions.assign(positions.begin(), positions.end());
  result.topk = topk;
  result.entries.assign(positions.size() * static_cast<std::size_t>(topk), -1);
  return result;
}

// Adds `count` random tokens of [0, position] that `taken` does not mark, in ascending order; each
// set of that size is equally likely.
void draw(std::int64_t position, std::int64_t count, const std::vector<char>& taken, Random& random,
          std::vector<std::int32_t>& tokens) {
  std::int64_t candidates = 0;
  for (std::int64_t token = 0; token <= position; ++token) candidates += taken[token] == 0;
  for (std::int64_t token = 0; token <= position && count > 0; ++token) {
    if (taken[token] != 0) continue;
    if (random.below(candidates) < count) {
      tokens.push_back(static_cast<std::int32_t>(token));
      --count;
    }
    --candidates;
  }
}

std::vector<char> marks(std::int64_t position, std::span<const std::int32_t> row) {
  std::vector<char> taken(static_cast<std::size_t>(position) + 1, 0);
  for (const std::int32_t token : row) {
    if (token >= 0) taken[token] = 1;
  }
  return taken;
}

}  // namespace

ConstTensorView Selection::view() const {
  return ConstTensorView(entries.data(), DType::i32,
                         {static_cast<std::int64_t>(positions.size()), 1, topk});
}

Selection choose_best(std::span<const std::int64_t> positions, std::int64_t topk,
                      const TokenValue& value) {
  Selection result = empty_selection(positions, topk);
  std::vector<double> values;
  std::vector<std::int32_t> order;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const std::int64_t earlier = positions[i] + 1;
    values.resize(earlier);
    order.resize(earlier);
    for (std::int64_t token = 0; token < earlier; ++token) {
      const double v = value(static_cast<std::int64_t>(i), token);
      values[token] = std::isnan(v) ? -std::numeric_limits<double>::infinity() : v;
      order[token] = static_cast<std::int32_t>(token);
    }
    const std::int64_t count = std::min(topk, earlier);
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(),
                     [&](std::int32_t a, std::int32_t b) {
                       return values[a] != values[b] ? values[a] > values[b] : a > b;
                     });
    std::sort(order.begin(), order.begin() + count);
    std::copy_n(order.begin(), count, result.entries.begin() + static_cast<std::int64_t>(i) * topk);
  }
  return result;
}

Selection choose_recent(std::span<const std::int64_t> positions, std::int64_t topk) {
  return choose_best(positions, topk,
                     [](std::int64_t, std::int64_t token) { return static_cast<double>(token); });
}

Selection choose_random(std::span<const std::int64_t> positions, std::int64_t topk,
                        Random& random) {
  Selection result = empty_selection(positions, topk);
  std::vector<std::int32_t> tokens;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    tokens.clear();
    draw(positions[i], topk, marks(positions[i], {}), random, tokens);
    std::copy(tokens.begin(), tokens.end(),
              result.entries.begin() + static_cast<std::int64_t>(i) * topk);
  }
  return result;
}

Selection with_exploration(const Selection& chosen, Random& random) {
  Selection result = empty_selection(chosen.positions, 2 * chosen.topk);
  std::vector<std::int32_t> tokens;
  for (std::size_t i = 0; i < chosen.positions.size(); ++i) {
    const std::span<const std::int32_t> row = chosen.row(static_cast<std::int64_t>(i));
    tokens.clear();
    for (const std::int32_t token : row) {
      if (token >= 0) tokens.push_back(token);
    }
    draw(chosen.positions[i], chosen.topk, marks(chosen.positions[i], row), random, tokens);
    std::sort(tokens.begin(), tokens.end());
    std::copy(tokens.begin(), tokens.end(),
              result.entries.begin() + static_cast<std::int64_t>(i) * result.topk);
  }
  return result;
}

bool is_sound(const Selection& selection) {
  for (std::size_t i = 0; i < selection.positions.size(); ++i) {
    std::int64_t count = 0;
    std::int32_t previous = -1;
    for (const std::int32_t token : selection.row(static_cast<std::int64_t>(i))) {
      if (token == -1) continue;
      if (token <= previous || token > selection.positions[i]) return false;
      previous = token;
      ++count;
    }
    if (count != std::min(selection.topk, selection.positions[i] + 1)) return false;
  }
  return true;
}

}  // namespace winnow::demo
