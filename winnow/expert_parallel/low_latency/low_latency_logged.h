// The arguments of a LowLatency by name, for the log of calls. Internal.
#pragma once

#include "winnow/expert_parallel/low_latency/low_latency.h"

namespace winnow::expert_parallel {

template <class Visitor>
void each_argument(const LowLatencyDispatchArgs& args, Visitor&& visit) {
  visit("input", args.input);
  visit("expert_indices", args.expert_indices);
  visit("format", args.format);
  visit("part", args.part);
  visit("sent", args.sent);
  visit("output", args.output);
  visit("scales", args.scales);
  visit("counts", args.counts);
  visit("source_tokens", args.source_tokens);
  visit("source_pairs", args.source_pairs);
  visit("pair_rows", args.pair_rows);
  visit("ranges", args.ranges);
  visit("expert_statistics", args.expert_statistics);
  visit("wait_statistics", args.wait_statistics);
}

template <class Visitor>
void each_argument(const LowLatencyCombineArgs& args, Visitor&& visit) {
  visit("expert_output", args.expert_output);
  visit("pair_rows", args.pair_rows);
  visit("expert_indices", args.expert_indices);
  visit("weights", args.weights);
  visit("out", args.out);
  visit("wait_statistics", args.wait_statistics);
  visit("part", args.part);
  visit("sent", args.sent);
}

}  // namespace winnow::expert_parallel
