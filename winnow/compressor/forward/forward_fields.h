// The arguments of forward() by name, for logs and records. Internal.
#pragma once

#include "winnow/compressor/forward/forward.h"

namespace winnow::compressor {

template <class Visitor>
constexpr void each_argument(ForwardArgs& args, Visitor&& visit) {
  visit("kv", args.kv);
  visit("gate", args.gate);
  visit("position_bias", args.position_bias);
  visit("cu_seqlens", args.cu_seqlens);
  visit("cu_rows", args.cu_rows);
  visit("overlap", args.overlap);
  visit("norm_weight", args.norm_weight);
  visit("eps", args.eps);
  visit("cos", args.cos);
  visit("sin", args.sin);
  visit("first_position", args.first_position);
  visit("hadamard", args.hadamard);
  visit("rows", args.rows);
}

}  // namespace winnow::compressor
