// Watches for the end of processes, so that a wait on a GPU for such a process learns of it while
// no thread of the caller is in the library. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/process.h"

namespace winnow::expert_parallel {

// Calls `gone(i)` once for each process i of the list that has ended or ends: within about 100 ms,
// on the watching thread or, for one that has ended already, on this thread. Processes of other
// machines or containers are not watched. Releasing the watch ends the calls and waits for one that
// is under way; `gone` must not release it.
//
// All watches of the process share one thread, which sleeps until a process ends. It takes no
// signals, is there only while something is watched, and stops before the program's exit handlers.
// In a child of fork() the parent's watches are not there, and letting go of them does nothing.
// Errors (winnow::Error): resource, if no thread can be created.
using PeerWatch = std::shared_ptr<void>;
WINNOW_EXPORT PeerWatch watch_processes(const std::vector<ProcessIdentity>& processes,
                                        std::function<void(int)> gone);

}  // namespace winnow::expert_parallel
