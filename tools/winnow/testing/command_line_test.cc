// The program as a user meets it: what it prints and how it ends.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tools/winnow/testing/broken_distribution.h"
#include "tools/winnow/testing/run_program.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "winnow/testing/temporary_folder.h"

namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using winnow::cli::kBrokenDistribution;
using winnow::cli::Result;
using winnow::cli::run;
using winnow::cli::run_shell;

// What a terminal of so many columns gets from the program.
std::string run_on_terminal(std::vector<std::string> arguments, const char* term,
                            unsigned short columns) {
  winsize size{};
  size.ws_col = columns;
  size.ws_row = 24;
  int terminal = -1;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, &size);
  if (pid == 0) {
    setenv("TERM", term, 1);
    std::vector<char*> argv = {const_cast<char*>(WINNOW_PROGRAM)};
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execv(WINNOW_PROGRAM, argv.data());
    _exit(127);
  }
  std::string output;
  char buffer[4096];
  // At the program's end the terminal's reader gets an error, not an end of file.
  for (ssize_t count; (count = read(terminal, buffer, sizeof(buffer))) > 0;) {
    output.append(buffer, static_cast<std::size_t>(count));
  }
  close(terminal);
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0) << output;
  return output;
}

TEST(CommandLine, WithoutACommandExplainsItself) {
  const Result result = run("");
  EXPECT_EQ(result.exit_code, 2);
  const std::string help = run("--help").output;
  EXPECT_THAT(help, testing::StartsWith(result.output + "\nExit codes:"));
  EXPECT_THAT(result.output, testing::StartsWith("winnow: the kernels that sparse transformers"));
  for (const char* command : {"info", "demo", "verify", "bench", "replay"}) {
    EXPECT_THAT(result.output, HasSubstr(std::string("\n  winnow ") + command)) << command;
  }
  EXPECT_EQ(run_shell(WINNOW_PROGRAM " 2> /dev/null").output, "");
}

TEST(CommandLine, HelpHasExamplesAndExitCodes) {
  const Result result = run("--help");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, AllOf(HasSubstr("Examples:"), HasSubstr("Exit codes:")));
  for (const char* command : {"demo", "verify", "bench"}) {
    EXPECT_THAT(run(std::string(command) + " --help").output, HasSubstr("Examples:")) << command;
  }
}

TEST(CommandLine, UnknownOptionIsBadUsage) {
  const Result result = run("info --colour");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("--colour"));
  EXPECT_EQ(run("sort").exit_code, 2);
  EXPECT_EQ(run("demo --device tpu").exit_code, 2);
  EXPECT_EQ(run("bench --repetitions 0").exit_code, 2);
}

TEST(CommandLine, AnUnknownCommandIsNamedWithTheNearest) {
  const Result typo = run("verfy");
  EXPECT_EQ(typo.exit_code, 2);
  EXPECT_EQ(
      typo.output,
      "winnow: command: want one of info, demo, verify, bench, replay, got \"verfy\"; did you "
      "mean verify?\n");
  EXPECT_THAT(run("benchmark").output, HasSubstr("did you mean bench?"));
  EXPECT_THAT(run("foo").output, AllOf(HasSubstr("got \"foo\""), Not(HasSubstr("did you mean"))));
  EXPECT_THAT(run("--foo").output, HasSubstr("want one of info, demo, verify, bench, replay, got"));
  EXPECT_THAT(run("--json info").output, HasSubstr("got \"--json\""));
  EXPECT_EQ(run("-h").exit_code, 0);
}

// The exit code and the reason, whatever the command and the way in which its output is lost.
TEST(CommandLine, LostOutputIsAnErrorOfTheSystem) {
  const std::vector<std::string> commands = {
      "info",
      "info --json",
      "--help",
      "--version",
      "demo --help",
      "verify --list",
      "verify sparse_mla::forward --json --device cpu --case f32-h1",
      "bench expert_parallel::layout --json --seconds 0.001 --repetitions 1 --device cpu"};
  for (const std::string& command : commands) {
    const Result full = run_shell(WINNOW_PROGRAM " " + command + " 2>&1 > /dev/full");
    EXPECT_EQ(full.exit_code, 4) << command;
    EXPECT_THAT(full.output, HasSubstr("winnow: standard output: the output is incomplete: "
                                       "No space left on device\n"))
        << command;
    const Result closed = run_shell(WINNOW_PROGRAM " " + command + " 2>&1 >&-");
    EXPECT_EQ(closed.exit_code, 4) << command;
    EXPECT_THAT(closed.output, HasSubstr("Bad file descriptor")) << command;
  }
}

TEST(CommandLine, APipeWithoutAReaderIsAnErrorOfTheSystem) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[0]);
  const Result result = run_shell(WINNOW_PROGRAM " info 2>&1 >&" + std::to_string(ends[1]));
  close(ends[1]);
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_EQ(result.output, "winnow: standard output: the output is incomplete: Broken pipe\n");
}

TEST(CommandLine, EveryNumberIsRefusedIfItIsNone) {
  const winnow::testing::TemporaryFolder folder;
  for (const char* value : {"nan", "-nan", "inf", "0", "-1", "1e400", "many", ""}) {
    const std::string text = std::string(1, '\'').append(value).append(1, '\'');
    const Result bench = run("bench --seconds=" + text);
    EXPECT_EQ(bench.exit_code, 2) << value << bench.output;
    if (std::string(value) == "nan") {
      EXPECT_THAT(bench.output, HasSubstr("want a number from 0.001 to 60, got nan"));
    }
    for (const char* option :
         {"demo --tokens=", "demo --steps=", "demo --ranks=", "bench --repetitions="}) {
      const Result result = run(option + text + " --out " + folder.path().string());
      EXPECT_EQ(result.exit_code, 2) << option << value << result.output;
    }
  }
}

TEST(CommandLine, AnEmptyNameDoesNotMeanAll) {
  for (const char* arguments : {"verify '' --list", "verify --case '' --list", "bench --name ''",
                                "bench ''", "verify --list --backend ''"}) {
    const Result result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments << result.output;
    EXPECT_THAT(result.output, HasSubstr("want a name, got \"\"")) << arguments;
  }
}

TEST(CommandLine, TextFromOutsideDoesNotReachTheTerminalRaw) {
  const std::string name = "$(printf '\\033]0;title\\007\\377')";
  for (const std::string& arguments :
       {"demo \"" + name + "\"", "verify \"" + name + "\"", "bench --name \"" + name + "\"",
        "info \"" + name + "\"", "\"" + name + "\"", "info --\"" + name + "\"",
        "demo --out \"/dev/null/" + name + "\""}) {
    const Result result = run(arguments);
    EXPECT_NE(result.exit_code, 0) << arguments;
    EXPECT_THAT(result.output, AllOf(HasSubstr("\\x1b]0;title\\x07\\xff"), Not(HasSubstr("\x1b"))))
        << arguments;
  }
}

TEST(CommandLine, UnknownOperationNamesTheKnownOnes) {
  for (const char* command : {"verify", "bench"}) {
    const Result result = run(std::string(command) + " sparse_mla::sideways");
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.output, testing::StartsWith("winnow: " + std::string(command) + ": "));
    EXPECT_THAT(result.output,
                AllOf(HasSubstr("\"sparse_mla::sideways\""), HasSubstr("sparse_mla::forward")));
  }
}

TEST(CommandLine, AMistypedNameIsAnsweredWithTheNearest) {
  const auto said = [](const std::string& arguments) {
    const Result result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    return result.output;
  };
  using testing::EndsWith;
  for (const std::string command : {"verify ", "bench "}) {
    EXPECT_THAT(said(command + "sparse_mla::foward"),
                EndsWith("got \"sparse_mla::foward\"; did you mean sparse_mla::forward?\n"));
    EXPECT_THAT(said(command + "paged_xl.append"), EndsWith("did you mean paged_xl::append?\n"));
    EXPECT_THAT(said(command + "sparsemla"), EndsWith("did you mean sparse_mla?\n"));
    EXPECT_THAT(said(command + "store"), EndsWith("did you mean sparse_mla::store?\n"));
    EXPECT_THAT(said(command + "--backend sm9"), EndsWith("did you mean sm90?\n"));
    EXPECT_THAT(said(command + "matmul"), EndsWith("got \"matmul\"\n"));
  }
  EXPECT_THAT(said("verify sparse_mla::forward --case f32-h1x"),
              EndsWith("got \"f32-h1x\"; did you mean f32-h1?\n"));
  EXPECT_THAT(said("bench indexer::scores --device cpu --name f32-h64-k51"),
              EndsWith("; did you mean f32-h64-k512?\n"));
}

TEST(CommandLine, InfoTellsBackendsAndReasons) {
  const Result result = run("info");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, AllOf(HasSubstr("sm90"), HasSubstr("cpu"), HasSubstr("GPUs"),
                                   HasSubstr("Eigen"), HasSubstr("sparse_mla::backward")));
  const json info = json::parse(run("info --json").output);
  ASSERT_EQ(info["backends"].size(), 4u);
  EXPECT_EQ(info["backends"][3]["name"], "cpu");
  EXPECT_TRUE(info["backends"][3]["supported"]);
  for (const auto& backend : info["backends"]) {
    EXPECT_EQ(backend["supported"].get<bool>(), backend["reason"].get<std::string>().empty());
  }
}

TEST(CommandLine, InfoTellsWhichOperationsRunHereOrWhyNot) {
  const json info = json::parse(run("info --json").output);
  const std::string text = run("info").output;
  ASSERT_EQ(info["operations"].size(), 21u);
  for (const auto& operation : info["operations"]) {
    EXPECT_EQ(operation["cpu"], (json{{"backend", "cpu"}, {"reason", ""}}));
    const std::string backend = operation["gpu"]["backend"], reason = operation["gpu"]["reason"];
    EXPECT_NE(backend.empty(), reason.empty()) << operation;
    const std::string on_gpu = backend.empty() ? "no \\([0-9]\\)" : backend;
    EXPECT_THAT(text, testing::ContainsRegex(operation["name"].get<std::string>() + " +cpu +" +
                                             on_gpu + " +[a-zA-Z]"));
    if (backend.empty()) {
      EXPECT_THAT(text, testing::ContainsRegex("\n\\([0-9]\\) [a-z0-9]+: "));
    }
  }
  // A forced backend is the only one.
  const json forced = json::parse(run("info --json", "WINNOW_BACKEND=cuda").output);
  for (const auto& operation : forced["operations"]) {
    EXPECT_EQ(operation["cpu"]["backend"], "");
    const std::string wanted = "want one that supports tensors on cpu, got cuda";
    const std::string lacks = "want one that implements this operation (";
    const json& backends = operation["backends"];
    const bool has = std::find(backends.begin(), backends.end(), "cuda") != backends.end();
    EXPECT_THAT(operation["cpu"]["reason"].get<std::string>(), HasSubstr(has ? wanted : lacks));
  }
}

TEST(CommandLine, InfoTellsWhetherThereIsNvshmemOrWhyNot) {
  const json nvshmem = json::parse(run("info --json").output)["nvshmem"];
  const std::string version = nvshmem["version"], reason = nvshmem["reason"];
  const std::string text = run("info").output;
  if (nvshmem["supported"]) {
    EXPECT_THAT(version, testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
    EXPECT_EQ(reason, "");
    EXPECT_THAT(text, HasSubstr("\nNVSHMEM    " + version + "\n"));
  } else {
    EXPECT_EQ(version, "");
    EXPECT_THAT(reason, AllOf(HasSubstr("expert_parallel::nvshmem: "),
                              HasSubstr("nvidia-nvshmem-cu13==3.4.5")));
    EXPECT_THAT(text, HasSubstr("\nNVSHMEM    none: " + reason + "\n"));
  }
}

TEST(CommandLine, InfoReportsTheForcedModule) {
  // The last is the plainest, which runs everywhere where there is more than one.
  const json last = json::parse(run("info --json").output)["cpu_modules"].back()["name"];
  const json info =
      json::parse(run("info --json", "WINNOW_CPU_ISA=" + last.get<std::string>()).output);
  for (const auto& module : info["cpu_modules"]) {
    EXPECT_EQ(module["used"].get<bool>(), module["name"] == last);
  }
  const Result unknown = run("info", "WINNOW_CPU_ISA=mmx");
  EXPECT_EQ(unknown.exit_code, 3);
  EXPECT_THAT(unknown.output, AllOf(HasSubstr("WINNOW_CPU_ISA"), HasSubstr("mmx")));
}

TEST(CommandLine, VerifyPrintsTheBackendThatRan) {
  const Result list = run("verify sparse_mla::forward --list");
  ASSERT_EQ(list.exit_code, 0);
  const std::size_t begin = list.output.find(' ') + 1;
  const std::string name = list.output.substr(begin, list.output.find(' ', begin) - begin);
  const Result result = run("verify sparse_mla::forward --device cpu --case " + name);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr(name), HasSubstr("cpu"), HasSubstr("1 passed")));
}

TEST(CommandLine, VerifyListsItsCasesAsJson) {
  const Result result = run("verify sparse_mla --list --json");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const json report = json::parse(result.output);
  ASSERT_FALSE(report["cases"].empty());
  std::string text;
  for (const auto& one : report["cases"]) {
    text += one["operation"].get<std::string>() + " " + one["case"].get<std::string>() + "  (" +
            one["shape"].get<std::string>() + ")\n";
  }
  EXPECT_EQ(text, run("verify sparse_mla --list").output);
}

TEST(CommandLine, ProgressSuitsTheTerminal) {
  const std::vector<std::string> arguments = {
      "verify", "sparse_mla::forward", "--device", "cpu", "--case", "f32-h1"};
  const std::string narrow = run_on_terminal(arguments, "xterm", 40);
  const std::string start = "\r\x1b[K";
  std::size_t at = narrow.find(start);
  ASSERT_NE(at, std::string::npos) << narrow;
  EXPECT_THAT(narrow, HasSubstr(start + "sparse_mla::forward: case 1 of "));
  for (; at != std::string::npos; at = narrow.find(start, at + 1)) {
    const std::size_t begin = at + start.size();
    const std::size_t end = narrow.find_first_of("\r\n", begin);
    if (narrow.compare(end, start.size(), start) != 0) continue;  // a table follows
    EXPECT_LT(end - begin, 40u) << narrow.substr(begin, end - begin);
  }
  EXPECT_THAT(run_on_terminal(arguments, "dumb", 40), Not(HasSubstr("\x1b")));
}

// The ranks that the documented loop of the shell starts, and how each ends.
Result run_ranks(int ranks, const std::string& arguments) {
  const winnow::testing::TemporaryFolder folder;
  return run_shell("export WINNOW_JOB=job WINNOW_RENDEZVOUS=" + folder.path().string() +
                   " WINNOW_WORLD_SIZE=" + std::to_string(ranks) + "; for rank in $(seq 0 " +
                   std::to_string(ranks - 1) + "); do WINNOW_RANK=$rank " WINNOW_PROGRAM " " +
                   arguments +
                   " & started=\"$started $!\"; done 2>&1; "
                   "for each in $started; do wait $each || failed=1; done; exit ${failed:-0}");
}

TEST(CommandLine, VerifyRunsOnRanksThatAreProcesses) {
  const Result one = run_ranks(4, "verify expert_parallel::all_to_all --case 2x2-weighted-bias");
  EXPECT_EQ(one.exit_code, 0) << one.output;
  EXPECT_THAT(one.output, HasSubstr("1 passed, 0 failed"));
  // One process speaks for all.
  EXPECT_EQ(one.output.find("passed"), one.output.rfind("passed"));
  EXPECT_NE(run_ranks(7, "verify expert_parallel").exit_code, 0);
}

TEST(CommandLine, VerifyRefusesWhatItCannotDo) {
  const Result no_case = run("verify sparse_mla::forward --case nonsense");
  EXPECT_EQ(no_case.exit_code, 2);
  EXPECT_THAT(no_case.output, HasSubstr("\"nonsense\""));
  const Result backend = run("verify --backend abacus");
  EXPECT_EQ(backend.exit_code, 2);
  EXPECT_THAT(backend.output,
              HasSubstr("winnow: verify: --backend: want one of sm100, sm90, cuda, cpu, got"));
}

TEST(CommandLine, CudaWithoutAGpuGivesTheReason) {
  const json info = json::parse(run("info --json").output);
  if (info["backends"][0]["supported"]) GTEST_SKIP() << "this machine has a GPU";
  for (const char* command : {"verify", "bench", "demo"}) {
    const Result result = run(std::string(command) + " --device cuda");
    EXPECT_EQ(result.exit_code, 3) << command;
    EXPECT_THAT(result.output, HasSubstr("the cpu backend works")) << command;
  }
  EXPECT_EQ(run("verify --backend sm90").exit_code, 3);
}

TEST(CommandLine, VerifyFailsOnAWrongResultAndSaysHowToRepeat) {
  const Result result =
      run("verify sparse_mla::distribution --case f32-h16 --device cpu", kBrokenDistribution);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, AllOf(HasSubstr("FAILED"), HasSubstr("repeat: winnow verify "
                                                                  "sparse_mla::distribution "
                                                                  "--case ")));
}

TEST(CommandLine, BenchGivesRatesAndRatios) {
  const Result result =
      run("bench sparse_mla::forward --name f32-decode-h128-k2048 --seconds 0.01 --repetitions 1 "
          "--json --device cpu");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const json report = json::parse(result.output);
  ASSERT_FALSE(report["results"].empty());
  for (const auto& entry : report["results"]) {
    EXPECT_GT(entry["gflops_per_second"].get<double>(), 0);
    EXPECT_GT(entry["ratio"].get<double>(), 0);
  }
}

// Scores at 512 rows for each of 64 queries, in f32; a CPU works in nothing of the caller's.
TEST(CommandLine, BenchCountsTheMemoryOfACall) {
  const std::string command =
      "bench indexer::scores --name f32-h64-k512 --seconds 0.001 --repetitions 1 --device cpu";
  const Result listed = run(command + " --json"), printed = run(command);
  ASSERT_EQ(listed.exit_code, 0) << listed.output;
  EXPECT_EQ(json::parse(listed.output)["results"][0]["memory_bytes"], 64 * 512 * 4);
  EXPECT_THAT(printed.output, HasSubstr("0.12 MiB"));
}

TEST(CommandLine, BadThreadCountIsNamed) {
  const Result result = run("info", "WINNOW_NUM_THREADS=many");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("WINNOW_NUM_THREADS"));
}

}  // namespace
