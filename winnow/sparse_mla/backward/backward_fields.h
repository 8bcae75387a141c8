// The arguments of backward() by name, for logs and records. Internal.
#pragma once

#include "winnow/sparse_mla/backward/backward.h"

namespace winnow::sparse_mla {

template <class Visitor>
constexpr void each_argument(BackwardArgs& args, Visitor&& visit) {
  visit("q", args.q);
  visit("kv", args.kv);
  visit("indices", args.indices);
  visit("out", args.out);
  visit("lse", args.lse);
  visit("d_out", args.d_out);
  visit("topk_length", args.topk_length);
  visit("attn_sink", args.attn_sink);
  visit("delta", args.delta);
  visit("scale", args.scale);
  visit("q_start", args.q_start);
  visit("k_stride", args.k_stride);
  visit("deterministic", args.deterministic);
  visit("dq", args.dq);
  visit("dkv", args.dkv);
  visit("d_sink", args.d_sink);
  visit("workspace", args.workspace);
}

}  // namespace winnow::sparse_mla
