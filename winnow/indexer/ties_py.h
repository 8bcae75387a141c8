// What the bindings of topk and topk_paged share.
#pragma once

#include <cstdint>
#include <string>

#include "winnow/core/error.h"
#include "winnow/indexer/topk/topk.h"

namespace winnow::python {

inline indexer::Ties ties_argument(const char* operation, const std::string& ties) {
  if (ties == "smaller") return indexer::Ties::smaller;
  if (ties == "larger") return indexer::Ties::larger;
  throw Error(ErrorCode::invalid_argument, operation, "ties", "smaller or larger", ties);
}

inline void check_topk(const char* operation, std::int64_t topk) {
  if (topk >= 1) return;
  throw Error(ErrorCode::invalid_argument, operation, "topk", "1 or more", std::to_string(topk));
}

}  // namespace winnow::python
