// What the operations of the indexer share behind the entry point: the plain description of their
// common inputs. Internal.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/core/backend.h"
#include "winnow/core/dtype.h"
#include "winnow/core/row_limits.h"
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

namespace winnow {
class Check;
}

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

// Rules of the contracts, see problem_contract.h.
void check_heads(const Check& check, const ConstTensorView& q);  // [..., h, d]
void check_keys(const Check& check, const ConstTensorView& k);
void check_scaled(const Check& check, const ConstTensorView& q, const ConstTensorView& k_scale);
void check_topk(const Check& check, const TensorView& indices);  // [..., topk]

// The problem of arguments that the contract has checked.
template <class Args>
Problem problem_of(const Args& args) {
  Problem problem;
  problem.dtype = args.q.dtype();
  problem.s_q = args.q.size(0);
  problem.h = args.q.size(1);
  problem.s_k = args.k.size(0);
  problem.d = args.q.size(2);
  problem.q = rows_of<const void*>(args.q, 0, 1);
  problem.k = rows_of<const void*>(args.k, 0);
  problem.k_scale = rows_of<const float*>(args.k_scale, 0);
  problem.weights_dtype = args.weights.dtype();
  problem.weights = rows_of<const void*>(args.weights, 0);
  RowLimits& limits = problem;
  limits = limits_of(args);
  return problem;
}

// What the kernels of a GPU backend require beyond the contract.
void check_for_gpu(const Check& check, Backend backend, const ConstTensorView& q,
                   const ConstTensorView& k);
// Of lists of rows.
void check_topk_for_gpu(const Check& check, Backend backend, std::int64_t topk,
                        const char* name = "topk");

}  // namespace winnow::indexer
