// Rows that the caller chose. Internal.
#pragma once

#include "winnow/expert_parallel/dispatch/rows.h"

namespace winnow::expert_parallel {

// Fills routing.rows from the tables that the ranks were given, each [n, K] or [sum of n, K]. Two
// more exchanges: of the rows, and of what their check found. Throws alike on every rank, before a
// row has moved, unless every kept pair names a row of its expert's rank and no two name the same.
void scatter_rows(Layer& layer, const ConstTensorView& table, const RowWriter& writer,
                  Routing& routing);

}  // namespace winnow::expert_parallel
