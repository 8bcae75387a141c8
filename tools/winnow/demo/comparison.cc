#include "tools/winnow/demo/comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

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
  report.at_most(format_text("each of %ld rows adds up to the %ld heads; relative error",
                             attn_sum.size(0), kHeads),
                 worst, kRowSumTolerance);
}

PlainResult plain_attention(const PlainInputs& inputs, std::int64_t query, std::int64_t position,
                            std::span<const std::int32_t> entries) {
  PlainResult result;
  result.out.assign(static_cast<std::size_t>(inputs.heads * inputs.value_width), 0.0);
  result.weights.assign(entries.size(), 0.0);
  const double scale = 1.0 / std::sqrt(static_cast<double>(inputs.width));
  std::vector<double> logits(entries.size());
  for (std::int64_t h = 0; h < inputs.heads; ++h) {
    const double* q = inputs.q.data() + (query * inputs.heads + h) * inputs.width;
    double largest = -std::numeric_limits<double>::infinity();
    for (std::size_t j = 0; j < entries.size(); ++j) {
      if (entries[j] < 0 || entries[j] > position) continue;
      const double* row = inputs.kv.data() + entries[j] * inputs.width;
      double dot = 0;
      for (std::int64_t c = 0; c < inputs.width; ++c) dot += q[c] * row[c];
      logits[j] = scale * dot;
      largest = std::fmax(largest, logits[j]);
    }
    double sum = 0;
    for (std::size_t j = 0; j < entries.size(); ++j) {
      if (entries[j] >= 0 && entries[j] <= position) sum += std::exp(logits[j] - largest);
    }
    result.lse.push_back(largest + std::log(sum));
    const double sink_sum = inputs.sink.empty() ? 0.0 : std::exp(inputs.sink[h] - largest);
    for (std::size_t j = 0; j < entries.size(); ++j) {
      if (entries[j] < 0 || entries[j] > position) continue;
      const double weight = std::exp(logits[j] - largest);
      result.weights[j] += weight / sum;
      const double* row = inputs.kv.data() + entries[j] * inputs.width;
      double* out = result.out.data() + h * inputs.value_width;
      for (std::int64_t c = 0; c < inputs.value_width; ++c) {
        out[c] += weight / (sum + sink_sum) * row[c];
      }
    }
  }
  return result;
}

std::vector<double> to_double(std::span<const float> values) {
  return {values.begin(), values.end()};
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
