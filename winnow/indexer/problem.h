// What the operations of the indexer share below the door: the plain description of their common
// inputs, and the checks that make one. Internal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "winnow/core/check.h"
#include "winnow/core/dtype.h"
#include "winnow/core/row_limits.h"
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

namespace winnow::indexer {

struct Problem : RowLimits {
  DType dtype = DType::f32;
  std::int64_t s_q = 0, h = 0, s_k = 0, d = 0;
  Rows<const void*> q;               // [s_q, h, d]
  Rows<const void*> k;               // [s_k, d]
  Rows<const float*> k_scale;        // [s_k], only with f8_e4m3
  DType weights_dtype = DType::f32;  // f32 or bf16
  Rows<const void*> weights;         // [s_q, h]

  // The rows that query i sees: all limits that are given apply together.
  RowRange visible_rows(std::int64_t i) const { return range_of(i, s_k); }
};

// The tensors and numbers that the argument structs have in common.
struct Inputs {
  ConstTensorView q, k, weights, k_scale, key_start, key_end;
  std::optional<std::int64_t> q_start;
  std::int64_t k_stride = 1;
};
template <class Args>
Inputs inputs_of(const Args& args) {
  return {args.q,         args.k,       args.weights, args.k_scale,
          args.key_start, args.key_end, args.q_start, args.k_stride};
}

// Checks them; throws Error naming the one at fault.
Problem check_problem(const Check& check, const Inputs& inputs);

// What the sm90 kernels want beyond that.
void check_for_sm90(const Check& check, const Inputs& inputs, const Problem& problem);

}  // namespace winnow::indexer
