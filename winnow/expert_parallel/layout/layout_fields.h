// The arguments of layout() by name, for logs and records. Internal.
#pragma once

#include "winnow/expert_parallel/layout/layout.h"

namespace winnow::expert_parallel {

template <class Visitor>
constexpr void each_argument(LayoutArgs& args, Visitor&& visit) {
  visit("expert_indices", args.expert_indices);
  visit("experts", args.experts);
  visit("world_size", args.world_size);
  visit("local_world_size", args.local_world_size);
  visit("tokens_per_rank", args.tokens_per_rank);
  visit("tokens_per_node", args.tokens_per_node);
  visit("tokens_per_expert", args.tokens_per_expert);
  visit("is_token_in_rank", args.is_token_in_rank);
}

}  // namespace winnow::expert_parallel
