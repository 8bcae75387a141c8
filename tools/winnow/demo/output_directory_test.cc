#include "tools/winnow/demo/output_directory.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/testing/temporary_folder.h"

namespace winnow::demo {
namespace {

namespace fs = std::filesystem;

class OutputDirectory : public ::testing::Test {
 protected:
  static std::string content(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string directory() const { return (folder_.path() / "out").string(); }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(directory()), fs::directory_iterator()));
  }

  testing::TemporaryFolder folder_;
};

TEST_F(OutputDirectory, WritesAFileAndReplacesIt) {
  prepare_output_directory(directory());
  EXPECT_EQ(files(), 0u);
  EXPECT_EQ(write_file(directory(), "a.svg", "first"), directory() + "/a.svg");
  write_file(directory(), "a.svg", "second");
  EXPECT_EQ(content(directory() + "/a.svg"), "second");
  EXPECT_EQ(files(), 1u);
}

// Somebody else may write to the directory and plants links to a file of the user.
TEST_F(OutputDirectory, PlantedLinksAreNotFollowed) {
  const fs::path victim = folder_.path() / "victim";
  std::ofstream(victim) << "precious";
  fs::create_directory(directory());
  const std::string old_suffix = ".tmp" + std::to_string(getpid());
  for (const std::string& name :
       {"a.svg" + old_suffix, "probe" + old_suffix, std::string("a.svg")}) {
    fs::create_symlink(victim, fs::path(directory()) / name);
  }
  prepare_output_directory(directory());
  write_file(directory(), "a.svg", "picture");
  EXPECT_EQ(content(victim), "precious");
  EXPECT_EQ(content(directory() + "/a.svg"), "picture");
  EXPECT_FALSE(fs::is_symlink(directory() + "/a.svg"));
  EXPECT_EQ(files(), 3u);
}

TEST_F(OutputDirectory, AFileThatDoesNotFitIsAnErrorAndIsRemoved) {
  prepare_output_directory(directory());
  write_file(directory(), "a.svg", "old");
  signal(SIGXFSZ, SIG_IGN);  // as the program does
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{1000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    write_file(directory(), "a.svg", std::string(5000, 'x'));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource);
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(message, ::testing::HasSubstr("a.svg\": File too large"));
  EXPECT_EQ(content(directory() + "/a.svg"), "old");
  EXPECT_EQ(files(), 1u);
}

}  // namespace
}  // namespace winnow::demo
