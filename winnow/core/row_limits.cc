#include "winnow/core/row_limits.h"

#include <string>

#include "winnow/core/check.h"

namespace winnow {

void check_positions(const Check& check, const ConstTensorView& q,
                     std::optional<std::int64_t> q_start, std::int64_t k_stride) {
  check.that(k_stride >= 1, "k_stride", "1 or more", std::to_string(k_stride));
  check.that(q_start.has_value() || k_stride == 1, "k_stride", "1 where q_start is absent",
             std::to_string(k_stride));
  constexpr std::int64_t kEnd = std::int64_t{1} << 62;
  const std::int64_t first = q_start.value_or(0), s_q = q.size(0);
  if (first >= -kEnd && first <= kEnd - s_q) return;
  std::string got = std::to_string(first);
  if (first >= -kEnd && first < kEnd) got += " to " + std::to_string(first + s_q - 1);
  check.that(false, "q_start", "positions from -2^62 to 2^62 - 1", got);
}

}  // namespace winnow
