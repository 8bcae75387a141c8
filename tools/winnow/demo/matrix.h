// Matrices, for the models of the demo. For .cc files and what they alone include: Eigen takes the
// compiler a second.
#pragma once

#include <Eigen/Core>

#include "winnow/core/tensor.h"

namespace winnow::demo {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixRef = Eigen::Ref<const Matrix>;

// The latent rows [tokens, 1, width] as a matrix [tokens, width].
inline Eigen::Map<const Matrix> rows_of(const Tensor& kv) {
  return {kv.values<float>().data(), kv.size(0), kv.size(2)};
}

}  // namespace winnow::demo
