// What the tests of agreements ask for. Only for tests.
#pragma once

#include <string>
#include <vector>

#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/testing/test_ranks.h"

namespace winnow::expert_parallel {

inline AgreementRequest request_of(int rank, int world_size, const std::string& prefix = "test") {
  AgreementRequest request;
  request.operation = "meet";
  request.prefix = prefix;
  request.rank = rank;
  request.world_size = world_size;
  request.same = {{"hidden", "7168"}, {"topk", "8"}};
  request.own = {{"seat", std::to_string(10 * rank)}};
  return request;
}

// Waits until those ranks have announced themselves. If a rank shall give up, only that rank has a
// brief deadline, which begins after this wait: then a busy machine does not change the result.
inline void await_announced(Store& store, const std::vector<int>& ranks,
                            const std::string& prefix = "test") {
  for (const int rank : ranks) {
    store.get(prefix + "/announce/" + std::to_string(rank), generous());
  }
}

}  // namespace winnow::expert_parallel
