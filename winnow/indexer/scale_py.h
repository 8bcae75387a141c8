// What the bindings of topk, scores and backward share.
#pragma once

#include "winnow/python/operation.h"

namespace winnow::python {

// Gives the call that winnow.supports() asks about its k_scale, which only float8 keys have.
constexpr auto scale_for_supports = [](Shape& shape, auto& args) {
  if (shape.dtype == DType::f8_e4m3) args.k_scale = shape.view(DType::f32, {shape.size("s_k")});
};

}  // namespace winnow::python
