// `winnow launch` as a user meets it: what the ranks get, how failures end, and what is left.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "winnow/testing/temporary_folder.h"

namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

struct Result {
  int exit_code = -1;
  std::string output;  // standard output and standard error together
};

int count(const std::string& text, const std::string& part) {
  int number = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) {
    ++number;
  }
  return number;
}

// The program runs with a TMPDIR of its own, so that everything that it leaves is seen.
class Launch : public testing::Test {
 protected:
  void SetUp() override { fs::create_directory(folder_.path() / "tmp"); }
  void TearDown() override { EXPECT_TRUE(fs::is_empty(folder_.path() / "tmp")); }

  // Starts the program; finish() waits for it.
  void start(const std::string& arguments) {
    const std::string command = "exec env TMPDIR=" + (folder_.path() / "tmp").string() +
                                " " WINNOW_PROGRAM " launch " + arguments + " > " + output() +
                                " 2>&1";
    fs::remove(output());
    pid_ = fork();
    if (pid_ == 0) {
      for (const int number : ignored_) signal(number, SIG_IGN);
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
  }
  Result finish() {
    int status = 0;
    waitpid(pid_, &status, 0);
    Result result;
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    result.output = text();
    return result;
  }
  Result run(const std::string& arguments) {
    start(arguments);
    return finish();
  }

  std::string output() const { return (folder_.path() / "output").string(); }
  std::string text() const {
    std::ifstream file(output());
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // Until the output has that many such parts.
  void await(const std::string& part, int times) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (count(text(), part) < times) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << text();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  winnow::testing::TemporaryFolder folder_;
  pid_t pid_ = -1;
  std::vector<int> ignored_;  // signals, as the program inherits them
};

const std::string kRank = WINNOW_LAUNCH_RANK;

bool becomes_gone(pid_t pid) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (kill(pid, 0) == 0) {
    // Ended, but its new parent is slow to take it.
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string stat;
    std::getline(file, stat);
    if (stat.find(") Z") != std::string::npos) return true;
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// All processes whose numbers stand behind `word` in the text.
bool become_gone(const std::string& text, const std::string& word, int times) {
  std::size_t at = 0;
  for (int n = 0; n < times; ++n) {
    at = text.find(word, at);
    if (at == std::string::npos) return false;
    at += word.size();
    if (!becomes_gone(std::atoi(text.c_str() + at))) return false;
  }
  return true;
}

TEST_F(Launch, RanksFormAWorld) {
  const Result result = run("-n 8 --nodes 2 -- " + kRank + " --its-option");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  for (const char* line : {"rank 0 of 8 on node 0\n", "rank 3 of 8 on node 0\n",
                           "rank 4 of 8 on node 1\n", "rank 7 of 8 on node 1\n"}) {
    EXPECT_THAT(result.output, HasSubstr(line));
  }
  EXPECT_EQ(count(result.output, "\n"), 8) << result.output;
}

TEST_F(Launch, GivesTheVariablesAndArguments) {
  const Result result = run(
      "-n 2 --timeout 0.5 -- sh -c 'echo \"<$WINNOW_RANK $WINNOW_WORLD_SIZE "
      "$WINNOW_LOCAL_WORLD_SIZE $WINNOW_LOCAL_RANK $WINNOW_TIMEOUT_SECONDS $1 $2 $3 $4>\"; test -d "
      "\"$WINNOW_RENDEZVOUS\" && ! read line' name -n 5 -- --help");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("<0 2 2 0 0.5 -n 5 -- --help>"),
                                   HasSubstr("<1 2 2 1 0.5 -n 5 -- --help>")));
}

TEST_F(Launch, OptionsOfTheCommandAreTheCommands) {
  const Result result = run("-n 1 echo -n 5 --timeout x --nodes");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, "5 --timeout x --nodes");
}

TEST_F(Launch, ReturnsTheCodeOfTheFirstRankThatFails) {
  const Result result = run("-n 3 --timeout 20 " + kRank + " exit 0");
  EXPECT_EQ(result.exit_code, 3) << result.output;
  EXPECT_EQ(count(result.output, "winnow launch: rank 0 ended with exit code 3\n"), 1);
  EXPECT_EQ(count(result.output, "winnow launch:"), 1) << result.output;
  // The others had the time to say what they saw, early, since the rank is gone.
  EXPECT_EQ(count(result.output, "for the world barrier of rank 0"), 2) << result.output;
}

TEST_F(Launch, NamesTheSignalThatKilledARank) {
  const Result result = run("-n 3 --timeout 20 " + kRank + " kill 2");
  EXPECT_EQ(result.exit_code, 128 + 9) << result.output;
  EXPECT_THAT(result.output, HasSubstr("winnow launch: rank 2 was killed by signal 9 (Killed)\n"));
  EXPECT_EQ(count(result.output, "for the world barrier of rank 2"), 2) << result.output;
}

// Also where the ranks that the kill has made fail are found ended at the same time.
TEST_F(Launch, AKilledRankIsTheFirstToFail) {
  const std::string go = (folder_.path() / "go").string();
  start("-n 2 -- sh -c 'echo rank $$.; until test -e " + go +
        "; do sleep 0.01; done; test $WINNOW_RANK = 1 && kill -9 $$; exit 5'");
  await("rank ", 2);
  kill(pid_, SIGSTOP);
  std::ofstream(go).put('1');
  EXPECT_TRUE(become_gone(text(), "rank ", 2)) << text();
  kill(pid_, SIGCONT);
  EXPECT_EQ(finish().exit_code, 128 + 9);
}

// The others report the stopped rank; nobody waits for it for ever.
TEST_F(Launch, EndsAStoppedRank) {
  const Result result = run("-n 3 --timeout 2 " + kRank + " stop 1");
  EXPECT_EQ(result.exit_code, 5) << result.output;
  EXPECT_EQ(count(result.output, "for the world barrier of rank 1"), 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr(", stopped"));
  EXPECT_THAT(result.output, HasSubstr("winnow launch: rank 1 still ran 3.0 s later and is ended"));
}

TEST_F(Launch, ForwardsSignals) {
  for (const int number : {SIGTERM, SIGINT}) {
    start("-n 3 " + kRank + " sleep");
    await("rank ", 3);
    kill(pid_, number);
    const Result result = finish();
    EXPECT_EQ(result.exit_code, 128 + number) << result.output;
    EXPECT_THAT(result.output, HasSubstr("was killed by signal " + std::to_string(number)));
  }
}

// Under nohup, or from a program that ignores the ends of its children.
TEST_F(Launch, IgnoredSignalsStayIgnored) {
  ignored_ = {SIGHUP, SIGCHLD};
  start("-n 2 -- sh -c 'echo ready; sleep 0.5; exit 7'");
  await("ready", 2);
  kill(pid_, SIGHUP);
  EXPECT_EQ(finish().exit_code, 7);
}

TEST_F(Launch, ASecondSignalEndsRanksThatDoNotListen) {
  start(
      "-n 2 --timeout 60 -- sh -c 'trap \"echo asked\" TERM; echo ready; while :; do sleep 0.05; "
      "done'");
  await("ready", 2);
  kill(pid_, SIGTERM);
  await("asked", 2);
  kill(pid_, SIGTERM);
  EXPECT_EQ(finish().exit_code, 128 + 9);
}

TEST_F(Launch, EndsWhatTheRanksHaveStarted) {
  const Result result = run("-n 2 -- sh -c 'sleep 1000 & echo child $!. >&2; exit 0'");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(become_gone(result.output, "child ", 2)) << result.output;
}

TEST_F(Launch, RanksDieWithTheLauncher) {
  start("-n 2 -- sh -c 'echo rank $$.; exec sleep 1000'");
  await("rank ", 2);
  kill(pid_, SIGKILL);
  const Result result = finish();
  EXPECT_EQ(result.exit_code, -9);
  EXPECT_TRUE(become_gone(result.output, "rank ", 2)) << result.output;
  // What it left is removed by the next one, which leaves alone what is not a launcher's.
  EXPECT_FALSE(fs::is_empty(folder_.path() / "tmp"));
  fs::create_directory(folder_.path() / "tmp" / "winnow-launch-notes");
  EXPECT_EQ(run("-n 1 true").exit_code, 0);
  EXPECT_TRUE(fs::remove(folder_.path() / "tmp" / "winnow-launch-notes"));
}

TEST_F(Launch, LaunchersDoNotDisturbEachOther) {
  const Result result = run("-n 2 -- " WINNOW_PROGRAM " launch -n 2 " + kRank);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(count(result.output, "rank 1 of 2 on node 0\n"), 2) << result.output;
}

TEST_F(Launch, ACommandThatIsNotThereIsSaidOnce) {
  Result result = run("-n 4 no-such-program --option");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.output,
            "winnow: launch: COMMAND: want a program that can be run, got \"no-such-program\": No "
            "such file or directory\n");
  result = run("-n 1 /etc/passwd");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.output,
            "winnow: launch: COMMAND: want a program that can be run, got \"/etc/passwd\": "
            "Permission denied\n");
}

TEST_F(Launch, AFolderForTemporaryFilesThatIsNotThereIsNamed) {
  fs::remove(folder_.path() / "tmp");
  const Result result = run("-n 1 true");
  fs::create_directory(folder_.path() / "tmp");
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_EQ(result.output, "winnow: launch: TMPDIR names no folder: No such file or directory\n");
}

TEST_F(Launch, UsageErrorsHelp) {
  const auto expect_refused = [&](const std::string& arguments, const std::string& reason) {
    const Result result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.output, HasSubstr(reason)) << arguments;
  };
  expect_refused("true", "--ranks is required");
  expect_refused("-n 0 true", "--ranks: Value 0 not in range 1 to 4096");
  expect_refused("-n two true", "two");
  expect_refused("-n 4", "COMMAND: want a program and its arguments, got nothing; for example");
  expect_refused("-n 4 --", "COMMAND: want a program and its arguments, got nothing; for example");
  expect_refused("-n 4 --nodes 3 true", "--nodes: want a divisor of -n 4, got 3");
  expect_refused("-n 4 --wrong 3 true", "--wrong");
  for (const char* seconds : {"0", "-1", "nan", "inf", "1e30"}) {
    expect_refused("-n 1 --timeout " + std::string(seconds) + " true",
                   "--timeout: want seconds above 0, at most a year");
  }
  const Result help = run("--help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.output, AllOf(HasSubstr("winnow launch -n RANKS"), HasSubstr("WINNOW_RANK"),
                                 HasSubstr("Examples:")));
}

}  // namespace
