// The lightning indexer's scores of all cached rows in decode steps, over a paged cache of keys in
// 8 bits.
#pragma once

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::indexer {

// Arguments of scores_paged(). A default-constructed optional tensor is absent.
struct ScoresPagedArgs {
  ConstTensorView q{};             // as those of topk_paged()
  ConstTensorView pages{};         // as those of topk_paged()
  ConstTensorView weights{};       // as those of topk_paged()
  ConstTensorView block_tables{};  // as those of topk_paged()
  ConstTensorView context_lens{};  // as those of topk_paged()
  bool clean = true;               // write -inf behind the rows that a query sees
  TensorView scores{};             // [b, s_q, max_context], f32
};

// scores[i,j,t] = I[i,j,t] with the score I of topk_paged(), for the positions t < max_context that
// query j of sequence i sees; -inf where the page of a position is absent. From the first position
// that the query does not see the scores are -inf, or left as they are where `clean` is false.
// max_context is 0 to 2^31 - 128, and may be more or less than the tables have room for. The scores
// are those that topk_paged() compares, and those of scores() of the same keys, bit for bit.
//
// There is no workspace, and scratch memory does not grow with the call. Limits, strides, memory,
// streams and errors are those of topk_paged(): scores that overlap an input are refused. Returns
// the backend that ran.
//
// Defined by DeepSeek-V3.2 (the lightning indexer of DeepSeek Sparse Attention).
WINNOW_EXPORT Backend scores_paged(const ScoresPagedArgs& args, const RunOptions& options = {});

}  // namespace winnow::indexer
