// How far the library's results are from the plain formulas.
#pragma once

#include <cstdint>
#include <span>

#include "tools/winnow/demo/layer.h"
#include "tools/winnow/demo/report.h"

namespace winnow::demo {

// For f32. The logits of the demo stay below 40; the last term of the specification's bounds, which
// grows with them, is included.
inline constexpr double kOutTolerance = 2e-5;       // relative to the largest |out| of a query
inline constexpr double kLseTolerance = 5e-5;       // absolute
inline constexpr double kWeightTolerance = 5e-4;    // relative to the largest weight of a query
inline constexpr double kRowSumTolerance = 1e-3;    // relative to the number of heads
inline constexpr double kGradientTolerance = 1e-4;  // relative to the largest of the derivatives

// The larger one; NaN if either is.
double larger(double a, double b);

// Each adds to the report how the results of the queries `sample`, as rows of the selection,
// compare with plain_attention.
void check_output_against_plain(const Layer& layer, const Selection& selection,
                                const LayerOutput& output, std::span<const std::int64_t> sample,
                                StepReport& report);
void check_weights_against_plain(const Layer& layer, const Selection& selection,
                                 const Tensor& attn_sum, std::span<const std::int64_t> sample,
                                 StepReport& report);

// Adds to the report: every row of attn_sum adds up to the number of heads.
void check_row_sums(const Tensor& attn_sum, StepReport& report);

bool all_finite(const Tensor& tensor);

// `count` rows spread evenly over [0, rows), the last among them.
std::vector<std::int64_t> spread_rows(std::int64_t rows, std::int64_t count);

}  // namespace winnow::demo
