// Watches for the end of processes, so that a kernel that waits for such a process is notified even
// while no thread of the caller is in the library. Internal.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/process.h"

namespace winnow::expert_parallel {

// Calls `gone(i)` once for each process i of the list that has ended or ends: for one that has
// ended already, on this thread; later, within about 100 ms, on the watching thread. Processes of
// other machines or containers are not watched. After the watch has been released there are no more
// calls: the release waits for a running one. `gone` must not release the watch.
//
// All watches of the process share one thread, which blocks all signals, exists only while
// something is watched, and stops before the program's exit handlers. A child of fork() has no
// watches, and releasing its copies of the parent's does nothing. Throws Error (resource) if no
// thread can be created.
using PeerWatch = std::shared_ptr<void>;
WINNOW_EXPORT PeerWatch watch_processes(const std::vector<ProcessIdentity>& processes,
                                        std::function<void(int)> gone);

}  // namespace winnow::expert_parallel
