// Which experts the tokens go to.
#pragma once

#include "winnow/core/tensor.h"

namespace winnow::demo {

inline constexpr int kExpertTopk = 8;

struct Routing {
  Tensor experts;  // [tokens, kExpertTopk] i32, by falling score, none twice
  Tensor weights;  // [tokens, kExpertTopk] f32
};

}  // namespace winnow::demo
