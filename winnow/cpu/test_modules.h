// The CPU modules as tests go through them.
#pragma once

#include <gtest/gtest.h>

#include "winnow/cpu/kernels.h"

namespace winnow {

// Calls body(kernels) for every module that runs here.
template <class Body>
void for_each_module(const Body& body) {
  for (const CpuModule& module : cpu_modules()) {
    if (!module.runs_here) continue;
    SCOPED_TRACE(module.kernels->name);
    body(*module.kernels);
  }
}

}  // namespace winnow
