// Which layers push token-major rows.
#include "winnow/expert_parallel/memory/layouts.h"

#include <utility>

#include <gtest/gtest.h>

namespace winnow::expert_parallel {
namespace {

// Rows of 16 KiB, in a call of as many tokens as there may be, unless it has fewer.
bool pushes(Topology topology, std::int64_t max_tokens, int sm_count, bool local_combine = false,
            std::int64_t tokens = -1) {
  Config config;
  config.max_tokens = max_tokens;
  config.hidden = 8192;
  config.sm_count = sm_count;
  config.enable_local_combine = local_combine;
  return pushes_rows({.topology = topology, .experts = 72, .topk = 2}, config,
                     tokens < 0 ? max_tokens : tokens);
}

TEST(Layouts, SmsEnoughToPushAndToSum) {
  for (const bool local_combine : {false, true}) {
    for (const auto& [locals, least] : {std::pair{2, 24}, {3, 20}, {4, 20}, {8, 20}}) {
      for (const int nodes : {1, 2}) {
        const Topology topology(nodes * locals, locals);
        EXPECT_FALSE(pushes(topology, 2048, least - 1, local_combine));
        EXPECT_TRUE(pushes(topology, 2048, least, local_combine));
      }
    }
    EXPECT_FALSE(pushes(Topology(1, 1), 4096, 132, local_combine));
    EXPECT_FALSE(pushes(Topology(4, 1), 4096, 132, local_combine));
  }
}

TEST(Layouts, RowsEnoughToPush) {
  for (const auto& [locals, least] : {std::pair{2, 1536}, {3, 768}, {5, 384}}) {
    for (const int nodes : {1, 2}) {
      const Topology topology(nodes * locals, locals);
      EXPECT_FALSE(pushes(topology, least - 1, 24));
      EXPECT_TRUE(pushes(topology, least, 24));
      EXPECT_FALSE(pushes(topology, 4096, 24, false, least - 1));
      EXPECT_TRUE(pushes(topology, 4096, 24, false, least));
      EXPECT_TRUE(pushes(topology, 1, 24, true));
    }
  }
}

TEST(Layouts, AGibibyteAtMostUnasked) {
  const Topology topology(8, 4);
  EXPECT_TRUE(pushes(topology, 8192, 20));
  EXPECT_FALSE(pushes(topology, 8193, 20));
  EXPECT_TRUE(pushes(topology, 8193, 20, true));
}

}  // namespace
}  // namespace winnow::expert_parallel
