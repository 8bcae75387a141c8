// Which process a rank is, and whether it still lives. Internal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

// A process as others find it again: a number alone may be given to another one later.
struct ProcessIdentity {
  std::string boot;           // of the machine since its start; empty: unknown
  std::string pid_namespace;  // in which `pid` means something
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

enum class ProcessState {
  running,
  stopped,  // by a signal or a debugger
  gone,     // certain: ended, or ended and not yet waited for
  unknown,  // on another machine or in another container
};

WINNOW_EXPORT ProcessIdentity own_process();
WINNOW_EXPORT ProcessState state_of(const ProcessIdentity& process);
// "process 4711, stopped"
WINNOW_EXPORT std::string describe(const ProcessIdentity& process);
// Both on one machine as far as can be known.
WINNOW_EXPORT bool same_machine(const ProcessIdentity& a, const ProcessIdentity& b);

WINNOW_EXPORT std::string to_text(const ProcessIdentity& process);
// Absent where the text is none of to_text().
WINNOW_EXPORT std::optional<ProcessIdentity> process_from_text(std::string_view text);

// The moment on the scale of ProcessIdentity::start_time, for processes of this machine.
WINNOW_EXPORT std::uint64_t time_of_this_machine();

// Grows by one in the child of every fork().
WINNOW_EXPORT int fork_generation();

// 128 random bits in hexadecimal.
WINNOW_EXPORT std::string random_id();

}  // namespace winnow::expert_parallel
