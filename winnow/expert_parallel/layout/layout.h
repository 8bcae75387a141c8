// Counts the tokens for each rank, node and expert, and determines which token goes to which rank.
#pragma once

#include <cstdint>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::expert_parallel {

// Arguments of layout(). Absent outputs are not computed.
struct LayoutArgs {
  ConstTensorView expert_indices{};   // [n, K], i32, K from 1 to 32: the experts of each token
  std::int64_t experts = 0;           // E, a multiple of world_size
  std::int64_t world_size = 0;        // W, a multiple of local_world_size
  std::int64_t local_world_size = 0;  // L: ranks per node
  TensorView tokens_per_rank{};       // [W], i32: each token once per rank
  TensorView tokens_per_node{};       // [W/L], i32: each token once per node
  TensorView tokens_per_expert{};     // [E], i32: every (token, k)
  TensorView is_token_in_rank{};      // [n, W], u8: 1 if the token has an expert there, else 0
};

// Expert x lives on rank x / (E/W), rank r on node r / L. An index of E or -1 names no expert. If a
// token names an expert twice, it counts twice for the expert, and once for its rank and its node.
//
// Sizes: any n, 0 included. Strides: the innermost dimension is contiguous, the others are
// arbitrary (also 0 or negative; not 0 for outputs). Memory: all tensors belong to the caller, live
// on one device, and an output that overlaps another tensor is refused. Streams: see Stream; a GPU
// call may be captured. Thread-safe; if another thread changes indices during the call, the counts
// may be wrong, but memory safety is not affected. Returns the backend that ran. Errors: Error
// (invalid_argument) naming the argument, before anything is written. On the CPU, and on a GPU in
// checking mode (RunOptions::check), an index below -1 or above E is such an error, with token, k
// and value; without checking mode a GPU ignores it. Error (unsupported) if no backend, or not the
// forced one, can run it; Error (resource) if an allocation fails.
//
// The counts are those of get_dispatch_layout in DeepEP V1 (DeepSeek 2025), for any number of ranks
// and nodes.
WINNOW_EXPORT Backend layout(const LayoutArgs& args, const RunOptions& options = {});

}  // namespace winnow::expert_parallel
