// Which rank this process is, from the variables of a launcher.
#include "winnow/expert_parallel/rendezvous/launch_environment.h"

#include <cstdlib>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

constexpr const char* kNames[] = {
    "WINNOW_RANK",       "WINNOW_WORLD_SIZE", "WINNOW_LOCAL_WORLD_SIZE",
    "WINNOW_LOCAL_RANK", "WINNOW_RENDEZVOUS", "RANK",
    "WORLD_SIZE",        "LOCAL_WORLD_SIZE",  "LOCAL_RANK"};

class LaunchEnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override { set({}); }
  void TearDown() override { set({}); }
  static void set(const std::map<std::string, std::string>& variables) {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  static void expect_refused(const std::map<std::string, std::string>& variables,
                             const std::string& text) {
    set(variables);
    testing::expect_error([] { launch_environment(); }, ErrorCode::invalid_argument,
                          "expert_parallel::launch_environment: " + text);
  }
};

TEST_F(LaunchEnvironmentTest, IsAbsentWithoutALauncher) {
  EXPECT_FALSE(launch_environment());
  set({{"RANK", "1"}, {"WORLD_SIZE", "4"}});  // somebody else's
  EXPECT_FALSE(launch_environment());
  set({{"WINNOW_RANK", ""}});
  EXPECT_FALSE(launch_environment());
}

TEST_F(LaunchEnvironmentTest, ReadsTheVariablesOfWinnow) {
  set({{"WINNOW_RANK", "5"},
       {"WINNOW_WORLD_SIZE", "6"},
       {"WINNOW_LOCAL_WORLD_SIZE", "3"},
       {"WINNOW_RENDEZVOUS", "/tmp/here"},
       {"RANK", "1"},
       {"WORLD_SIZE", "2"}});
  const auto environment = launch_environment();
  ASSERT_TRUE(environment);
  EXPECT_EQ(environment->rank, 5);
  EXPECT_EQ(environment->world_size, 6);
  EXPECT_EQ(environment->local_world_size, 3);
  EXPECT_EQ(environment->local_rank, 2);
  EXPECT_EQ(environment->rendezvous, "/tmp/here");
  set({{"WINNOW_RANK", "0"}, {"WINNOW_WORLD_SIZE", "6"}, {"WINNOW_RENDEZVOUS", "/tmp/here"}});
  EXPECT_EQ(launch_environment()->local_world_size, 6);
}

// Nodes that a launcher imitates on one machine share its GPUs.
TEST_F(LaunchEnvironmentTest, TheLocalRankIsThatOfTheMachine) {
  set({{"WINNOW_RANK", "5"},
       {"WINNOW_WORLD_SIZE", "6"},
       {"WINNOW_LOCAL_WORLD_SIZE", "3"},
       {"WINNOW_LOCAL_RANK", "5"},
       {"WINNOW_RENDEZVOUS", "/tmp/here"}});
  EXPECT_EQ(launch_environment()->local_rank, 5);
  setenv("WINNOW_LOCAL_RANK", "-1", 1);
  testing::expect_error([] { launch_environment(); }, ErrorCode::invalid_argument,
                        "expert_parallel::launch_environment: WINNOW_LOCAL_RANK: want a whole "
                        "number of 0 or more, got \"-1\"");
}

TEST_F(LaunchEnvironmentTest, ReadsThoseOfTorchrunBesideARendezvous) {
  set({{"RANK", "3"},
       {"WORLD_SIZE", "4"},
       {"LOCAL_WORLD_SIZE", "2"},
       {"LOCAL_RANK", "1"},
       {"WINNOW_RENDEZVOUS", "/tmp/here"}});
  const auto environment = launch_environment();
  ASSERT_TRUE(environment);
  EXPECT_EQ(environment->rank, 3);
  EXPECT_EQ(environment->world_size, 4);
  EXPECT_EQ(environment->local_world_size, 2);
  EXPECT_EQ(environment->local_rank, 1);
}

TEST_F(LaunchEnvironmentTest, HalfOfItIsAnError) {
  expect_refused({{"WINNOW_RANK", "0"}, {"WINNOW_WORLD_SIZE", "2"}},
                 "WINNOW_RENDEZVOUS: want a directory that all ranks reach, since WINNOW_RANK is "
                 "set, got nothing");
  expect_refused({{"WINNOW_WORLD_SIZE", "2"}, {"WINNOW_RENDEZVOUS", "/tmp"}, {"RANK", "0"}},
                 "WINNOW_RANK: want the rank of this process, since WINNOW_WORLD_SIZE is set, got "
                 "nothing");
  expect_refused({{"WINNOW_RANK", "1"}, {"WINNOW_RENDEZVOUS", "/tmp"}},
                 "WINNOW_WORLD_SIZE: want the number of ranks, since WINNOW_RANK is set, got "
                 "nothing");
  expect_refused({{"WINNOW_RENDEZVOUS", "/tmp"}, {"RANK", "0"}},
                 "WORLD_SIZE: want the number of ranks, since WINNOW_RENDEZVOUS is set, got "
                 "nothing");
}

TEST_F(LaunchEnvironmentTest, NonsenseIsAnError) {
  const auto with = [](const std::string& rank, const std::string& world,
                       const std::string& local) {
    return std::map<std::string, std::string>{{"WINNOW_RANK", rank},
                                              {"WINNOW_WORLD_SIZE", world},
                                              {"WINNOW_LOCAL_WORLD_SIZE", local},
                                              {"WINNOW_RENDEZVOUS", "/tmp"}};
  };
  for (const std::string world : {"0", "-2", "two", "4 ", "4.0", "99999999999"}) {
    expect_refused(with("0", world, "1"),
                   "WINNOW_WORLD_SIZE: want a whole number of 1 or more, got \"" + world + "\"");
  }
  for (const std::string rank : {"4", "-1", "x", "1e0"}) {
    expect_refused(with(rank, "4", "2"), "WINNOW_RANK: want in [0, 4), got \"" + rank + "\"");
  }
  for (const std::string local : {"3", "0", "8", "-1", "all"}) {
    expect_refused(
        with("0", "4", local),
        "WINNOW_LOCAL_WORLD_SIZE: want a divisor of WINNOW_WORLD_SIZE 4, got \"" + local + "\"");
  }
}

}  // namespace
}  // namespace winnow::expert_parallel
