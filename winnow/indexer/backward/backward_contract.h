// What backward() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/indexer/backward/backward.h"
#include "winnow/indexer/problem_contract.h"

namespace winnow::indexer {

// The dtype that a gradient may have besides f32: that of its tensor, or bf16 where that is
// f8_e4m3, which is too coarse for gradients.
constexpr DType gradient_of(DType dtype) { return dtype == DType::f8_e4m3 ? DType::bf16 : dtype; }

struct BackwardTable {
  using Args = BackwardArgs;
  static constexpr const char* kOperation = "indexer::backward";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple_cat(
        problem<Args>(),
        std::tuple(
            input<&Args::indices>("[s_q, topk=64]", any_of(i32),
                                  "the rows that were scored; None: all of them")
                .described(),
            input<&Args::d_scores>("[s_q, topk or s_k]", any_of(f32), "the gradient of scores"),
            value<&Args::deterministic>(
                "bitwise equal results run after run (on the CPU they always are)"),
            output<&Args::dq>(
                "[s_q, h, d]", follows("q", accumulator_of, gradient_of),
                "to write into: dtype of q or float32 (bfloat16 or float32 if q is "
                "float8_e4m3fn). If None, a new one: dtype of q (float32 if q is float8_e4m3fn)"),
            output<&Args::dk>("[s_k, d]", follows("k", accumulator_of, gradient_of),
                              "to write into: as dq, for k; summed in float32 and rounded once, at "
                              "the end. If None, a new one: float32"),
            output<&Args::d_weights>(
                "[s_q, h]", follows("weights", accumulator_of, gradient_of),
                "if None, a new one: float32. dq, dk and d_weights must not overlap "
                "inputs or each other"),
            scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<BackwardTable> kBackward;

}  // namespace winnow::indexer
