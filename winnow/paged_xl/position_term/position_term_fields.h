// The arguments of position_term() by name, for logs and records. Internal.
#pragma once

#include "winnow/paged_xl/position_term/position_term.h"

namespace winnow::paged_xl {

template <class Visitor>
constexpr void each_argument(PositionTermArgs& args, Visitor&& visit) {
  visit("query", args.query);
  visit("pos_bias_v", args.pos_bias_v);
  visit("r", args.r);
  visit("context_lens", args.context_lens);
  visit("matrix_bd", args.matrix_bd);
}

}  // namespace winnow::paged_xl
