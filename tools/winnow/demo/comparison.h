// How far the library's results are from the plain formulas.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/winnow/demo/layer.h"
#include "tools/winnow/demo/state.h"

namespace winnow::demo {

// The tolerances of an operation on one dtype. The logits of the demo stay below 40; the terms of
// the specification's bounds which grow with them are included.
struct Tolerances {
  double out;      // relative to the largest |out| of a query
  double lse;      // absolute
  double weights;  // relative to the largest weight of a query
};
inline constexpr Tolerances kF32Tolerances = {.out = 2e-5, .lse = 5e-5, .weights = 5e-4};
// 8 and 64 last places of a logit of 40 are 4e-5 and 3e-4.
inline constexpr Tolerances kBf16Tolerances = {
    .out = 1e-2, .lse = 1e-4 + 4e-5, .weights = 1e-3 + 3e-4};
constexpr const Tolerances& tolerances(DType dtype) {
  return dtype == DType::bf16 ? kBf16Tolerances : kF32Tolerances;
}
inline constexpr double kRowSumTolerance = 1e-3;    // relative to the number of heads; any dtype
inline constexpr double kGradientTolerance = 1e-4;  // f32; relative to the largest derivative

// The larger one; NaN if either is.
double larger(double a, double b);
// The largest difference of two elements; both lists have the same length.
double largest_difference(std::span<const float> got, std::span<const double> wanted);
double largest_magnitude(std::span<const double> values);

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

// The formulas of sparse MLA for one query, in double and as in a textbook. The demo measures the
// library against them, so they share nothing with it.
// Dense row-major inputs in double.
struct PlainInputs {
  std::vector<double> q;     // [s_q, heads, width]
  std::vector<double> kv;    // [s_kv, width]
  std::vector<double> sink;  // [heads], or empty
  std::int64_t heads = 0;
  std::int64_t width = 0;  // d_qk; the first value_width columns of a row are its value
  std::int64_t value_width = 0;
};

struct PlainResult {
  std::vector<double> out;      // [heads, value_width]
  std::vector<double> lse;      // [heads], without the sink
  std::vector<double> weights;  // per entry, summed over the heads, without the sink
};

// Attention of the query in row `query` of q, which stands at `position`, over the rows `entries`;
// entries below 0 or beyond `position` are not visible.
PlainResult plain_attention(const PlainInputs& inputs, std::int64_t query, std::int64_t position,
                            std::span<const std::int32_t> entries);

std::vector<double> to_double(std::span<const float> values);

bool all_finite(const Tensor& tensor);

inline constexpr std::int64_t kSample = 8;  // queries that are compared with a plain formula
// `count` rows spread evenly over [0, rows), the last among them.
std::vector<std::int64_t> spread_rows(std::int64_t rows, std::int64_t count);

}  // namespace winnow::demo
