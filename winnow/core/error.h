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

// What happened, where a program may have to know more than the code says. Ranks tell it to each
// other, so that it is the same on all of them.
enum class ErrorReason {
  none,
  arguments_differ,  // ranks gave different values for what must be equal
  call_order,        // ranks wait for each other in different calls
  two_callers,       // two processes or threads claim to be the same rank
  absent,            // a rank did not come, or did not answer, before the deadline
  peer_gone,         // a rank has ended or has closed its transport
  interrupted,       // the program of a rank interrupted its call
};

// What an Error says, as data.
struct ErrorDetails {
  std::string argument{}, wanted{}, got{};
  std::string differing{};  // what the ranks gave differently (arguments_differ)
  ErrorReason reason = ErrorReason::none;
};

// Thrown before anything is written: after an Error the outputs are untouched and the next call
// works, unless the operation's header says otherwise (expert_parallel). what() reads "<operation>:
// <argument>: want <wanted>, got <got>". Outputs are unspecified if memory runs out in the call, or
// its program interrupts it (interrupt.h).
class WINNOW_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string operation, std::string argument, std::string wanted,
        std::string got, ErrorReason reason = ErrorReason::none)
      : std::runtime_error(operation + ": " + argument + ": want " + wanted + ", got " + got),
        code_(code),
        operation_(std::move(operation)) {
    if (reason == ErrorReason::arguments_differ) details_.differing = argument;
    details_.argument = std::move(argument);
    details_.wanted = std::move(wanted);
    details_.got = std::move(got);
    details_.reason = reason;
  }

  // For faults that no single argument explains, and for messages that name it in the midst of
  // their text, such as what a rank reports; what() reads "<operation>: <message>".
  Error(ErrorCode code, std::string operation, const std::string& message,
        ErrorDetails details = {})
      : std::runtime_error(operation + ": " + message),
        code_(code),
        operation_(std::move(operation)),
        details_(std::move(details)) {}

  ErrorCode code() const noexcept { return code_; }
  // The function that refused, e.g. "sparse_mla::forward".
  const std::string& operation() const noexcept { return operation_; }
  // The argument at fault, e.g. "lse"; empty if no single argument is.
  const std::string& argument() const noexcept { return details_.argument; }
  ErrorReason reason() const noexcept { return details_.reason; }
  const ErrorDetails& details() const noexcept { return details_; }

 private:
  ErrorCode code_;
  std::string operation_;
  ErrorDetails details_;
};

}  // namespace winnow
