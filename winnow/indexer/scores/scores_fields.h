// The arguments of scores() by name, for logs and records. Internal.
#pragma once

#include "winnow/indexer/scores/scores.h"

namespace winnow::indexer {

template <class Visitor>
constexpr void each_argument(ScoresArgs& args, Visitor&& visit) {
  visit("q", args.q);
  visit("k", args.k);
  visit("weights", args.weights);
  visit("indices", args.indices);
  visit("k_scale", args.k_scale);
  visit("key_start", args.key_start);
  visit("key_end", args.key_end);
  visit("q_start", args.q_start);
  visit("k_stride", args.k_stride);
  visit("scores", args.scores);
}

}  // namespace winnow::indexer
