// The number of threads that the CPU backend uses.
#pragma once

#include "winnow/core/export.h"

namespace winnow {

// The number of threads that a call on the CPU backend may use: the value of set_num_threads(),
// else the environment variable WINNOW_NUM_THREADS, else OpenMP's own choice (OMP_NUM_THREADS, the
// processors allowed).
WINNOW_EXPORT int num_threads();

// Applies to the whole process from the next call on. Errors (winnow::Error): count below 1.
//
// Operations may be called from several threads at once; each call then uses this many threads.
// After fork() the child may call every CPU operation: its loops run on plain threads, since the
// OpenMP runtime of the parent does not survive the fork.
WINNOW_EXPORT void set_num_threads(int count);

}  // namespace winnow
