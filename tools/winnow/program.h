// What the programs share: exit codes, and how errors are reported.
#pragma once

#include <functional>

namespace winnow::cli {

// Exit codes, as --help lists them.
enum ExitCode : int {
  kOk = 0,
  kCheckFailed = 1,  // a result was wrong, or a promised speed was missed with --check
  kBadUsage = 2,     // an unknown option, operation, file or value
  kUnsupported = 3,  // the request is fine, but not on this machine or build
  kSystemError = 4,  // memory, files, or a defect
};

// The whole of main(): returns the exit code of `command`, or that of what it throws, which becomes
// a line on standard error. What it writes to std::cout is complete, or the code is kSystemError.
int run_program(const std::function<int()>& command);

}  // namespace winnow::cli
