// The score of the lightning indexer in double precision. It shares no code with any backend, and
// the tests of topk and scores judge by it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/dot.h"

namespace winnow::indexer::oracle {

// The inputs, on the host, as an operation gets them.
struct Inputs {
  ConstTensorView q{}, k{}, weights{};
  ConstTensorView k_scale{}, key_start{}, key_end{};  // may be absent
  std::optional<std::int64_t> q_start{};
  std::int64_t k_stride = 1;
};

inline bool visible(const Inputs& in, std::int64_t i, std::int64_t t) {
  if (t < 0 || t >= in.k.size(0)) return false;
  if (in.key_start.present() && t < in.key_start.at<std::int32_t>(i)) return false;
  if (in.key_end.present() && t >= in.key_end.at<std::int32_t>(i)) return false;
  if (!in.q_start.has_value()) return true;
  const __int128 last_token = static_cast<__int128>(t + 1) * in.k_stride - 1;
  return last_token <= static_cast<__int128>(*in.q_start) + i;
}

// The score of a row, and the sum of the magnitudes that went into it, to which errors are
// relative. A row that query i does not see has the score -inf.
struct Score {
  double value = -std::numeric_limits<double>::infinity();
  double magnitude = 0;
};

// The scores of query i for the rows, of which any may be outside of the keys.
inline std::vector<Score> scores(const Inputs& in, std::int64_t i,
                                 const std::vector<std::int64_t>& rows) {
  const std::int64_t heads = in.q.size(1), d = in.q.size(2);
  const std::vector<double> q = winnow::testing::read(in.q.slice(0, i, i + 1));
  const auto magnitudes = [](std::vector<double> values) {
    for (double& value : values) value = std::abs(value);
    return values;
  };
  const std::vector<double> q_magnitudes = magnitudes(q);
  const std::vector<double> weights = winnow::testing::read(in.weights.slice(0, i, i + 1));
  std::vector<Score> result(rows.size());
  for (std::size_t n = 0; n < rows.size(); ++n) {
    const std::int64_t t = rows[n];
    if (!visible(in, i, t)) continue;
    const std::vector<double> k = winnow::testing::read(in.k.slice(0, t, t + 1));
    const std::vector<double> k_magnitudes = magnitudes(k);
    Score& score = result[n];
    score.value = 0;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto row = [&](const std::vector<double>& of) {
        return std::span(of).subspan(h * d, d);
      };
      const double dot = winnow::testing::dot(row(q), k, d);
      const double magnitude = winnow::testing::dot(row(q_magnitudes), k_magnitudes, d);
      score.value += weights[h] * (dot <= 0 ? 0 : dot);
      score.magnitude += std::abs(weights[h]) * magnitude;
    }
    if (in.k_scale.present()) {
      score.value *= double(in.k_scale.at<float>(t));
      score.magnitude *= std::abs(double(in.k_scale.at<float>(t)));
    }
  }
  return result;
}

}  // namespace winnow::indexer::oracle
