// The arguments of AllToAll::dispatch() by name, for the log of calls. Internal.
#pragma once

#include "winnow/expert_parallel/dispatch/dispatch.h"

namespace winnow::expert_parallel {

template <class Visitor>
void each_argument(const DispatchArgs& args, Visitor&& visit) {
  visit("input", args.input);
  visit("expert_indices", args.expert_indices);
  visit("weights", args.weights);
  visit("scales", args.scales);
  visit("scatter_indices", args.scatter_indices);
  visit("order", args.order);
  visit("expert_alignment", args.expert_alignment);
  visit("worst_case_rows", args.worst_case_rows);
  visit("copy_out", args.copy_out);
  visit("out", args.out);
  visit("sm_count", args.sm_count);
  visit("cached", args.cached != nullptr);
}

}  // namespace winnow::expert_parallel
