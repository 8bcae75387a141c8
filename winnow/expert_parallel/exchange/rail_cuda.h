// Rows on their way to rail peers, in dispatch (tokens) and combine (sums of this node). Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"

namespace winnow::expert_parallel {

// Dispatch: each token of this rank goes once to every other node with an expert of it. Combine:
// each token of a rail peer with an expert on this node goes back to it.
struct RailSendParams {
  LayerView view;
  const std::uint32_t* placed = nullptr;  // 0 there: nothing is sent. Null: as 1
  bool back = false;                      // combine
  // Dispatch: [n, K] of this rank. Combine: [NN, T, K] of the rail sources.
  const std::int32_t* indices = nullptr;
  std::int64_t tokens = 0;                      // dispatch: n
  const std::int32_t* rail_tokens = nullptr;    // combine: [W] n of every rank
  std::int64_t row_bytes = 0, scale_bytes = 0;  // 0: no rows, no scales
  // Dispatch: the rows and scales, strides in bytes. Combine: they are in RailLayout::staged_row()
  // and staged_scale().
  const std::byte* rows = nullptr;
  const std::byte* scales = nullptr;
  std::int64_t row_stride = 0, scale_stride = 0;
};

}  // namespace winnow::expert_parallel
