// The arguments of distribution() by name, for logs and records. Internal.
#pragma once

#include "winnow/sparse_mla/distribution/distribution.h"

namespace winnow::sparse_mla {

template <class Visitor>
constexpr void each_argument(DistributionArgs& args, Visitor&& visit) {
  visit("q", args.q);
  visit("kv", args.kv);
  visit("indices", args.indices);
  visit("lse", args.lse);
  visit("topk_length", args.topk_length);
  visit("scale", args.scale);
  visit("key_start", args.key_start);
  visit("key_end", args.key_end);
  visit("q_start", args.q_start);
  visit("k_stride", args.k_stride);
  visit("attn_sum", args.attn_sum);
}

}  // namespace winnow::sparse_mla
