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
  DeviceRouting routing;
  DeviceWeights weights;  // null: not weighted
  bool token_major = false;
  // enable_local_combine, expert-major: where a rank has several rows of a token of another rail,
  // their sum stands in `sums` of that rank of this node, [R, H], in the place of the first row.
  bool local_combine = false;
  NodePointers sums;

  const std::byte* expert_rows = nullptr;  // local_sum: [R, H] of this rank, dense
  std::int64_t rows = 0;                   // R
  // sum: this rank's n tokens. Strides in bytes; bias may be null.
  std::int64_t tokens = 0;
  const std::byte* bias = nullptr;
  std::byte* out = nullptr;
  std::int64_t bias_stride = 0, out_stride = 0;
};

// Before the exchange: sums of the rows of one token on this rank, for the ranks that reduce it.
int launch_local_sum(const DeviceSumParams& params, int blocks, void* stream);
// After it, with more than one node: sums over this node of the other nodes' tokens, rounded, to
// RailLayout::staged_row().
int launch_node_sum(const DeviceSumParams& params, int blocks, void* stream);
// Last: the tokens of this rank. When it ends no rank of the node reads this rank's rows any more.
int launch_sum(const DeviceSumParams& params, int blocks, void* stream);
// Loads the kernels onto the current GPU.
int load_sum_kernels();

}  // namespace winnow::expert_parallel
