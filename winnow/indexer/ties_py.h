// What the bindings of topk and topk_paged share.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "winnow/core/error.h"
#include "winnow/indexer/topk/topk.h"
#include "winnow/python/operation.h"

namespace winnow::python {

template <>
struct Choices<indexer::Ties> {
  static constexpr std::pair<std::string_view, indexer::Ties> kAll[] = {
      {"smaller", indexer::Ties::smaller}, {"larger", indexer::Ties::larger}};
};

// The number of rows to choose, which C++ takes from the shape of the outputs: checked before they
// are allocated.
template <const auto& kDeclaration>
std::int64_t topk_argument(const Arguments<kDeclaration>& given) {
  const auto topk = given.template get<"topk", std::int64_t>();
  if (topk >= 1 && topk <= std::numeric_limits<std::int32_t>::max()) return topk;
  throw Error(ErrorCode::invalid_argument, kDeclaration.operation, "topk", "1 to 2^31 - 1",
              std::to_string(topk));
}

}  // namespace winnow::python
