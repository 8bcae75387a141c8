// The arguments of append() by name, for logs and records. Internal.
#pragma once

#include "winnow/paged_xl/cache/append.h"

namespace winnow::paged_xl {

template <class Visitor>
constexpr void each_argument(AppendArgs& args, Visitor&& visit) {
  visit("key", args.key);
  visit("value", args.value);
  visit("slot_mapping", args.slot_mapping);
  visit("key_cache", args.key_cache);
  visit("value_cache", args.value_cache);
}

}  // namespace winnow::paged_xl
