#include "winnow/expert_parallel/transport/said.h"

namespace winnow::expert_parallel {

void refuse_said(const Speaker& by, std::string_view what, std::int64_t least, std::int64_t most,
                 std::int64_t got) {
  throw Error(ErrorCode::internal, std::string(by.operation),
              std::string(by.phase) + (by.rank < 0 ? "" : " of rank " + std::to_string(by.rank)) +
                  ": " + std::string(what) + ": want " + std::to_string(least) + " to " +
                  std::to_string(most) + ", got " + std::to_string(got) +
                  ": something else has written to the memory that the ranks share");
}

}  // namespace winnow::expert_parallel
