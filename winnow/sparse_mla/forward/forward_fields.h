// The arguments of forward() by name, for logs and records. Internal.
#pragma once

#include "winnow/sparse_mla/forward/forward.h"

namespace winnow::sparse_mla {

template <class Visitor>
constexpr void each_argument(ForwardArgs& args, Visitor&& visit) {
  visit("q", args.q);
  visit("kv", args.kv);
  visit("indices", args.indices);
  visit("topk_length", args.topk_length);
  visit("attn_sink", args.attn_sink);
  visit("scale", args.scale);
  visit("key_start", args.key_start);
  visit("key_end", args.key_end);
  visit("q_start", args.q_start);
  visit("k_stride", args.k_stride);
  visit("out", args.out);
  visit("max_logits", args.max_logits);
  visit("lse", args.lse);
  visit("workspace", args.workspace);
}

}  // namespace winnow::sparse_mla
