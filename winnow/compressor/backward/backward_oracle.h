// The formula of compressor::backward in double precision.
#pragma once

#include "winnow/compressor/backward/backward.h"
#include "winnow/compressor/compressor_oracle.h"

namespace winnow::compressor::oracle {

struct Gradients {
  Matrix kv, gate, bias;
  Vector norm_weight;
};

inline Gradients backward(const BackwardArgs& args) {
  const Inputs in = inputs_of(args);
  const Matrix d_rows = matrix(args.d_rows);
  const std::int64_t tokens = args.kv.size(0), columns = args.kv.size(1);
  Gradients out{zeros(tokens, columns), zeros(tokens, columns), zeros(in.ratio, columns),
                Vector(in.norm_weight.size(), 0.0)};
  std::int64_t row = 0;
  each_row(in, [&](std::int64_t begin, std::int64_t w, std::int64_t position) {
    const Vector sum = sum_of(in, begin, w);
    // Through the rotation and the transform, whose matrix is transposed.
    Vector normed(sum.size(), 0.0);
    if (in.cos.columns == 0 && !in.hadamard) {
      for (std::int64_t c = 0; c < in.d; ++c) normed[c] = d_rows.at(row, c);
    } else {
      const Matrix turn = turning(in, position);
      for (std::int64_t i = 0; i < in.d; ++i) {
        for (std::int64_t c = 0; c < in.d; ++c) {
          if (turn.at(i, c) != 0) normed[c] += turn.at(i, c) * d_rows.at(row, i);
        }
      }
    }
    // Through the norm: row[c] = sum[c] * inverse * weight[c].
    Vector of_sum = normed;
    if (!in.norm_weight.empty()) {
      const double inverse = inverse_norm(in, sum);
      double along = 0;
      for (std::int64_t c = 0; c < in.d; ++c) along += normed[c] * in.norm_weight[c] * sum[c];
      for (std::int64_t c = 0; c < in.d; ++c) {
        out.norm_weight[c] += normed[c] * sum[c] * inverse;
        of_sum[c] = normed[c] * in.norm_weight[c] * inverse -
                    sum[c] * along * inverse * inverse * inverse / double(in.d);
      }
    }
    for (std::int64_t c = 0; c < in.d; ++c) {
      const std::vector<Term> list = terms(in, begin, w, c);
      const Vector weights = softmax(list);
      for (std::size_t j = 0; j < list.size(); ++j) {
        const double of_kv = weights[j] * of_sum[c];
        const double of_gate = of_kv * (list[j].kv - sum[c]);
        out.kv.at(list[j].token, list[j].column) += of_kv;
        out.gate.at(list[j].token, list[j].column) += of_gate;
        out.bias.at(list[j].place, list[j].column) += of_gate;
      }
    }
    ++row;
  });
  return out;
}

}  // namespace winnow::compressor::oracle
