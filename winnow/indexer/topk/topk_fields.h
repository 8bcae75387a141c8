// The arguments of topk() by name, for logs and records. Internal.
#pragma once

#include "winnow/indexer/topk/topk.h"

namespace winnow::indexer {

template <class Visitor>
constexpr void each_argument(TopkArgs& args, Visitor&& visit) {
  visit("q", args.q);
  visit("k", args.k);
  visit("weights", args.weights);
  visit("k_scale", args.k_scale);
  visit("key_start", args.key_start);
  visit("key_end", args.key_end);
  visit("q_start", args.q_start);
  visit("k_stride", args.k_stride);
  visit("ties", args.ties);
  visit("indices", args.indices);
  visit("length", args.length);
  visit("scores", args.scores);
  visit("workspace", args.workspace);
}

}  // namespace winnow::indexer
