// The number of threads that the CPU backend uses.
#pragma once

#include "winnow/core/export.h"

namespace winnow {

// The number of threads that a call on the CPU backend may use: the value of set_num_threads(),
// else the environment variable WINNOW_NUM_THREADS, else OMP_NUM_THREADS (its first number), else
// the number of processors that this thread may run on. A call uses at most 1,024 of them.
WINNOW_EXPORT int num_threads();

// Applies to the whole process from the next call on. Errors (winnow::Error): count below 1.
//
// Operations may be called from several threads at once; each call then uses this many threads. The
// child of a fork() may call every CPU operation and uses as many threads as its parent. Where a
// limit of processes or memory allows fewer threads, a call runs on those, with the same result.
WINNOW_EXPORT void set_num_threads(int count);

}  // namespace winnow
