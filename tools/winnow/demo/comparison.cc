#include "tools/winnow/demo/comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "tools/winnow/demo/plain_attention.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

// Row `row` of a tensor, as one list.
std::span<const float> row_of(const Tensor& tensor, std::int64_t row) {
  const std::span<const float> values = tensor.values<float>();
  const std::size_t length = values.size() / static_cast<std::size_t>(tensor.size(0));
  return values.subspan(static_cast<std::size_t>(row) * length, length);
}

// The rows of the layer; plain_result puts a query beside them.
PlainInputs plain_inputs(const Layer& layer) {
  PlainInputs inputs;
  inputs.kv = to_double(layer.kv().values<float>());
  inputs.heads = kHeads;
  inputs.width = kRowDim;
  inputs.value_width = sparse_mla::kValueDim;
  return inputs;
}

PlainResult plain_result(const Layer& layer, const Selection& selection, std::int64_t row,
                         PlainInputs& inputs) {
  const std::int64_t position = selection.positions[row];
  inputs.q = to_double(row_of(layer.q(), position));
  return plain_attention(inputs, 0, position, selection.row(row));
}

std::string against_plain(std::span<const std::int64_t> sample) {
  return format_text(" of %zu queries against the plain formula", sample.size());
}

}  // namespace

double larger(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  return std::max(a, b);
}

double largest_difference(std::span<const float> got, std::span<const double> wanted) {
  double largest = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    largest = larger(largest, std::fabs(double(got[i]) - wanted[i]));
  }
  return largest;
}

double largest_magnitude(std::span<const double> values) {
  double largest = 0;
  for (const double value : values) largest = larger(largest, std::fabs(value));
  return largest;
}

void check_output_against_plain(const Layer& layer, const Selection& selection,
                                const LayerOutput& output, std::span<const std::int64_t> sample,
                                StepReport& report) {
  PlainInputs inputs = plain_inputs(layer);
  double out_error = 0, lse_error = 0;
  for (const std::int64_t row : sample) {
    const PlainResult plain = plain_result(layer, selection, row, inputs);
    out_error = larger(out_error, largest_difference(row_of(output.out, row), plain.out) /
                                      largest_magnitude(plain.out));
    lse_error = larger(lse_error, largest_difference(row_of(output.lse, row), plain.lse));
  }
  const Tolerances& limits = tolerances(layer.placement().dtype);
  report.at_most("out" + against_plain(sample), out_error, limits.out);
  report.at_most("lse" + against_plain(sample), lse_error, limits.lse);
}

void check_weights_against_plain(const Layer& layer, const Selection& selection,
                                 const Tensor& attn_sum, std::span<const std::int64_t> sample,
                                 StepReport& report) {
  PlainInputs inputs = plain_inputs(layer);
  double error = 0;
  for (const std::int64_t row : sample) {
    const PlainResult plain = plain_result(layer, selection, row, inputs);
    error = larger(error, largest_difference(row_of(attn_sum, row), plain.weights) /
                              largest_magnitude(plain.weights));
  }
  report.at_most("weights" + against_plain(sample), error,
                 tolerances(layer.placement().dtype).weights);
}

void check_row_sums(const Tensor& attn_sum, StepReport& report) {
  double worst = 0;
  for (std::int64_t row = 0; row < attn_sum.size(0); ++row) {
    double sum = 0;
    for (const float value : row_of(attn_sum, row)) sum += double(value);
    worst = larger(worst, std::fabs(sum / double(kHeads) - 1.0));
  }
  report.at_most(format_text("each of %lld rows adds up to the %d heads; relative error",
                             static_cast<long long>(attn_sum.size(0)), int(kHeads)),
                 worst, kRowSumTolerance);
}

bool all_finite(const Tensor& tensor) {
  const std::span<const float> values = tensor.values<float>();
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

std::vector<std::int64_t> spread_rows(std::int64_t rows, std::int64_t count) {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 1; i <= count; ++i) result.push_back(i * rows / count - 1);
  return result;
}

}  // namespace winnow::demo
