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
  std::shared_ptr<const void> layer;  // the identity of its layer; null: made without one
  int rank = 0;
  std::uint64_t number = 0;  // the epoch of its own dispatch
  std::shared_ptr<const Routing> routing;
  bool has_weights = false;
  std::vector<float> weights;      // [NN, T, K] of the rail sources, if it has them
  std::shared_ptr<Region> buffer;  // combine_buffer(), at its beginning
  std::int64_t values_at = 0;      // in `buffer`, bytes: room for the values of the rows' pairs
  // On a GPU.
  CudaWeights cuda_weights;
  std::vector<std::shared_ptr<Region>> memory;  // of them, and of what a recorded graph uses

  std::int64_t rows() const { return routing->rows_of(rank); }
};

}  // namespace winnow::expert_parallel
