// The arguments of backward() by name, for logs and records. Internal.
#pragma once

#include "winnow/indexer/backward/backward.h"

namespace winnow::indexer {

template <class Visitor>
constexpr void each_argument(BackwardArgs& args, Visitor&& visit) {
  visit("q", args.q);
  visit("k", args.k);
  visit("weights", args.weights);
  visit("indices", args.indices);
  visit("d_scores", args.d_scores);
  visit("k_scale", args.k_scale);
  visit("key_start", args.key_start);
  visit("key_end", args.key_end);
  visit("q_start", args.q_start);
  visit("k_stride", args.k_stride);
  visit("deterministic", args.deterministic);
  visit("dq", args.dq);
  visit("dk", args.dk);
  visit("d_weights", args.d_weights);
  visit("workspace", args.workspace);
}

}  // namespace winnow::indexer
