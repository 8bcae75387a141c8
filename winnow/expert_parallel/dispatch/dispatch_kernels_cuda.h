// The kernels of dispatch on a GPU: what they are given, and their launches. Each launch function
// returns a cudaError_t. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/routing/tables.h"

namespace winnow::expert_parallel {

// What its waits wait for: the counts of a rank; a chunk of the rail; the end.
inline constexpr Phase kCountsPhase{1}, kTokensPhase{3}, kRowsPhase{4};

// A rank's own pairs as they travel to its rail peers: indices [n, K], for a new routing ordinals
// [n, K], weights [n, K]. The ordinal of a pair says how many pairs of its expert come before it at
// this rank (expert-major), or how many tokens with a row on its expert's rank (token-major).
struct PairTable {
  static WINNOW_HOST_DEVICE constexpr std::int64_t ordinals(std::int64_t pairs) {
    return 4 * pairs;
  }
  static WINNOW_HOST_DEVICE constexpr std::int64_t weights(std::int64_t pairs) { return 8 * pairs; }
};

// Counts this rank's pairs and fills its table, before the exchange.
struct CountParams {
  LayerView view;
  bool token_major = false;
  std::int64_t tokens = 0;        // n
  const void* indices = nullptr;  // [n, K] i32, or i64 if wide; rows index_stride elements apart
  std::int64_t index_stride = 0;
  bool wide = false;
  const std::byte* weights = nullptr;  // [n, K], rows weight_stride bytes apart; null: not wanted
  std::int64_t weight_stride = 0;
  int weight_bytes = 0;             // of one
  std::int32_t* counts = nullptr;   // [E + W] and Findings: what the exchange posts
  std::byte* table = nullptr;       // see PairTable
  std::byte* scratch = nullptr;     // count_scratch_bytes()
  std::uint32_t* placed = nullptr;  // set to 0
};
std::int64_t count_scratch_bytes(const CudaTopology& topology, int blocks);
int launch_count(const CountParams& params, int blocks, void* stream);

// The words of the report: rows [W] i64, as the routing asks, then expert_counts, expert_offsets.
struct PlaceReport {
  static WINNOW_HOST_DEVICE constexpr int counts(int world) { return 2 * world; }
  static WINNOW_HOST_DEVICE constexpr int offsets(int world, int per_rank) {
    return 2 * world + per_rank;
  }
};

// Finds the rows of this rank's rail sources from what the exchange has received.
struct PlaceParams {
  LayerView view;
  bool token_major = false;
  bool reports = false;  // the host waits for the report
  std::int64_t expert_alignment = 1, worst_case_rows = 0, max_tokens = 0;
  const std::byte* table = nullptr;  // of this rank
  RoutingTables tables;              // those that do not depend on R are filled
  std::byte* scratch = nullptr;      // place_scratch_bytes()
};
std::int64_t place_scratch_bytes(const CudaTopology& topology, int blocks);
int launch_place(const PlaceParams& params, int blocks, void* stream);

// The caller's tables beside its rows, of a repeated routing; null: there is none. Those of a new
// one are copied behind move, so that the host, which has waited for the counts, makes but the rows
// before it.
struct TakenTables {
  std::byte* weights = nullptr;     // [R, K] of MoveParams::weight_dtype
  std::uint32_t* scales = nullptr;  // [R, scale_words]
  std::int32_t* ids = nullptr;      // [R, K]
};

// What move knows of the rows.
struct MoveParams {
  LayerView view;
  bool token_major = false;
  bool fresh = false;           // a new routing: its tables are made
  bool pads = false;            // expert_alignment is above 1
  bool weights_travel = false;  // every rank gives weights
  // Token-major on one node, with copy_out: a rank tells the others of the rows that it has sent,
  // which those with `out` take there.
  bool takes = false;
  bool shares_gpu = false;                // other ranks use this GPU, too
  std::int64_t max_tokens = 0, rows = 0;  // T; R of this rank
  RoutingTables tables;
  // This rank's tokens. Strides in bytes.
  std::int64_t tokens = 0;
  const std::byte* input = nullptr;
  const std::byte* scales = nullptr;  // null: none
  const std::byte* weights = nullptr;
  std::int64_t input_stride = 0, scale_stride = 0, weight_stride = 0;
  std::int64_t row_bytes = 0;
  int element_bytes = 0;
  int scale_words = 0;  // of a row
  DType weight_dtype = DType::f32;
  // Where the caller wants the rows of this rank, and what stands beside them: those of its own
  // tokens go straight there. Null: all stay in the region.
  std::byte* out = nullptr;
  std::int64_t out_stride = 0;
  TakenTables taken;
  // The tables of the regions of the ranks of this node; see RegionTables.
  NodePointers payload, row_weights, row_scales, ids, row_sources;
  // Of the descriptor, in f32, where there are weights.
  float* pair_weights = nullptr;     // [NN, T, K]
  float* weights_of_rows = nullptr;  // [R], expert-major; null: not wanted

  // Set by launch_move(). Blocks [0, senders) send rows to other ranks, and the blocks behind them
  // write those of this rank's own tokens, and take; as many as there are: each does all of it.
  int senders = 0;
  // Equal parts of this rank's tokens, after each of which the others are told: kSlices where rows
  // are repeated meanwhile, at most kMostSlices where they are taken, else 0.
  int slices = 0;
};
// Moves this rank's tokens and those of its rail to their rows in this node, clears the rows of
// this rank that no token has, repeats rows inside this rank, and ends when all of this rank's rows
// are there. A new routing: makes the tables of its rows.
int launch_move(MoveParams params, int blocks, void* stream);

// Loads all of these onto the current GPU.
int load_count();
int load_place();
int load_move();

}  // namespace winnow::expert_parallel
