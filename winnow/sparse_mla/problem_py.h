// What the bindings of forward, distribution and backward share.
#pragma once

#include <cstdint>

#include "winnow/python/operation.h"

namespace winnow::python {

// In the call that winnow.supports() asks about: a second source with a list, if s_extra is given.
constexpr auto extra_for_supports = [](Shape& shape, auto& args) {
  constexpr std::int64_t kAbsent = -1;
  const std::int64_t s_extra = shape.size("s_extra", kAbsent);
  if (s_extra == kAbsent) return;
  const std::int64_t s_q = args.q.size(0), d_qk = args.q.size(2);
  const std::int64_t topk = shape.size("extra_topk", 64);
  args.extra_kv = shape.view(shape.dtype, {s_extra, 1, d_qk});
  args.extra_indices = shape.view(DType::i32, {s_q, 1, topk});
  const DType sums = accumulator_of(shape.dtype);
  if constexpr (requires { args.extra_attn_sum; }) {
    args.extra_attn_sum = shape.view(sums, {s_q, topk});
  }
  if constexpr (requires { args.dextra_kv; }) {
    args.dextra_kv = shape.view(sums, {s_extra, 1, d_qk});
  }
};

}  // namespace winnow::python
