// The log of calls and their records where they cannot be written, and where something is in their
// place. `winnow replay` has tests of its own.
#include "winnow/core/record.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/in_child.h"
#include "winnow/testing/temporary_folder.h"

namespace winnow {
namespace {

namespace fs = std::filesystem;
using testing::in_child;
using testing::TemporaryFolder;

// The error of a call with the variable, or nothing. A process reads it at its first call.
std::optional<Error> call(const char* variable, const std::string& value) {
  setenv(variable, value.c_str(), 1);
  sparse_mla::TestProblem problem;
  try {
    sparse_mla::forward(sparse_mla::ForwardOp::args(problem));
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

std::string contents(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::size_t files(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), {}));
}

void limit_file_sizes(rlim_t bytes) {
  const rlimit limit{bytes, bytes};
  setrlimit(RLIMIT_FSIZE, &limit);
}

TEST(Record, ALimitOfFileSizesIsAnErrorAndLeavesNothing) {
  const TemporaryFolder folder;
  EXPECT_TRUE(in_child([&] {
    limit_file_sizes(4096);
    const std::optional<Error> error = call("WINNOW_RECORD", folder.path());
    return error && error->code() == ErrorCode::resource && error->argument() == "WINNOW_RECORD" &&
           files(folder.path()) == 0;
  }));
}

TEST(Record, WithoutRoomForTheResultsTheArgumentsRemain) {
  const TemporaryFolder folder, other;
  ASSERT_TRUE(in_child([&] { return !call("WINNOW_RECORD", other.path()); }));
  const std::string whole = contents(fs::directory_iterator(other.path())->path());
  const std::size_t arguments = whole.rfind("result cpu ");
  ASSERT_NE(arguments, std::string::npos);
  EXPECT_TRUE(in_child([&] {
    limit_file_sizes(arguments + 100);
    const std::optional<Error> error = call("WINNOW_RECORD", folder.path());
    return error && error->argument() == "WINNOW_RECORD";
  }));
  ASSERT_EQ(files(folder.path()), 1u);
  EXPECT_EQ(contents(fs::directory_iterator(folder.path())->path()), whole.substr(0, arguments));
}

// Tensors are the user's: nobody else reads them, whatever the umask allows.
TEST(Record, FilesAreTheUsersAlone) {
  const TemporaryFolder folder, log;
  const fs::path lines = fs::path(log.path()) / "log";
  ASSERT_TRUE(in_child([&] {
    umask(022);
    setenv("WINNOW_LOG", lines.c_str(), 1);
    return !call("WINNOW_RECORD", folder.path());
  }));
  constexpr fs::perms kOwn = fs::perms::owner_read | fs::perms::owner_write;
  EXPECT_EQ(fs::status(lines).permissions(), kOwn);
  ASSERT_EQ(files(folder.path()), 1u);
  EXPECT_EQ(fs::directory_iterator(folder.path())->status().permissions(), kOwn);
}

TEST(Record, OpensNothingThatIsThere) {
  const TemporaryFolder folder, victim;
  EXPECT_TRUE(in_child([&] {
    const fs::path name = folder.path() / (std::to_string(getpid()) + "-0000-sparse_mla.forward");
    fs::create_symlink(victim.path() / "file", name.string() + ".call");
    std::ofstream(name.string() + "-1.call") << "of another process";
    return !call("WINNOW_RECORD", folder.path()) &&
           contents(name.string() + "-1.call") == "of another process" &&
           contents(name.string() + "-2.call").starts_with("winnow call 1\n");
  }));
  EXPECT_EQ(files(victim.path()), 0u);
}

// A log that cannot be written stops no call and ends no process.
TEST(Log, APipeThatNobodyReadsEndsNothing) {
  EXPECT_TRUE(in_child([] {
    int ends[2];
    if (pipe(ends) != 0) return false;
    close(ends[0]);
    dup2(ends[1], STDERR_FILENO);
    return !call("WINNOW_LOG", "1");
  }));
}

TEST(Log, ALimitOfFileSizesEndsNothing) {
  const TemporaryFolder folder;
  EXPECT_TRUE(in_child([&] {
    limit_file_sizes(0);
    return !call("WINNOW_LOG", folder.path() / "log");
  }));
}

// A rank that cannot write its log says so before others wait for it in a call.
TEST(Log, AValueThatCannotBeIsFoundWhenALayerIsMade) {
  EXPECT_TRUE(in_child([] {
    setenv("WINNOW_LOG", "/nowhere/log", 1);
    expert_parallel::InProcessWorld world(1);
    try {
      expert_parallel::LowLatency(world.transport(0), world.store(),
                                  {.max_tokens = 1, .hidden = 8, .topk = 1, .experts = 1});
      return false;
    } catch (const Error& error) {
      return error.argument() == "WINNOW_LOG";
    }
  }));
}

// Whoever reads the log in a terminal sees lines, whatever text a call was given.
TEST(Log, ErrorsHaveNoControlCharacters) {
  EXPECT_EQ(in_one_line("a\nb\x1b[31mc\x7f"), "a b [31mc ");
  EXPECT_EQ(in_one_line("Größe"), "Größe");
}

}  // namespace
}  // namespace winnow
