// The arguments of store() by name, for logs and records. Internal.
#pragma once

#include "winnow/sparse_mla/store/store.h"

namespace winnow::sparse_mla {

template <class Visitor>
constexpr void each_argument(StoreArgs& args, Visitor&& visit) {
  visit("rows", args.rows);
  visit("slots", args.slots);
  visit("format", args.format);
  visit("cache", args.cache);
  visit("workspace", args.workspace);
}

}  // namespace winnow::sparse_mla
