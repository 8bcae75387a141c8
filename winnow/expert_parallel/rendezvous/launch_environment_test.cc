// Which rank this process is, from the variables of a launcher.
#include "winnow/expert_parallel/rendezvous/launch_environment.h"

#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

class LaunchEnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override { set({}); }
  void TearDown() override { set({}); }
  static void set(const std::map<std::string, std::string>& variables) {
    clearenv();
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

// What each launcher gives rank 3 of 4 on two nodes.
const std::map<std::string, std::string> kTorchrun = {{"RANK", "3"},
                                                      {"WORLD_SIZE", "4"},
                                                      {"LOCAL_WORLD_SIZE", "2"},
                                                      {"LOCAL_RANK", "1"},
                                                      {"TORCHELASTIC_RUN_ID", "torch"}};
const std::map<std::string, std::string> kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                                                     {"OMPI_COMM_WORLD_SIZE", "4"},
                                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                     {"PMIX_NAMESPACE", "prterun-host-7@1"}};
const std::map<std::string, std::string> kHydra = {
    {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "2"}, {"MPI_LOCALRANKID", "1"}};
const std::map<std::string, std::string> kSrun = {
    {"SLURM_PROCID", "3"},  {"SLURM_NTASKS", "4"},  {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
    {"SLURM_LOCALID", "1"}, {"SLURM_JOB_ID", "47"}, {"SLURM_STEP_ID", "11"}};

TEST_F(LaunchEnvironmentTest, ReadsThoseOfALauncherBesideARendezvous) {
  for (const auto& [job, launcher] : {std::pair("torch", kTorchrun),
                                      {"prterun-host-7@1", kOpenMpi},
                                      {"", kHydra},
                                      {"47.11", kSrun}}) {
    SCOPED_TRACE(job);
    set(launcher);
    EXPECT_EQ(job_id(), job);
    EXPECT_FALSE(launch_environment());
    setenv("WINNOW_RENDEZVOUS", "/tmp/here", 1);
    const auto environment = launch_environment();
    ASSERT_TRUE(environment);
    EXPECT_EQ(environment->rank, 3);
    EXPECT_EQ(environment->world_size, 4);
    EXPECT_EQ(environment->local_world_size, 2);
    EXPECT_EQ(environment->local_rank, 1);
    // As if on four nodes, which share the GPUs of this machine.
    setenv("WINNOW_LOCAL_WORLD_SIZE", "1", 1);
    EXPECT_EQ(launch_environment()->local_world_size, 1);
    EXPECT_EQ(launch_environment()->local_rank, 1);
  }
}

// torchrun or mpirun that srun has started, or that runs in the script of a job.
TEST_F(LaunchEnvironmentTest, TheInnerLauncherCounts) {
  for (const auto& inner : {kTorchrun, kOpenMpi, kHydra}) {
    auto both = kSrun;
    both["SLURM_PROCID"] = "0";
    both["WINNOW_RENDEZVOUS"] = "/tmp/here";
    both.insert(inner.begin(), inner.end());
    set(both);
    EXPECT_EQ(launch_environment()->rank, 3);
  }
}

TEST_F(LaunchEnvironmentTest, NodesOfSrunHaveEquallyManyRanks) {
  auto variables = kSrun;
  variables["WINNOW_RENDEZVOUS"] = "/tmp/here";
  variables["SLURM_STEP_TASKS_PER_NODE"] = "4";
  set(variables);
  EXPECT_EQ(launch_environment()->local_world_size, 4);
  for (const std::string text : {"1(x2),2", "2(x9)", "2(x2)x", "2(x", "3"}) {
    variables["SLURM_STEP_TASKS_PER_NODE"] = text;
    expect_refused(
        variables,
        "SLURM_STEP_TASKS_PER_NODE: want a divisor of SLURM_NTASKS 4, got \"" + text + "\"");
  }
}

// The PMI that srun has by default in many places says nothing of nodes.
TEST_F(LaunchEnvironmentTest, AnotherLauncherThatNumbersTheRanksAlikeSaysTheNode) {
  auto variables = kSrun;
  variables.insert({{"WINNOW_RENDEZVOUS", "/tmp/here"}, {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}});
  set(variables);
  EXPECT_EQ(launch_environment()->local_world_size, 2);
  EXPECT_EQ(launch_environment()->local_rank, 1);
  variables["SLURM_PROCID"] = "1";  // of the tasks that began mpirun
  set(variables);
  EXPECT_EQ(launch_environment()->local_world_size, 4);
  EXPECT_EQ(launch_environment()->local_rank, 3);
}

TEST_F(LaunchEnvironmentTest, AJobHasOneName) {
  const auto named = [](const std::map<std::string, std::string>& variables) {
    set(variables);
    return job_id();
  };
  EXPECT_EQ(named({}), "");
  EXPECT_EQ(named({{"WINNOW_JOB", "mine"}, {"TORCHELASTIC_RUN_ID", "torch"}}), "mine");
  // torchrun's name for jobs that were given none.
  EXPECT_EQ(named({{"TORCHELASTIC_RUN_ID", "none"}}), "");
  EXPECT_EQ(named({{"TORCHELASTIC_RUN_ID", "none"}, {"SLURM_JOB_ID", "47"}}), "47.");
  EXPECT_EQ(named({{"OMPI_MCA_ess_base_jobid", "2684420097"}}), "2684420097");
  // A job that is started again meets anew.
  EXPECT_EQ(named({{"TORCHELASTIC_RUN_ID", "x"}, {"TORCHELASTIC_RESTART_COUNT", "0"}}), "x");
  EXPECT_EQ(named({{"TORCHELASTIC_RUN_ID", "x"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}), "x.2");
  EXPECT_EQ(named({{"SLURM_JOB_ID", "47"}, {"SLURM_STEP_ID", "0"}, {"SLURM_RESTART_COUNT", "1"}}),
            "47.0.1");
  EXPECT_EQ(named({{"TORCHELASTIC_RESTART_COUNT", "2"}}), "");
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
