// Where ranks stand, and how long waits last.
#include "winnow/expert_parallel/routing/topology.h"

#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "winnow/expert_parallel/transport/deadline.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using testing::expect_error;

TEST(Topology, EveryDivisorIsANodeSize) {
  for (int world = 1; world <= 24; ++world) {
    for (int local = 1; local <= world; ++local) {
      if (world % local != 0) {
        expect_error([&] { Topology(world, local); }, ErrorCode::invalid_argument,
                     "expert_parallel::Topology: local_world_size: want a divisor of world_size " +
                         std::to_string(world) + ", got " + std::to_string(local));
        continue;
      }
      const Topology topology(world, local);
      EXPECT_EQ(topology.nodes() * local, world);
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_LT(topology.node(rank), topology.nodes());
        EXPECT_LT(topology.local(rank), local);
        EXPECT_EQ(topology.rank(topology.node(rank), topology.local(rank)), rank);
        EXPECT_TRUE(topology.same_node(rank, topology.rank(topology.node(rank), 0)));
      }
    }
  }
  EXPECT_EQ(Topology(12, 4).rank(2, 1), 9);
  EXPECT_FALSE(Topology(12, 4).same_node(3, 4));
}

TEST(Topology, ZeroStandsForOneNode) { EXPECT_EQ(Topology(6, 0), Topology(6, 6)); }

TEST(Topology, SaysWhatIsWrong) {
  expect_error([] { Topology(0); }, ErrorCode::invalid_argument,
               "expert_parallel::Topology: world_size: want 1 or more, got 0");
  for (const int local : {-1, -4, 8}) {
    expect_error(
        [&] { Topology(4, local); }, ErrorCode::invalid_argument,
        "expert_parallel::Topology: local_world_size: want a divisor of world_size 4, got " +
            std::to_string(local));
  }
}

class DeadlineTest : public ::testing::Test {
 protected:
  void SetUp() override { unsetenv("WINNOW_TIMEOUT_SECONDS"); }
  void TearDown() override { unsetenv("WINNOW_TIMEOUT_SECONDS"); }
};

TEST_F(DeadlineTest, ComesFromTheArgumentOrTheEnvironment) {
  using std::chrono::milliseconds;
  EXPECT_EQ(Deadline().timeout(), std::chrono::seconds(30));
  setenv("WINNOW_TIMEOUT_SECONDS", "", 1);
  EXPECT_EQ(default_timeout(), std::chrono::seconds(30));
  setenv("WINNOW_TIMEOUT_SECONDS", "2.5", 1);
  EXPECT_EQ(default_timeout(), milliseconds(2500));
  EXPECT_EQ(Deadline().timeout(), milliseconds(2500));
  EXPECT_EQ(Deadline(milliseconds(40)).timeout(), milliseconds(40));
  expect_error([] { Deadline(milliseconds(-1)); }, ErrorCode::invalid_argument,
               "expert_parallel::Deadline: timeout: want above 0 and at most a year, or 0 for the "
               "default, got -0.001 s");
}

TEST_F(DeadlineTest, NonsenseInTheEnvironmentIsAnError) {
  for (const std::string text :
       {"0", "-1", "abc", "1s", " 1", "nan", "inf", "1e99", "1e-10", "0x10"}) {
    setenv("WINNOW_TIMEOUT_SECONDS", text.c_str(), 1);
    expect_error([] { Deadline(); }, ErrorCode::invalid_argument,
                 "expert_parallel::default_timeout: WINNOW_TIMEOUT_SECONDS: want a number of "
                 "seconds above 0 and at most a year, got \"" +
                     text + "\"");
  }
}

TEST_F(DeadlineTest, Ends) {
  const Deadline deadline(std::chrono::milliseconds(20));
  EXPECT_FALSE(Deadline(std::chrono::hours(1)).expired());
  while (!deadline.expired()) EXPECT_LE(deadline.remaining(), deadline.timeout());
  EXPECT_GE(deadline.elapsed(), deadline.timeout());
  EXPECT_EQ(deadline.remaining().count(), 0);
  EXPECT_TRUE(Deadline::now().expired());
}

TEST_F(DeadlineTest, SecondsAreReadable) {
  EXPECT_EQ(to_seconds(std::chrono::seconds(30)), "30.0 s");
  EXPECT_EQ(to_seconds(std::chrono::milliseconds(200)), "0.2 s");
  EXPECT_EQ(to_seconds(std::chrono::milliseconds(50)), "0.050 s");
}

}  // namespace
}  // namespace winnow::expert_parallel
