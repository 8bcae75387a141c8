// The arguments of decode() by name, for logs and records. Internal.
#pragma once

#include "winnow/sparse_mla/decode/decode.h"

namespace winnow::sparse_mla {

template <class Visitor>
constexpr void each_argument(DecodeArgs& args, Visitor&& visit) {
  visit("q", args.q);
  visit("cache", args.cache);
  visit("indices", args.indices);
  visit("topk_length", args.topk_length);
  visit("extra_cache", args.extra_cache);
  visit("extra_indices", args.extra_indices);
  visit("extra_topk_length", args.extra_topk_length);
  visit("attn_sink", args.attn_sink);
  visit("format", args.format);
  visit("scale", args.scale);
  visit("batch_invariant", args.batch_invariant);
  visit("out", args.out);
  visit("lse", args.lse);
  visit("workspace", args.workspace);
}

}  // namespace winnow::sparse_mla
