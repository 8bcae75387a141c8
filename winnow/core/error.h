// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "winnow/core/export.h"

namespace winnow {

enum class ErrorCode {
  invalid_argument,  // the caller passed something that the contract excludes
  unsupported,       // the arguments are fine, but this machine or build cannot do it
  resource,          // an allocation or another request to the system failed
  timeout,           // a wait reached its deadline
  internal,          // a defect of the library
};

// Thrown before anything is written: after an Error the outputs are untouched and the next call
// works, unless the operation's header says otherwise (expert_parallel). what() reads "<operation>:
// <argument>: want <wanted>, got <got>". Outputs are unspecified if memory runs out in the call, or
// its program interrupts it (interrupt.h).
class WINNOW_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string operation, std::string argument, std::string wanted,
        std::string got)
      : std::runtime_error(operation + ": " + argument + ": want " + wanted + ", got " + got),
        code_(code),
        operation_(std::move(operation)),
        argument_(std::move(argument)) {}

  // For faults that no single argument explains; what() reads "<operation>: <message>".
  Error(ErrorCode code, std::string operation, const std::string& message)
      : std::runtime_error(operation + ": " + message),
        code_(code),
        operation_(std::move(operation)) {}

  // For a message that names the argument in the midst of its text, such as what a rank reports;
  // what() reads "<operation>: <message>".
  Error(ErrorCode code, std::string operation, const std::string& message, std::string argument)
      : std::runtime_error(operation + ": " + message),
        code_(code),
        operation_(std::move(operation)),
        argument_(std::move(argument)) {}

  ErrorCode code() const noexcept { return code_; }
  // The function that refused, e.g. "sparse_mla::forward".
  const std::string& operation() const noexcept { return operation_; }
  // The argument at fault, e.g. "lse"; empty if no single argument is.
  const std::string& argument() const noexcept { return argument_; }

 private:
  ErrorCode code_;
  std::string operation_;
  std::string argument_;
};

}  // namespace winnow
