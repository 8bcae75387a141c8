// The log of calls (WINNOW_LOG) and the records of them (WINNOW_RECORD). Internal.
//
// The entry point of an operation is one line around the call itself: recorded(kContract, args,
// options, run). docs/troubleshooting.md is the page. What all ranks call has logged() instead.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/contract.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow {

// Whether calls are logged or recorded. The environment is read at the first call of the process;
// throws Error if a value is not one of those that the page lists, or a file cannot be opened.
WINNOW_EXPORT bool recording(std::string_view operation);

// One argument of a call: a tensor, or a number, flag or choice in words.
struct RecordedArgument {
  std::string_view name;
  ConstTensorView tensor;
  bool output = false;  // the call may write it
  std::string text;     // of other arguments; empty: absent
  bool is_tensor = false;
};

// The text of an error as the log and a record have it: control characters are spaces.
WINNOW_EXPORT std::string in_one_line(std::string_view text);

WINNOW_EXPORT std::string to_text(double value);
inline std::string to_text(std::int64_t value) { return std::to_string(value); }
inline std::string to_text(int value) { return std::to_string(value); }
inline std::string to_text(bool value) { return value ? "1" : "0"; }
template <class Enum>
  requires std::is_enum_v<Enum>
std::string to_text(Enum value) {
  return std::to_string(static_cast<int>(value));
}

// Writes what is known of one call: before it the arguments, after it how it ended.
class WINNOW_EXPORT RecordedCall {
 public:
  RecordedCall(std::string_view operation, const RunOptions& options)
      : operation_(operation), options_(options) {}

  void add(std::string_view name, const ConstTensorView& view) {
    arguments_.push_back({name, view, false, "", true});
  }
  void add(std::string_view name, const TensorView& view) {
    arguments_.push_back({name, view, true, "", true});
  }
  template <class T>
  void add(std::string_view name, const std::optional<T>& value) {
    arguments_.push_back({name, {}, false, value.has_value() ? to_text(*value) : "", false});
  }
  template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void add(std::string_view name, T value) {
    arguments_.push_back({name, {}, false, to_text(value), false});
  }

  template <class T>
  void add(std::string_view name, const std::shared_ptr<T>& value) {
    add(name, value != nullptr);
  }

  void begin();
  void begin_without_record();  // only the log
  void end(Backend backend);
  void fail(std::string_view what) noexcept;

 private:
  void log(std::string_view end) const;
  void write_arguments();
  void write_result(std::string_view end);

  std::string operation_;
  RunOptions options_;
  std::vector<RecordedArgument> arguments_;
  std::string file_;  // of the record; empty: none
  std::string note_;  // why there is none, where one was wanted
  double start_ = 0;
};

// run(args, options), logged and recorded where that is asked for; the contract (contract.h) names
// the arguments. Dry runs are no calls.
template <class Contract, class Args, class Run>
Backend recorded(const Contract& contract, const Args& args, const RunOptions& options,
                 const Run& run) {
  if (options.dry_run || !recording(contract.operation)) [[likely]]
    return run(args, options);
  RecordedCall call(contract.operation, options);
  contract.visit(args, [&](const auto& spec, const auto& value) { call.add(spec.name, value); });
  call.begin();
  try {
    const Backend backend = run(args, options);
    call.end(backend);
    return backend;
  } catch (const std::exception& error) {
    call.fail(error.what());
    throw;
  }
}

// All members of a struct of arguments. The log has those that RecordedCall::add() takes.
template <auto... kMembers>
struct Members {};

// run(), logged where that is asked for: a call of `rank` in which all ranks take part. None is
// recorded, since one rank cannot repeat it.
template <auto... kMembers, class Args, class Run>
auto logged(Members<kMembers...>, std::string_view operation, int rank, const Args& args,
            Backend backend, const Run& run) {
  static_assert(sizeof...(kMembers) == contract::detail::members_of<Args>(),
                "a member is left out");
  if (!recording(operation)) [[likely]]
    return run();
  RecordedCall call(operation, {.stream = args.stream});
  call.add("rank", std::int64_t{rank});
  const auto add = [&](std::string_view name, const auto& value) {
    if constexpr (requires { call.add(name, value); }) call.add(name, value);
  };
  (add(contract::name_of<kMembers>(), args.*kMembers), ...);
  call.begin_without_record();
  try {
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
      call.end(backend);
    } else {
      auto result = run();
      call.end(backend);
      return result;
    }
  } catch (const std::exception& error) {
    call.fail(error.what());
    throw;
  }
}

}  // namespace winnow
