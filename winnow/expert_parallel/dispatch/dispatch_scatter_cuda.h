// Rows that the caller chose, on a GPU. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"

namespace winnow::expert_parallel {

// What the kernels below found wrong, in the words of the report.
struct ScatterFinding {
  std::int64_t bad = 0;                     // 1: there is something
  std::int64_t pair = 0;                    // t * K + k of that rank
  std::int64_t rank = 0;                    // whose pair it is
  std::int64_t expert_rank = 0, value = 0;  // translate: what was given; claim: the row there
};

struct ScatterParams {
  LayerView view;
  std::int64_t max_tokens = 0, tokens = 0;  // T, n
  const std::int32_t* given = nullptr;      // [n, K] of this rank, rows `stride` elements apart
  std::int64_t stride = 0;
  RoutingTables tables;
  std::int32_t* rows = nullptr;  // [n, K] of this rank's pairs at their experts' ranks
  NodePointers owners;  // [R] words of each rank of this node; all ones: nobody has the row
};
// Turns the numbers that were given into rows of the pairs' ranks.
int launch_translate(const ScatterParams& params, void* stream);
// Keeps the rows that are on this node and finds one that two pairs name.
int launch_claim(const ScatterParams& params, void* stream);
int load_scatter();

// Fills tables.rows from the table that this rank was given, as scatter_rows() (dispatch_scatter.h)
// does: two more exchanges, and throws alike on every rank. `table_rows` [W]: of the tables of all
// ranks.
void scatter_rows(CudaLayer& layer, const ConstTensorView& table, Stream stream,
                  ScatterParams params, std::span<const std::int64_t> wanted_rows,
                  std::span<const std::int32_t> tokens, std::span<const std::int64_t> table_rows);

}  // namespace winnow::expert_parallel
