// The sums of combine, behind the entry point. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/dtype.h"

namespace winnow::expert_parallel {

// One row to add, and what is complete after it.
struct Addend {
  const void* row = nullptr;  // [hidden] of the dtype
  float weight = 1;
  bool ends_rank = false;   // the sum of this row's rank goes into the sum of its node
  bool round_rank = false;  // rounded to the dtype before: it crosses a fabric
  bool ends_node = false;   // the sum of the node goes into the total
};

// to = sum over nodes (sum over ranks (sum over rows)) + bias + second_bias, every sum f32 and
// begun at +0, products rounded before they are added, the result rounded to the dtype once.
struct RowSumParams {
  DType dtype = DType::bf16;  // f32, f16 or bf16: of rows, bias and result
  std::int64_t hidden = 0;
  const Addend* addends = nullptr;
  int count = 0;
  bool weighted = false;
  const void* bias = nullptr;         // [hidden] or null
  const void* second_bias = nullptr;  // the same
  void* to = nullptr;                 // [hidden]
};

void sum_rows_cpu(const RowSumParams& params);

}  // namespace winnow::expert_parallel
