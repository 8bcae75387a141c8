// The command line program: parses the arguments and runs one subcommand.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "tools/winnow/commands.h"
#include "tools/winnow/demo/demo.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/printable.h"
#include "tools/winnow/program.h"
#include "tools/winnow/progress.h"
#include <CLI/CLI.hpp>

#include "winnow/core/error.h"
#include "winnow/core/nearest.h"
#include "winnow/core/version.h"

namespace winnow::cli {
namespace {

constexpr const char* kExitCodes = R"(Exit codes:
  0  everything asked for was done and is right
  1  a check failed: a wrong result, or with --check a speed below its target
  2  bad usage or input: an unknown option, operation, file or value
  3  not supported on this machine or by this build; the reason is printed
  4  the system failed: memory, a file or standard output that cannot be written, a defect)";

// What `winnow` says that is called without a command; --help adds the exit codes.
constexpr const char* kHelp =
    R"(winnow: the kernels that sparse transformers need, on the CPU and on NVIDIA GPUs

Examples:
  winnow info                         what runs on this machine, and why not where not
  winnow demo                         a sparse attention layer learns where to look
  winnow verify sparse_mla            check the sparse MLA operations
  winnow bench sparse_mla::forward    time one operation beside a matrix product
  winnow replay calls/FILE.call       repeat a call that was recorded

`winnow COMMAND --help` has the options of a command, `winnow --help` the exit codes,
`winnow --version` the version.
)";

// The help of the program itself is ours, that of a command is CLI11's.
class Help : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    if (app->get_parent() != nullptr) return CLI::Formatter::make_help(app, std::move(name), mode);
    return std::string(kHelp) + "\n" + kExitCodes + "\n";
  }
};

// The document that `demo` reads by default: installed beside the program, or in the source tree.
std::string default_document() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto installed = program.parent_path().parent_path() / WINNOW_INSTALLED_DOCUMENT;
  return std::filesystem::exists(installed, error) ? installed.string() : WINNOW_SOURCE_DOCUMENT;
}

// CLI::Range without its defect: it lets NaN pass.
CLI::Validator number_in(double least, double most) {
  const std::string range = demo::format_text("%g to %g", least, most);
  const auto check = [=](std::string& text) {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) {
      return std::string();
    }
    return "want a number from " + range + ", got " + text;
  };
  return {check, "FLOAT in [" + range + "]"};
}

// An empty text, as a variable of the shell that is not set gives it, would otherwise mean all.
CLI::Validator name() {
  const auto check = [](std::string& text) {
    return std::string(text.empty() ? "want a name, got \"\"" : "");
  };
  return {check, ""};
}

void add_where(CLI::App& command, RunWhere& where) {
  command.add_option("--device", where.device, "where the tensors live: auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--backend", where.backend, "force a backend (winnow info lists them)")
      ->check(name());
}

void add_info(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand(
      "info", "backends, GPUs, libraries, and which operations run on this machine");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "print one JSON object");
  command->callback([json, &exit_code] { exit_code = run_info(*json); });
}

void add_demo(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand(
      "demo", "a sparse attention layer over a real document learns where to look");
  command->footer(
      "Examples:\n"
      "  winnow demo                                 over a document of the project\n"
      "  winnow demo notes.txt --out pictures        over your text, pictures into a folder\n"
      "  winnow demo --ranks 8                       the mixture of experts over 8 ranks\n"
      "  winnow demo --json > numbers.json           every number, for programs\n");
  auto options = std::make_shared<demo::DemoOptions>();
  options->default_document = default_document();
  options->progress = progress_wanted();
  auto device = std::make_shared<std::string>("auto");
  command->add_option("FILE", options->file, "a UTF-8 text (default: a document of the project)");
  command->add_option("--device", *device, "where the tensors live: auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--out", options->out_dir, "folder for the pictures")->capture_default_str();
  command
      ->add_option("--tokens", options->tokens,
                   demo::format_text("bytes of the document that are used at most, %d to %d",
                                     int(demo::kMinTokens), int(demo::kMaxTokens)))
      ->capture_default_str();
  command
      ->add_option("--steps", options->steps,
                   demo::format_text("steps of training, at least %d", int(demo::kMinSteps)))
      ->capture_default_str();
  command
      ->add_option("--ranks", options->ranks,
                   demo::format_text("threads that share the mixture of experts, 1 to %d",
                                     int(demo::kMaxRanks)))
      ->capture_default_str();
  command->add_flag("--json", options->json, "print one JSON object and nothing else");
  command->callback([options, device, &exit_code] {
    options->device = demo::device_choice_from_string(*device);
    exit_code = demo::run_demo(*options, std::cout, std::cerr);
  });
}

void add_verify(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("verify", "case tables against double-precision oracles");
  command->footer(
      "Examples:\n"
      "  winnow verify                               every operation\n"
      "  winnow verify sparse_mla::backward --list   the cases of one\n"
      "  winnow verify sparse_mla::forward --case NAME\n");
  auto options = std::make_shared<VerifyOptions>();
  command->add_option("OP", options->operation, "an operation or a family (default: all)")
      ->check(name());
  add_where(*command, options->where);
  command->add_option("--case", options->only_case, "only this case")->check(name());
  command->add_flag("--list", options->list, "list the cases, run none");
  command->add_flag("--json", options->json, "print one JSON object");
  command->callback([options, &exit_code] { exit_code = run_verify(*options); });
}

void add_bench(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("bench", "times beside a ceiling measured in the same run");
  command->footer(
      "Examples:\n"
      "  winnow bench                                every operation\n"
      "  winnow bench sparse_mla --json > today.json\n"
      "  winnow bench sparse_mla::forward --check    exit 1 if a target is missed\n");
  auto options = std::make_shared<BenchOptions>();
  command->add_option("OP", options->operation, "an operation or a family (default: all)")
      ->check(name());
  add_where(*command, options->where);
  command->add_option("--name", options->only_benchmark, "only this benchmark")->check(name());
  command->add_flag("--all", options->all, "the slow ones too");
  command->add_option("--seconds", options->seconds, "least measured time of a repetition")
      ->check(number_in(0.001, 60.0))
      ->capture_default_str();
  command->add_option("--repetitions", options->repetitions, "repetitions; the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_flag("--check", options->check, "fail where a promised speed is missed");
  command->add_flag("--json", options->json, "print one JSON object");
  command->callback([options, &exit_code] { exit_code = run_bench(*options); });
}

void add_replay(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("replay", "repeat a call that WINNOW_RECORD wrote down");
  command->footer(
      "Examples:\n"
      "  WINNOW_RECORD=calls ./my_program        writes each call's tensors into the folder calls\n"
      "  winnow replay calls/FILE.call           repeats one, and compares its outputs\n"
      "  winnow replay calls/FILE.call --device cpu   what the CPU makes of a call on a GPU\n\n"
      "The exit code is 1 where an output differs from the recorded one, or where the call fails\n"
      "and did not, or the other way round.");
  auto options = std::make_shared<ReplayOptions>();
  command->add_option("file", options->file, "the record")->required();
  add_where(*command, options->where);
  command->add_flag("--contents", options->check,
                    "check the contents of index tensors on a GPU, too");
  command
      ->add_option("--tolerance", options->tolerance,
                   "largest difference, relative to the largest magnitude of an output")
      ->check(number_in(0, 1e6))
      ->capture_default_str();
  command->callback([options, &exit_code] { exit_code = run_replay(*options); });
}

// Throws Error where the first argument is neither an option of the program nor a command.
void check_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || app.get_option_no_throw(argv[1]) != nullptr) return;
  const std::string given = argv[1];
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
  if (std::find(known.begin(), known.end(), given) != known.end()) return;
  std::string wanted;
  for (const std::string& name : known) wanted += (wanted.empty() ? "one of " : ", ") + name;
  throw Error(ErrorCode::invalid_argument, "command",
              "want " + wanted + ", got \"" + given + "\"" + suggestion(given, known));
}

int run(int argc, char** argv) {
  if (argc == 1) {
    std::cerr << kHelp;
    return kBadUsage;
  }
  CLI::App app;
  app.name("winnow");
  app.formatter(std::make_shared<Help>());
  app.set_version_flag("--version", std::string("winnow ") + WINNOW_VERSION);
  app.require_subcommand(1);
  app.failure_message([](const CLI::App* command, const CLI::Error& error) {
    return printable(CLI::FailureMessage::simple(command, error), true);
  });
  int exit_code = kOk;
  add_info(app, exit_code);
  add_demo(app, exit_code);
  add_verify(app, exit_code);
  add_bench(app, exit_code);
  add_replay(app, exit_code);
  check_command(app, argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kBadUsage;  // --help and --version end here with 0
  }
  return exit_code;
}

}  // namespace
}  // namespace winnow::cli

int main(int argc, char** argv) {
  return winnow::cli::run_program([&] { return winnow::cli::run(argc, argv); });
}
