// Rows that the caller chose. Internal.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "winnow/expert_parallel/dispatch/dispatch_rows.h"

namespace winnow::expert_parallel {

// Fills routing.rows from the tables that the ranks were given, each [n, K] or [sum of n, K], in
// two more exchanges: of the rows, and of what their check found. Throws, alike on every rank and
// before a row has moved, unless every kept pair names a row of its expert's rank and no two the
// same row.
void scatter_rows(Layer& layer, const ConstTensorView& table, const RowWriter& writer,
                  Routing& routing);

// The error for a rank's pair number `pair`: "scatter_indices: want 6 to 9, got 12 for token 3, k
// 1".
Error bad_row(const std::string& wanted, std::string got, std::int64_t pair, int topk);
// Throws, alike on every rank, unless each rank's table has as many rows as that rank or all ranks
// have tokens. Both [W].
void check_table_sizes(std::span<const std::int32_t> tokens, std::span<const std::int64_t> rows);

}  // namespace winnow::expert_parallel
