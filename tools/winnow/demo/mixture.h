// A mixture of experts over the document's rows: a router that picks the experts of a token, and
// the experts.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/winnow/demo/matrix.h"
#include "tools/winnow/demo/routing.h"

namespace winnow::demo {

// f32 additions give different bits in a different order, as long as they round. These do not:
// weights are multiples of kWeightUnit that add up to 1, experts' outputs are multiples of
// kOutputUnit and at most kMostOutput, so that every sum of their products is a multiple of
// kWeightUnit * kOutputUnit and at most 2^24 times that.
inline constexpr float kWeightUnit = 0x1p-8f;
inline constexpr float kOutputUnit = 0x1p-12f;
inline constexpr float kMostOutput = 16;
static_assert(kMostOutput / (kWeightUnit * kOutputUnit) <= 0x1p24f);

class Mixture {
 public:
  Mixture(int experts, std::int64_t width);

  int experts() const { return int(experts_.size()); }
  Routing route(const MatrixRef& tokens) const;
  // The feed-forward network of one expert, relu(rows * up) * down, rounded to kOutputUnit.
  Matrix apply(int expert, const MatrixRef& rows) const;
  // The same of one row by the plain formula, not rounded.
  std::vector<double> apply_plain(int expert, const float* row) const;

 private:
  struct Expert {
    Matrix up;    // [width, hidden]
    Matrix down;  // [hidden, width]
  };
  Matrix router_;  // [width, experts]
  std::vector<Expert> experts_;
};

}  // namespace winnow::demo
