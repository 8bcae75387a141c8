#include "tools/winnow/program.h"

#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <string>

#include "tools/winnow/printable.h"
#include "tools/winnow/standard_output.h"

#include "winnow/core/error.h"

namespace winnow::cli {
namespace {

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return kBadUsage;
    case ErrorCode::unsupported:
      return kUnsupported;
    case ErrorCode::resource:
    case ErrorCode::timeout:
    case ErrorCode::internal:
      return kSystemError;
  }
  return kSystemError;
}

// How a piece of work ended: its exit code, and the text of what it threw.
struct Outcome {
  int exit_code = kOk;
  std::string message;
};

Outcome attempt(const std::function<int()>& work) {
  try {
    return {work(), ""};
  } catch (const Error& error) {
    return {exit_code_of(error.code()), error.what()};
  } catch (const std::bad_alloc&) {
    return {kSystemError, "out of memory"};
  } catch (const std::exception& error) {
    return {kSystemError, error.what()};
  }
}

}  // namespace

int run_program(const std::function<int()>& command) {
  // Ranks on one GPU wait for each other there: no two streams may share a hardware queue.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  StandardOutput output;
  const Outcome result = attempt(command);
  const Outcome end = attempt([&] {
    output.finish();
    return kOk;
  });
  for (const Outcome& outcome : {result, end}) {
    if (outcome.message.empty()) continue;
    std::cerr << "winnow: " << printable(outcome.message, true) << "\n";
  }
  return end.exit_code != kOk ? end.exit_code : result.exit_code;
}

}  // namespace winnow::cli
