// The arguments of quantize() by name, for logs and records. Internal.
#pragma once

#include "winnow/indexer/quantize/quantize.h"

namespace winnow::indexer {

template <class Visitor>
constexpr void each_argument(QuantizeArgs& args, Visitor&& visit) {
  visit("x", args.x);
  visit("power_of_two", args.power_of_two);
  visit("rows", args.rows);
  visit("scale", args.scale);
  visit("pages", args.pages);
  visit("slots", args.slots);
}

}  // namespace winnow::indexer
