// The lightning indexer's scores, for chosen rows or for all rows.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::indexer {

// Arguments of scores(). A default-constructed optional tensor is absent.
struct ScoresArgs {
  ConstTensorView q{};          // as in topk()
  ConstTensorView k{};          // as in topk()
  ConstTensorView weights{};    // as in topk()
  ConstTensorView indices{};    // optional [s_q, topk], i32: the rows to score
  ConstTensorView k_scale{};    // [s_k], f32: with f8_e4m3, and only then
  ConstTensorView key_start{};  // optional [s_q], i32
  ConstTensorView key_end{};    // optional [s_q], i32
  std::optional<std::int64_t> q_start{};
  std::int64_t k_stride = 1;
  bool clean = true;  // without indices: write -inf for rows that a query does not see
  // Without indices: columns of scores, of which row i then begins with row key_start[i] of k.
  std::optional<std::int64_t> width{};
  TensorView scores{};  // [s_q, topk] with indices, else [s_q, width] or [s_q, s_k]; f32
};

// scores[i,j] = I[i, indices[i,j]], or without `indices` the dense scores[i,t] = I[i,t], with the
// score I and the visibility of topk(). The score is -inf if the index is outside of [0, s_k) or
// query i does not see the row. If `clean` is false, dense scores of rows that it does not see are
// -inf or not written; GPUs then skips rows that none of a few neighbouring queries sees. With
// `width`, 0 to 2^31 - 1, it is scores[i,c] = I[i, key_start[i] + c], which wants key_start: -inf
// where that is outside of [0, s_k), as key_start may be itself. The bits are the same. Dense
// scores equal those that topk() compares bit for bit, so that its choice can be checked. topk()
// itself needs no memory of [s_q, s_k].
//
// The CPU backend allocates at most 1 MiB of scratch memory per thread. On GPUs topk is at most
// 2^30, and width, too. Other limits, strides, memory, streams and errors are those of topk().
// Scores that overlap an input are refused. Returns the backend that ran.
//
// Defined by DeepSeek-V3.2 (the lightning indexer of DeepSeek Sparse Attention).
WINNOW_EXPORT Backend scores(const ScoresArgs& args, const RunOptions& options = {});

}  // namespace winnow::indexer
