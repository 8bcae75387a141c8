// The sums of combine on a GPU: what the kernels are given, and their launches, each a
// cudaError_t. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/routing/tables.h"

namespace winnow::expert_parallel {

// What its waits wait for: in the exchange; of another node a chunk of the rail; of a rank of the
// node what it pushes; the end.
inline constexpr Phase kExpertRowsPhase{2}, kSumsPhase{5}, kPushedSumsPhase{6}, kPushedRowsPhase{7},
    kEndOfSumsPhase{8};

// Whose tokens a kernel works for: those of this rail's ranks on the other nodes, summed over this
// node; or those of this rank, over all nodes.
enum Part { kOthers, kOwn };

// How the rows of a node's other ranks reach the one that reduces their tokens.
enum class Travel {
  rows_are_read,    // by that one
  rows_are_pushed,  // to memory of its own; token-major
  sums_are_pushed,  // each rank's sum of its rows of a token, rounded; expert-major
};

// All sums are f32, nested and rounded as RowSumParams (combine_row_sum.h) says.
struct CudaSumParams {
  LayerView view;
  DType dtype = DType::bf16;  // f32, f16 or bf16: of rows, sums, bias and out
  std::int64_t row_bytes = 0;
  RoutingTables routing;
  CudaWeights weights;  // null: not weighted
  bool token_major = false;
  Travel travel = Travel::rows_are_read;
  std::int64_t max_tokens = 0;  // T

  const std::byte* expert_rows = nullptr;  // [R, H] of this rank, aligned to 16
  std::int64_t expert_stride = 0;          // bytes, a multiple of 16
  // sum: this rank's n tokens. Strides in bytes; the biases may be null.
  std::int64_t tokens = 0;
  const std::byte* bias = nullptr;
  const std::byte* second_bias = nullptr;
  std::byte* out = nullptr;
  std::int64_t bias_stride = 0, second_bias_stride = 0, out_stride = 0;
};

// The values of pairs on their way home.
struct ValueParams {
  LayerView view;
  RoutingTables routing;
  bool token_major = false;
  bool adds = false;      // those of all rows of a token; token-major
  bool finishes = false;  // no kernel of sums tells the node that this rank has read its memory
  DType dtype = DType::f32;
  std::int64_t max_tokens = 0;
  // This rank's n tokens.
  std::int64_t tokens = 0;
  std::byte* out = nullptr;
  std::int64_t out_stride = 0;  // bytes
};
// From where the ranks of this node have put them: those of others' tokens to
// RailLayout::staged_scale(), this rank's to `out`.
int launch_values(Part part, const ValueParams& params, int blocks, void* stream);

// The weights of a combine of its own, in f32.
struct WeightParams {
  LayerView view;
  DType dtype = DType::f32;
  std::int64_t max_tokens = 0, tokens = 0;
  const std::int32_t* rail_tokens = nullptr;  // [W] n of every rank
  const std::byte* weights = nullptr;         // [n, K] of this rank
  std::int64_t stride = 0;                    // bytes
  float* pairs = nullptr;                     // [NN, T, K] of the rail sources
};
// Behind the exchange, which has brought those of the other nodes.
int launch_weights(const WeightParams& params, int blocks, void* stream);

// Pushes this rank's rows. The sums of what others push are launched behind it and run beside it.
int launch_push_rows(Part part, const CudaSumParams& params, int blocks, void* stream);
// The sums: of others' tokens rounded, to RailLayout::staged_row(); of this rank's to `out`. When
// the latter end no rank of the node reads this rank's rows any more.
int launch_sums(Part part, const CudaSumParams& params, int blocks, void* stream);
// Loads the kernels onto the current GPU.
int load_push_rows();
int load_values();
int load_sums();

}  // namespace winnow::expert_parallel
