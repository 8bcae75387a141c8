// The argument of forward() and decode() that says what the lse of nothing is. Internal.
#pragma once

#include <limits>

#include "winnow/core/contract.h"

namespace winnow::sparse_mla {

template <class Args>
consteval auto flash_mla_lse() {
  return contract::value<&Args::flash_mla_lse>(
      "the lse of a query with nothing visible is +inf, as in FlashMLA, instead of -inf");
}

// What backends store in the place of an lse of -inf.
template <class Args>
float lse_of_nothing(const Args& args) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return args.flash_mla_lse ? kInfinity : -kInfinity;
}

}  // namespace winnow::sparse_mla
