// `winnow demo` as a program: its report, its pictures, its exit codes and its errors.
#include <filesystem>
#include <fstream>
#include <string>

#include "tools/winnow/testing/broken_distribution.h"
#include "tools/winnow/testing/run_program.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "winnow/testing/temporary_folder.h"

namespace {

using nlohmann::json;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;
using winnow::cli::kBrokenDistribution;
using winnow::cli::Result;
using winnow::cli::run;
using winnow::cli::run_shell;
namespace fs = std::filesystem;

// Each test has a temporary folder.
class DemoCommand : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& content) const {
    const fs::path path = folder_.path() / name;
    std::ofstream(path, std::ios::binary) << content;
    return path.string();
  }
  std::string out() const { return (folder_.path() / "out").string(); }

  // The demo rejects the document with exit code 2 and a reason, and writes no pictures.
  void expect_refused(const std::string& file, const std::string& reason) const {
    const Result result = run("demo '" + file + "' --out " + out());
    EXPECT_EQ(result.exit_code, 2) << result.output;
    EXPECT_THAT(result.output, HasSubstr(reason));
    EXPECT_FALSE(fs::exists(fs::path(out()) / "attention.svg"));
  }

  winnow::testing::TemporaryFolder folder_;
};

TEST_F(DemoCommand, HelpHasTheRanges) {
  EXPECT_THAT(run("demo --help").output,
              AllOf(HasSubstr("256 to 8192"), HasSubstr("at least 50"), HasSubstr("1 to 32")));
}

TEST_F(DemoCommand, LearnsAndDraws) {
  const Result result = run("demo --ranks 3 --json --device cpu --out " + out() + " 2>/dev/null");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const json report = json::parse(result.output);
  EXPECT_TRUE(report["ok"].get<bool>());
  EXPECT_EQ(report["backend"], "cpu");
  ASSERT_FALSE(report["steps"].empty());
  bool decoded = false, shared_out = false;
  for (const auto& step : report["steps"]) {
    EXPECT_TRUE(step["ok"].get<bool>()) << step["name"];
    decoded = decoded || (step["name"] == "decode" && step["checks"].size() >= 4);
    if (step["name"] != "experts") continue;
    shared_out = true;
    EXPECT_EQ(step["numbers"]["ranks"], 3);
    EXPECT_EQ(step["numbers"]["load"].size(), 3u);
    EXPECT_GT(step["numbers"]["bytes_moved"].get<double>(), 0);
    EXPECT_LT(step["numbers"]["bytes_moved"].get<double>(),
              step["numbers"]["bytes_per_pair_sent"].get<double>());
  }
  EXPECT_TRUE(decoded);
  EXPECT_TRUE(shared_out);
  int pictures = 0;
  for (const auto& entry : fs::directory_iterator(out())) {
    ASSERT_EQ(entry.path().extension(), ".svg") << "something else was left behind";
    std::ifstream file(entry.path());
    const std::string content(std::istreambuf_iterator<char>(file), {});
    EXPECT_THAT(content, AllOf(StartsWith("<svg "), EndsWith("</svg>\n")));
    ++pictures;
  }
  EXPECT_EQ(pictures, 3);
}

TEST_F(DemoCommand, FailsWhereAnOperationIsBroken) {
  const Result result =
      run("demo --device cpu --tokens 256 --steps 50 --out " + out(), kBrokenDistribution);
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("FAILED"));
  for (const char* text : {"   step  ", " different "}) {  // the table of steps appears once
    ASSERT_THAT(result.output, HasSubstr(text));
    EXPECT_EQ(result.output.find(text), result.output.rfind(text)) << result.output;
  }
}

// With stacks larger than the address space no thread can be created.
TEST_F(DemoCommand, WithoutThreadsForItsRanksSaysSo) {
  const std::string limit = "ulimit -S -s 140000000000 2>/dev/null";
  if (run_shell(limit).exit_code != 0) GTEST_SKIP() << "the size of stacks is limited here";
  const Result result = run_shell(
      limit + "; " WINNOW_PROGRAM " demo --device cpu --tokens 256 --steps 50 --ranks 3 --out " +
      out() + " 2>&1");
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.output, HasSubstr("winnow: expert_parallel: no thread for each of 3 ranks: "));
}

TEST_F(DemoCommand, RefusesDocuments) {
  expect_refused((folder_.path() / "missing.txt").string(), "missing.txt");
  expect_refused(write("short.txt", "too short"), "short.txt");
}

TEST_F(DemoCommand, RefusesNumbersOfRanks) {
  for (const char* ranks : {"0", "33", "-4", "4000000000"}) {
    const Result result = run("demo --ranks " + std::string(ranks) + " --out " + out());
    EXPECT_EQ(result.exit_code, 2) << result.output;
    EXPECT_THAT(result.output, AllOf(HasSubstr("ranks: want 1 to 32"), HasSubstr(ranks)));
  }
  EXPECT_EQ(run("demo --ranks many --out " + out()).exit_code, 2);
  EXPECT_FALSE(fs::exists(out()));
}

TEST_F(DemoCommand, RefusesAnOutputFolderThatIsAFile) {
  const std::string file = write("file", "x");
  const Result result = run("demo --out " + file);
  EXPECT_EQ(result.exit_code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr(file));
}

}  // namespace
