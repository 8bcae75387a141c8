// The threads of the CPU backend's loops. Internal.
#pragma once

#include <functional>

namespace winnow {

// Calls work(0) on the calling thread and work(1) to work(threads - 1) at the same time on threads
// that wait for the next call between two. Not every number needs to come: a member that starts
// when the caller is already through is left out, and a thread that cannot be created (a limit of
// processes or of memory) leaves the work to the others. So the members that do come must share
// out the work themselves, for instance by a counter. `work` must not throw; nothing here throws
// either. While the calling thread waits for the others it calls meanwhile() now and then.
//
// Calls from several threads have members of their own. In the child of a fork() the members are
// created anew.
void run_on_team(int threads, const std::function<void(int)>& work,
                 const std::function<void()>& meanwhile) noexcept;

}  // namespace winnow
