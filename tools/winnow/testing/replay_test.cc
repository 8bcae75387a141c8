// Records of calls, and `winnow replay`, as a user meets them.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tools/winnow/testing/run_program.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/testing/operation.h"
#include "winnow/testing/temporary_folder.h"

namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using winnow::cli::Result;
using winnow::cli::run;
namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Records of an operation's calls in its first cases, as `winnow verify` makes them.
std::vector<fs::path> record(const fs::path& folder, const std::string& operation, int cases = 1,
                             const std::string& environment = "") {
  const std::string list = run("verify " + operation + " --list").output;
  std::istringstream lines(list);
  std::string name, one, rest;
  for (int i = 0; i < cases && lines >> name >> one && std::getline(lines, rest); ++i) {
    const Result verified =
        run("verify " + operation + " --device cpu --case " + one,
            environment + " WINNOW_RECORD=" + folder.string() + " WINNOW_RECORD_ONLY=" + operation);
    EXPECT_EQ(verified.exit_code, 0) << verified.output;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

// Those that `winnow replay` can repeat: all that are one function.
std::vector<std::string> functions() {
  std::vector<std::string> names;
  for (const winnow::testing::Operation& operation : winnow::testing::operations()) {
    if (operation.repeat) names.push_back(operation.name);
  }
  return names;
}

class CallsOf : public testing::TestWithParam<std::string> {};

TEST_P(CallsOf, AreLoggedAndRepeatedBitForBit) {
  const winnow::testing::TemporaryFolder folder, log_folder;
  const fs::path log = log_folder.path() / "log";
  const std::vector<fs::path> files =
      record(folder.path(), GetParam(), 3, "WINNOW_LOG=" + log.string());
  ASSERT_GE(files.size(), 3u) << "does its function call recorded()?";
  EXPECT_THAT(contents(log), HasSubstr("] " + GetParam() + " "));
  for (const fs::path& file : files) {
    const Result replayed = run("replay " + file.string());
    EXPECT_EQ(replayed.exit_code, 0) << replayed.output;
    EXPECT_THAT(replayed.output, AllOf(HasSubstr(GetParam()), HasSubstr("now: cpu, "),
                                       Not(HasSubstr("difference"))));
  }
}

INSTANTIATE_TEST_SUITE_P(EachOperation, CallsOf, testing::ValuesIn(functions()));

TEST(Replay, NamesTheOutputThatDiffers) {
  const winnow::testing::TemporaryFolder folder;
  const fs::path file = record(folder.path(), "sparse_mla::forward").at(0);
  std::string text = contents(file);
  const std::size_t result = text.rfind("result cpu");
  ASSERT_NE(result, std::string::npos);
  const std::size_t data = text.find('\n', text.find("data ", result)) + 1;
  text[data + 3] ^= 0x7f;  // the exponent of the first element of `out`
  write(file, text);
  const Result replayed = run("replay " + file.string());
  EXPECT_EQ(replayed.exit_code, 1);
  EXPECT_THAT(replayed.output, ContainsRegex("out .*(difference|NaN)"));
  EXPECT_THAT(replayed.output, ContainsRegex("lse .*the same bits"));
}

TEST(Replay, RepeatsACallThatNeverEnded) {
  const winnow::testing::TemporaryFolder folder;
  const fs::path file = record(folder.path(), "sparse_mla::forward").at(0);
  const std::string text = contents(file);
  write(file, text.substr(0, text.rfind("result cpu")));
  const Result replayed = run("replay " + file.string());
  EXPECT_EQ(replayed.exit_code, 0) << replayed.output;
  EXPECT_THAT(replayed.output, AllOf(HasSubstr("it never ended"), HasSubstr("now: cpu, ")));
}

TEST(Replay, ShowsNoControlCharactersOfARecord) {
  const winnow::testing::TemporaryFolder folder;
  const fs::path file = record(folder.path(), "sparse_mla::forward").at(0);
  std::string text = contents(file);
  text.insert(text.find("\nlibrary ") + 9, "\x1b[31m");
  std::string renamed = contents(file);  // in both places where the output is described
  for (std::size_t at = 0; (at = renamed.find("output lse ", at)) != std::string::npos;) {
    renamed.replace(at, 11, "output l\x1b[7m ");
  }
  write(file, renamed);
  EXPECT_THAT(run("replay " + file.string()).output,
              AllOf(HasSubstr("want tensors of sparse_mla::forward, got l\\x1b[7m"),
                    Not(HasSubstr("\x1b"))));
  const std::size_t result = text.rfind("result cpu");
  write(file, text.substr(0, result) + "result error \x1b[5m\ndata 0\n");
  const Result replayed = run("replay " + file.string());
  EXPECT_EQ(replayed.exit_code, 1);
  EXPECT_THAT(replayed.output,
              AllOf(HasSubstr("\\x1b[31m"), HasSubstr("error \\x1b[5m"), Not(HasSubstr("\x1b"))));
}

TEST(Replay, RefusesWhatIsNoRecord) {
  const winnow::testing::TemporaryFolder folder;
  const fs::path file = record(folder.path(), "sparse_mla::forward").at(0);
  const std::string text = contents(file);
  const std::size_t data = text.find("\ndata ");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    return changed.replace(changed.find(from), from.size(), to);
  };
  const std::string q = "tensor q f32 cpu [", scratch = "\noutput workspace f32 cpu [4] [1] 99999";
  const std::pair<std::string, std::string> cases[] = {
      {with("\ndata ", "\ntensor q\ndata "), "one line for the tensor \"q\""},
      {with("\ndata ", "\ntensor q" + text.substr(text.find(q) + 8, 40) + "\ndata "),
       "one line for the tensor \"q\""},
      // Copied into the memory that the shape needs, those bytes would go beyond it.
      {with("\noutput workspace", scratch) + std::string(99999, 'x'),
       "as many bytes as the shape needs"},
      {"winnow call 1\n" + std::string(70'000, 'A'), "lines of at most 65536 bytes"},
      {"", "a record of a call, made with WINNOW_RECORD"},
      {"something else", "a record of a call, made with WINNOW_RECORD"},
      {text.substr(0, data), "complete up to its tensors"},
      {text.substr(0, data + 60), "the data of all its tensors"},
      {with("operation sparse_mla::forward", "operation sparse_mla::sideways"),
       "an operation of Winnow"},
      {with("tensor q f32", "tensor q f33"), "dtypes of Winnow"},
      {with("\nbackend -", "\nbackend sm70"), "FILE: want a backend of Winnow"},
      {with("tensor q f32 cpu [", "tensor q f32 cpu [9"), "as many bytes as the shape needs"},
      {with("tensor q f32 cpu [", "tensor q f32 cpu [9999999999999999999999,"),
       "numbers in a list"},
      {with("value k_stride ", "value stride "), "an argument \"k_stride\""},
      {with("value k_stride 1", "value k_stride x"), "a number for \"k_stride\""},
      {with("value k_stride 1", "value k_stride 1x"), "a number for \"k_stride\""},
      {with("tensor q f32 cpu [", "tensor q f32 cpu [1x,"), "numbers in a list"},
      // Nothing says how large a tensor may be that the call does not look at.
      {with("\ndata ", "\noutput other u8 cpu [4398046511104] [0] 1\ndata ") + "x",
       "tensors of sparse_mla::forward, got other"},
  };
  for (const auto& [changed, wanted] : cases) {
    write(file, changed);
    const Result replayed = run("replay " + file.string());
    EXPECT_EQ(replayed.exit_code, 2) << wanted << ": " << replayed.output;
    EXPECT_THAT(replayed.output, HasSubstr(wanted));
  }
  EXPECT_THAT(run("replay /nowhere").output, HasSubstr("FILE: want a file that can be read"));
  for (const char* other : {"/", "/dev/zero", "/dev/null"}) {
    EXPECT_THAT(run(std::string("replay ") + other).output, HasSubstr("FILE: want a regular file"));
  }
}

TEST(Log, HasALineForEachCall) {
  const winnow::testing::TemporaryFolder folder;
  const fs::path log = folder.path() / "log";
  for (int i = 0; i < 2; ++i) {  // it grows
    run("verify sparse_mla::forward --device cpu --case bf16-h1", "WINNOW_LOG=" + log.string());
  }
  std::istringstream lines(contents(log));
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    EXPECT_THAT(line,
                ContainsRegex("^winnow 20[0-9T:.-]+Z \\[[0-9]+\\] sparse_mla::forward "
                              "q=bf16\\[[0-9,]+\\]/\\[[0-9,]+\\] kv=bf16.* out=bf16.* on cpu: "
                              "cpu, [0-9.]+ (us|ms)$"));
  }
  EXPECT_GE(count, 2);
  EXPECT_EQ(count % 2, 0);
}

TEST(Log, RefusesValuesThatItDoesNotKnow) {
  const auto verify = [](const std::string& environment) {
    return run("verify sparse_mla::forward --device cpu --case bf16-h1", environment);
  };
  EXPECT_THAT(verify("WINNOW_LOG=/nowhere/log").output, HasSubstr("WINNOW_LOG: want 0, 1, stderr"));
  EXPECT_THAT(verify("WINNOW_RECORD=/nowhere").output, HasSubstr("WINNOW_RECORD: want a folder"));
  EXPECT_THAT(verify("WINNOW_RECORD=/tmp WINNOW_RECORD_CALLS=many").output,
              HasSubstr("WINNOW_RECORD_CALLS: want a number from 1 on"));
}

}  // namespace
