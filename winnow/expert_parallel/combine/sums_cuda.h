// The sums of combine on a GPU: what the kernels are given, and their launches, each a
// cudaError_t. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/expert_parallel/device/routing.h"
#include "winnow/expert_parallel/device/view.h"

namespace winnow::expert_parallel {

// All sums are f32, nested and rounded as RowSumParams (combine_impl.h) says.
struct DeviceSumParams {
  LayerView view;
  DType dtype = DType::bf16;  // f32, f16 or bf16: of rows, sums, bias and out
  std::int64_t row_bytes = 0;
  RoutingTables routing;
  DeviceWeights weights;  // null: not weighted
  bool token_major = false;
  // enable_local_combine, expert-major: every rank pushes the sum of its rows of a token, rounded,
  // to the rank of its node that reduces the token. Otherwise that one reads the rows themselves.
  bool pushes = false;
  std::int64_t max_tokens = 0;  // T

  const std::byte* expert_rows = nullptr;  // [R, H] of this rank, aligned to 16
  std::int64_t expert_stride = 0;          // bytes, a multiple of 16
  // sum: this rank's n tokens. Strides in bytes; bias may be null.
  std::int64_t tokens = 0;
  const std::byte* bias = nullptr;
  std::byte* out = nullptr;
  std::int64_t bias_stride = 0, out_stride = 0;
};

// With more than one node: sums over this node of the other nodes' tokens, rounded, to
// RailLayout::staged_row().
int launch_node_sum(const DeviceSumParams& params, int blocks, void* stream);
// The tokens of this rank. When it ends no rank of the node reads this rank's rows any more.
int launch_sum(const DeviceSumParams& params, int blocks, void* stream);
// Loads the kernels onto the current GPU.
int load_sum_kernels();

}  // namespace winnow::expert_parallel
