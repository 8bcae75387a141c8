// The arguments of step() by name, for logs and records. Internal.
#pragma once

#include "winnow/compressor/step/step.h"

namespace winnow::compressor {

template <class Visitor>
constexpr void each_argument(StepArgs& args, Visitor&& visit) {
  visit("kv", args.kv);
  visit("gate", args.gate);
  visit("position_bias", args.position_bias);
  visit("cu_seqlens", args.cu_seqlens);
  visit("first_position", args.first_position);
  visit("state_slots", args.state_slots);
  visit("overlap", args.overlap);
  visit("norm_weight", args.norm_weight);
  visit("eps", args.eps);
  visit("cos", args.cos);
  visit("sin", args.sin);
  visit("hadamard", args.hadamard);
  visit("state", args.state);
  visit("rows", args.rows);
}

}  // namespace winnow::compressor
