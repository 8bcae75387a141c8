#include "tools/winnow/demo/plain_attention.h"

#include <cmath>
#include <limits>

namespace winnow::demo {

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

}  // namespace winnow::demo
