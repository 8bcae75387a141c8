// Which earlier tokens each query may look at, and the rules that choose them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tools/winnow/demo/random.h"

#include "winnow/core/tensor.h"

namespace winnow::demo {

// Row i lists `topk` rows of kv for the query at positions[i], in ascending order; the rest of a
// row with fewer earlier tokens is -1. "Earlier" includes the query's own token.
struct Selection {
  std::vector<std::int64_t> positions;
  std::int64_t topk = 0;
  std::vector<std::int32_t> entries;  // [positions.size(), topk]

  std::span<const std::int32_t> row(std::int64_t i) const {
    return {entries.data() + i * topk, static_cast<std::size_t>(topk)};
  }
  // As the operations take it: [s_q, 1, topk]. The selection must outlive the view.
  ConstTensorView view() const;
};

// value(i, token): higher is chosen; ties go to the later token, NaN comes last.
using TokenValue = std::function<double(std::int64_t, std::int64_t)>;
Selection choose_best(std::span<const std::int64_t> positions, std::int64_t topk,
                      const TokenValue& value);
Selection choose_recent(std::span<const std::int64_t> positions, std::int64_t topk);
Selection choose_random(std::span<const std::int64_t> positions, std::int64_t topk, Random& random);

// `chosen` with as many random further tokens as it has entries.
Selection with_exploration(const Selection& chosen, Random& random);

// Every entry is an earlier token or -1, none occurs twice in a row, and each row has
// min(topk, earlier tokens) of them.
bool is_sound(const Selection& selection);

}  // namespace winnow::demo
