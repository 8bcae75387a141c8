// Ranks as processes: what they share, and what remains of it.
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "winnow/expert_parallel/transport/shared_memory/test_shared_memory.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

TEST_F(SharedMemory, ProcessesExchangeWords) {
  auto ranks = start(4, [](const std::shared_ptr<Transport>& transport) {
    if (transport->name() != "shared_memory") return std::string("another transport");
    Communicator communicator(transport, Topology(4, 2), generous());
    return exchange(communicator);
  });
  EXPECT_THAT(answers(ranks), Each("right"));
  EXPECT_EQ(keys_left(), 4);  // how many worlds each rank has begun
}

// They take the same folder and prefix by mistake, and have names.
TEST_F(SharedMemory, TwoJobsDoNotMeet) {
  std::vector<RankProcess> ranks;
  for (int caller = 0; caller < 5; ++caller) {
    ranks.emplace_back([this, caller] {
      const bool first = caller < 2;
      setenv("WINNOW_JOB", first ? "first/1" : "second", 1);
      const auto transport =
          create(first ? caller : caller - 2, first ? 2 : 3, Deadline(std::chrono::seconds(60)));
      return exchange_over(transport);
    });
  }
  EXPECT_THAT(answers(ranks), Each("right"));
}

TEST_F(SharedMemory, TwoWorldsAtOnce) {
  auto a = start(3, exchange_over, "a");
  auto b = start(2, exchange_over, "b");
  EXPECT_THAT(answers(a), Each("right"));
  EXPECT_THAT(answers(b), Each("right"));
}

TEST_F(SharedMemory, AnAbsentRankAtCreationIsNamed) {
  std::vector<RankProcess> ranks;
  for (const int rank : {0, 2}) {
    ranks.emplace_back([&, rank] {
      if (rank == 0) await_announced(2);
      return create(rank, 3, rank == 0 ? brief() : generous())->name();
    });
  }
  EXPECT_THAT(answers(ranks),
              Each("expert_parallel::shared_memory: rank 1 has not arrived within 0.3 s"));
}

TEST_F(SharedMemory, AnAbsentRankAtAnAllocationIsNamed) {
  auto ranks = start(3, [&](const std::shared_ptr<Transport>& transport) {
    if (transport->rank() == 1) {
      await("over");
      transport->allocate(8, generous(), "the arena");
    }
    const bool impatient = transport->rank() == 0;
    impatient ? await("arrives") : signal("arrives");
    const std::string error =
        error_of([&] { transport->allocate(8, impatient ? brief() : generous(), "the arena"); });
    signal("over");
    return error;
  });
  const std::string pid = std::to_string(ranks[1].pid());
  for (const std::string& text : answers(ranks)) {
    EXPECT_THAT(without_seconds(text),
                HasSubstr(" waited # s for rank 1 at the allocation of the arena: process " + pid +
                          ", running"));
  }
}

// Memory without a name counts as a file there.
TEST_F(SharedMemory, ALimitOfFileSizesIsAnErrorOnEveryRank) {
  std::vector<RankProcess> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const rlimit limit{1000, 1000};  // what ranks write into the store is smaller
      if (rank == 0) setrlimit(RLIMIT_FSIZE, &limit);
      FileStore store(folder_.path() / "rendezvous");
      create_shared_memory(store, rank, 2, generous());
      return std::string("made");
    });
  }
  EXPECT_THAT(answers(ranks), Each(::testing::MatchesRegex(
                                  "expert_parallel::shared_memory: rank 0: no [0-9]+ bytes "
                                  "of shared memory: File too large")));
}

// The child of a rank has the memory but is not the rank: it may neither use the transport nor, at
// its end, close it.
TEST_F(SharedMemory, AChildOfARankDisturbsNobody) {
  auto ranks = start(2, [&](const std::shared_ptr<Transport>& given) {
    std::shared_ptr<Transport> transport = given;
    std::string message = "nothing";
    if (transport->rank() == 0) {
      const auto* keep = &given;  // the only other owner
      RankProcess child([&, keep]() -> std::string {
        const std::string error = error_of([&] { transport->allocate(8, generous(), "x"); });
        transport.reset();
        const_cast<std::shared_ptr<Transport>*>(keep)->reset();
        return error;
      });
      message = child.wait();
      sleep_ms(100);  // rank 1 waits and looks whether this one is closed
    }
    transport->allocate(8, generous(), "y");
    return message;
  });
  const std::vector<std::string> texts = answers(ranks);
  EXPECT_THAT(texts[0], HasSubstr("used after fork() in the child: rank 0 is the parent"));
  EXPECT_EQ(texts[1], "nothing");
}

}  // namespace
}  // namespace winnow::expert_parallel
