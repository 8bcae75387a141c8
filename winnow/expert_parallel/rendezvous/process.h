// The identity of a process, and whether it is still alive. Internal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/transport/untrusted.h"

namespace winnow::expert_parallel {

// Identifies a process to others: its number alone may later be that of another process.
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
// Whether both are on one machine, as far as that can be determined.
WINNOW_EXPORT bool same_machine(const ProcessIdentity& a, const ProcessIdentity& b);

WINNOW_EXPORT std::string to_text(const ProcessIdentity& process);
// Throws Error (internal) if the text is not one of to_text().
WINNOW_EXPORT ProcessIdentity process_from_text(std::string_view text, const Sender& by);

// Incremented in the child of every fork().
WINNOW_EXPORT int fork_generation();

// 128 random bits in hexadecimal.
WINNOW_EXPORT std::string random_id();

}  // namespace winnow::expert_parallel
