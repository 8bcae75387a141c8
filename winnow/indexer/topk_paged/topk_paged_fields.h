// The arguments of topk_paged() by name, for logs and records. Internal.
#pragma once

#include "winnow/indexer/topk_paged/topk_paged.h"

namespace winnow::indexer {

template <class Visitor>
constexpr void each_argument(TopkPagedArgs& args, Visitor&& visit) {
  visit("q", args.q);
  visit("pages", args.pages);
  visit("weights", args.weights);
  visit("block_tables", args.block_tables);
  visit("context_lens", args.context_lens);
  visit("ties", args.ties);
  visit("positions", args.positions);
  visit("indices", args.indices);
  visit("length", args.length);
  visit("scores", args.scores);
  visit("workspace", args.workspace);
}

}  // namespace winnow::indexer
