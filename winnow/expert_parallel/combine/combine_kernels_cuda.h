// The sums of combine on a GPU: what the kernels are given, and their launches, each a
// cudaError_t. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/routing/tables.h"

namespace winnow::expert_parallel {

// What the waits of combine wait for.
inline constexpr Phase kExpertRowsPhase{2};  // the exchange of headers
inline constexpr Phase kSumsPhase{5};        // a chunk that another node sends over the rail
inline constexpr Phase kPushedSumsPhase{6};  // sums that a rank of this node pushes
inline constexpr Phase kPushedRowsPhase{7};  // rows that a rank of this node pushes
inline constexpr Phase kEndOfSumsPhase{8};   // the node's ranks are done reading each other's rows

// Whose tokens a kernel works for.
enum Part {
  kOthers,  // those of the rail peers on other nodes, summed over this node and sent back; first
  kOwn,     // those of this rank, summed over all nodes; last
};

// How the rows of a node's other ranks reach the one that reduces their tokens.
enum class Travel {
  rows_are_read,    // the reducing rank reads them where they are
  rows_are_pushed,  // each rank writes its rows into the reducing rank's memory; token-major
  sums_are_pushed,  // each rank's sum of its rows of a token, rounded; expert-major
};

// All sums are f32, nested and rounded as RowSumParams (combine_row_sum.h) says.
struct CudaSumParams {
  LayerView view;
  DType dtype = DType::bf16;  // f32, f16 or bf16: of rows, sums, bias and out
  std::int64_t row_bytes = 0;
  RoutingTables routing;
  CudaWeights weights;           // null: not weighted
  bool weights_are_new = false;  // a kernel of this call writes them, and not dispatch
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
  bool adds = false;  // adds up the values of all rows of a token; token-major
  // The kernel of kOwn tells the node that this rank has read its memory, as no kernel of sums
  // does: there are no rows, or rows or sums are pushed.
  bool finishes = false;
  DType dtype = DType::f32;
  std::int64_t max_tokens = 0;
  // This rank's n tokens.
  std::int64_t tokens = 0;
  std::byte* out = nullptr;
  std::int64_t out_stride = 0;  // bytes
};
// Reads the values where the ranks of this node have put them (Header::values), and writes those of
// kOthers to RailLayout::staged_scale(), those of kOwn to `out`.
int launch_values(Part part, const ValueParams& params, int blocks, void* stream);

// Converts the weights that were given to combine() itself to f32.
struct WeightParams {
  LayerView view;
  DType dtype = DType::f32;
  std::int64_t max_tokens = 0, tokens = 0;
  const std::int32_t* rail_tokens = nullptr;  // [W] n of every rank
  const std::byte* weights = nullptr;         // [n, K] of this rank
  std::int64_t stride = 0;                    // bytes
  float* pairs = nullptr;                     // [NN, T, K] of the rail sources
};
// Launched after the exchange, which brings the weights of the other nodes.
int launch_weights(const WeightParams& params, int blocks, void* stream);

// Pushes this rank's rows. launch_sums() follows at once and runs at the same time: the two share
// the blocks of the layer.
int launch_push_rows(Part part, const CudaSumParams& params, int blocks, void* stream);
// Writes the sums of kOthers, rounded, to RailLayout::staged_row() and those of kOwn to `out`. When
// those of kOwn end, no rank of the node reads this rank's rows any more.
int launch_sums(Part part, const CudaSumParams& params, int blocks, void* stream);
// Loads the kernels onto the current GPU.
int load_push_rows();
int load_values();
int load_sums();

}  // namespace winnow::expert_parallel
