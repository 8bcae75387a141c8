// The arguments of AllToAll::combine() by name, for the log of calls. Internal.
#pragma once

#include "winnow/expert_parallel/combine/combine.h"

namespace winnow::expert_parallel {

template <class Visitor>
void each_argument(const CombineArgs& args, Visitor&& visit) {
  visit("expert_output", args.expert_output);
  visit("bias", args.bias);
  visit("second_bias", args.second_bias);
  visit("weighted", args.weighted);
  visit("weights", args.weights);
  visit("pair_values", args.pair_values);
  visit("pair_values_out", args.pair_values_out);
  visit("add_values", args.add_values);
  visit("out", args.out);
  visit("sm_count", args.sm_count);
}

}  // namespace winnow::expert_parallel
