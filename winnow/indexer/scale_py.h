// What the bindings of topk, scores and backward share.
#pragma once

#include "winnow/python/operation.h"

namespace winnow::python {

// Keys of float8 have scales; those of another dtype have none.
constexpr auto describe_scale = [](Shape& shape, auto& args) {
  if (shape.dtype == DType::f8_e4m3) args.k_scale = shape.view(DType::f32, {shape.size("s_k")});
};

}  // namespace winnow::python
