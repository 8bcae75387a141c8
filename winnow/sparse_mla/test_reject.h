// A refused call of a sparse MLA operation, for tests.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/expect.h"

namespace winnow::sparse_mla {

// The memory of a tensor as that of another.
inline TensorView viewed(Tensor& tensor, DType dtype, const std::vector<std::int64_t>& shape) {
  return {tensor.data(), dtype, shape};
}

// Bends the arguments, expects the refusal "<operation>: <text>" with all outputs untouched, from a
// dry run too, and that the same call works when nothing is bent.
template <class Op>
void refused(const std::string& text,
             const std::function<void(typename Op::Args&, TestProblem&)>& bend,
             const Sizes& sizes = {}) {
  TestProblem problem(sizes);
  const typename Op::Args good = Op::args(problem);
  typename Op::Args bent = good;
  bend(bent, problem);
  for (Tensor* output : Op::outputs(problem)) testing::fill_unwritten(*output);
  for (const bool dry_run : {false, true}) {
    testing::expect_error([&] { Op::run(bent, {.dry_run = dry_run}); }, ErrorCode::invalid_argument,
                          std::string(Op::kName) + ": " + text);
  }
  for (Tensor* output : Op::outputs(problem)) {
    EXPECT_EQ(testing::count_unwritten(output->view()), output->numel()) << text;
  }
  EXPECT_EQ(to_string(Op::run(good)), "cpu") << text;
}

}  // namespace winnow::sparse_mla
