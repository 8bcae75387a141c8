#include "winnow/core/row_limits.h"

#include <string>

namespace winnow {

RowLimits check_row_limits(const Check& check, const ConstTensorView& key_start,
                           const ConstTensorView& key_end, std::optional<std::int64_t> q_start,
                           std::int64_t k_stride, std::int64_t s_q, Device device) {
  const Dim queries{"s_q", s_q};
  if (key_start.present()) check.input("key_start", key_start, {queries}, {DType::i32}, device);
  if (key_end.present()) check.input("key_end", key_end, {queries}, {DType::i32}, device);
  check.that(k_stride >= 1, "k_stride", "1 or more", std::to_string(k_stride));
  check.that(q_start.has_value() || k_stride == 1, "k_stride", "1 where q_start is absent",
             std::to_string(k_stride));
  constexpr std::int64_t kMaxPosition = std::int64_t{1} << 62;
  const std::int64_t first = q_start.value_or(0);
  check.that(first >= -kMaxPosition && first <= kMaxPosition - s_q, "q_start",
             "positions within 2^62", std::to_string(first));
  return {rows_of<const std::int32_t*>(key_start, 0), rows_of<const std::int32_t*>(key_end, 0),
          q_start.has_value(), first, k_stride};
}

}  // namespace winnow
