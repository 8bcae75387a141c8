// The arguments of backward() by name, for logs and records. Internal.
#pragma once

#include "winnow/compressor/backward/backward.h"

namespace winnow::compressor {

template <class Visitor>
constexpr void each_argument(BackwardArgs& args, Visitor&& visit) {
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
  visit("d_rows", args.d_rows);
  visit("d_kv", args.d_kv);
  visit("d_gate", args.d_gate);
  visit("d_position_bias", args.d_position_bias);
  visit("d_norm_weight", args.d_norm_weight);
}

}  // namespace winnow::compressor
