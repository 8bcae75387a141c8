// The formula of the compressor's rows, in double precision. It shares no code with any backend.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/testing/compare.h"

namespace winnow::compressor::oracle {

using Vector = std::vector<double>;
// A row-major matrix.
struct Matrix {
  Vector values;
  std::int64_t columns = 0;
  double& at(std::int64_t row, std::int64_t column) {
    return values[static_cast<std::size_t>(row * columns + column)];
  }
  double at(std::int64_t row, std::int64_t column) const {
    return values[static_cast<std::size_t>(row * columns + column)];
  }
};
inline Matrix matrix(const ConstTensorView& view) {
  return {winnow::testing::read(view), view.size(1)};
}
inline Matrix zeros(std::int64_t rows, std::int64_t columns) {
  return {Vector(static_cast<std::size_t>(rows * columns), 0.0), columns};
}

// One term of the softmax of a column: its token, the row of position_bias, the column of kv and
// gate, and the values there. The gate includes the bias.
struct Term {
  std::int64_t token, place, column;
  double kv, gate;
};

struct Inputs {
  Matrix kv, gate, bias, cos, sin;
  Vector norm_weight, cu_seqlens, first_position;
  std::int64_t ratio, d;
  double eps;
  bool overlap, hadamard;
};
template <class Args>
Inputs inputs_of(const Args& args) {
  Inputs in{matrix(args.kv),
            matrix(args.gate),
            matrix(args.position_bias),
            {},
            {},
            {},
            winnow::testing::read(args.cu_seqlens),
            {},
            args.position_bias.size(0),
            args.kv.size(1) / (args.overlap ? 2 : 1),
            args.eps.value_or(1e-6),
            args.overlap,
            args.hadamard};
  if (args.cos.present()) in.cos = matrix(args.cos), in.sin = matrix(args.sin);
  if (args.norm_weight.present()) in.norm_weight = winnow::testing::read(args.norm_weight);
  if (args.first_position.present()) in.first_position = winnow::testing::read(args.first_position);
  return in;
}

// The terms of column c in window w of the sequence whose first token is `begin`.
inline std::vector<Term> terms(const Inputs& in, std::int64_t begin, std::int64_t w,
                               std::int64_t c) {
  std::vector<Term> list;
  for (std::int64_t back = in.overlap && w > 0 ? 1 : 0; back >= 0; --back) {
    for (std::int64_t j = 0; j < in.ratio; ++j) {
      const std::int64_t token = begin + (w - back) * in.ratio + j;
      const std::int64_t column = in.overlap && back == 0 ? in.d + c : c;
      list.push_back({token, j, column, in.kv.at(token, column),
                      in.gate.at(token, column) + in.bias.at(j, column)});
    }
  }
  return list;
}

inline Vector softmax(const std::vector<Term>& terms) {
  double largest = -std::numeric_limits<double>::infinity(), total = 0;
  for (const Term& term : terms) largest = std::max(largest, term.gate);
  Vector weights;
  for (const Term& term : terms) weights.push_back(std::exp(term.gate - largest));
  for (const double weight : weights) total += weight;
  for (double& weight : weights) weight /= total;
  return weights;
}

// Entry (i, j) of the normalised Hadamard matrix; the parity of i & j is its sign.
inline double hadamard(std::int64_t i, std::int64_t j, std::int64_t d) {
  const bool odd = std::popcount(static_cast<std::uint64_t>(i & j)) % 2 != 0;
  return (odd ? -1 : 1) / std::sqrt(double(d));
}

inline double inverse_norm(const Inputs& in, const Vector& sum) {
  double squares = 0;
  for (const double value : sum) squares += value * value;
  return 1 / std::sqrt(squares / double(in.d) + in.eps);
}

// The matrix of the rotation and the Hadamard transform, which follow the norm.
inline Matrix turning(const Inputs& in, std::int64_t position) {
  Matrix turn = zeros(in.d, in.d);
  for (std::int64_t c = 0; c < in.d; ++c) turn.at(c, c) = 1;
  for (std::int64_t k = 0; k < in.cos.columns; ++k) {
    const std::int64_t a = in.d - 2 * in.cos.columns + 2 * k, b = a + 1;
    turn.at(a, a) = turn.at(b, b) = in.cos.at(position, k);
    turn.at(a, b) = -in.sin.at(position, k);
    turn.at(b, a) = in.sin.at(position, k);
  }
  if (!in.hadamard) return turn;
  Matrix product = zeros(in.d, in.d);
  for (std::int64_t i = 0; i < in.d; ++i) {
    for (std::int64_t j = 0; j < in.d; ++j) {
      for (std::int64_t k = 0; k < in.d; ++k) {
        product.at(i, j) += hadamard(i, k, in.d) * turn.at(k, j);
      }
    }
  }
  return product;
}

inline Vector sum_of(const Inputs& in, std::int64_t begin, std::int64_t w) {
  Vector sum;
  for (std::int64_t c = 0; c < in.d; ++c) {
    const std::vector<Term> list = terms(in, begin, w, c);
    const Vector weights = softmax(list);
    double value = 0;
    for (std::size_t j = 0; j < list.size(); ++j) value += weights[j] * list[j].kv;
    sum.push_back(value);
  }
  return sum;
}

inline Vector row_of(const Inputs& in, std::int64_t begin, std::int64_t w, std::int64_t position) {
  Vector sum = sum_of(in, begin, w);
  if (!in.norm_weight.empty()) {
    const double inverse = inverse_norm(in, sum);
    for (std::size_t c = 0; c < sum.size(); ++c) sum[c] *= inverse * in.norm_weight[c];
  }
  if (in.cos.columns == 0 && !in.hadamard) return sum;
  const Matrix turn = turning(in, position);
  Vector row(sum.size(), 0.0);
  for (std::int64_t i = 0; i < in.d; ++i) {
    for (std::int64_t j = 0; j < in.d; ++j) {
      if (turn.at(i, j) != 0) row[i] += turn.at(i, j) * sum[j];
    }
  }
  return row;
}

// Calls visit(first token of the sequence, window, position of the window) for every row, in order.
template <class Visit>
void each_row(const Inputs& in, const Visit& visit) {
  for (std::size_t i = 0; i + 1 < in.cu_seqlens.size(); ++i) {
    const auto begin = static_cast<std::int64_t>(in.cu_seqlens[i]);
    const auto end = static_cast<std::int64_t>(in.cu_seqlens[i + 1]);
    const std::int64_t first =
        in.first_position.empty() ? 0 : static_cast<std::int64_t>(in.first_position[i]);
    for (std::int64_t w = 0; begin + (w + 1) * in.ratio <= end; ++w) {
      visit(begin, w, first + w * in.ratio);
    }
  }
}

}  // namespace winnow::compressor::oracle
