// The contents of a Descriptor. Internal.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "winnow/expert_parallel/layer/descriptor.h"
#include "winnow/expert_parallel/memory/arena.h"
#include "winnow/expert_parallel/routing/routing.h"

namespace winnow::expert_parallel {

struct Descriptor::State {
  std::shared_ptr<const void> layer;  // identifies the layer; null: a descriptor without a dispatch
  int rank = 0;
  std::uint64_t number = 0;  // the epoch of the dispatch
  std::shared_ptr<const Routing> routing;
  bool has_weights = false;
  std::vector<float> weights;      // [NN, T, K] of the rail sources, if weights were dispatched
  std::shared_ptr<Region> buffer;  // combine_buffer(), at its beginning
  std::int64_t values_at = 0;      // offset in `buffer` of the room for pair_values, in bytes
  // On a GPU:
  CudaWeights cuda_weights;
  std::vector<std::shared_ptr<Region>> memory;  // of cuda_weights, and what a captured graph uses

  std::int64_t rows() const { return routing->rows_of(rank); }
};

}  // namespace winnow::expert_parallel
