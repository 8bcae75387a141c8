// The arguments of attention() by name, for logs and records. Internal.
#pragma once

#include "winnow/paged_xl/attention/attention.h"

namespace winnow::paged_xl {

template <class Visitor>
constexpr void each_argument(AttentionArgs& args, Visitor&& visit) {
  visit("query", args.query);
  visit("key_cache", args.key_cache);
  visit("value_cache", args.value_cache);
  visit("pos_bias_u", args.pos_bias_u);
  visit("matrix_bd", args.matrix_bd);
  visit("pos_bias_v", args.pos_bias_v);
  visit("r", args.r);
  visit("block_tables", args.block_tables);
  visit("context_lens", args.context_lens);
  visit("scale", args.scale);
  visit("out", args.out);
  visit("lse", args.lse);
  visit("workspace", args.workspace);
}

}  // namespace winnow::paged_xl
