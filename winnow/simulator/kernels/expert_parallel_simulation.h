// What the tests of the all-to-all in the simulator share.
#pragma once

#include "winnow/simulator/testing/simulate.h"

namespace winnow::expert_parallel {

// All ranks share one device, on which the blocks of all of them run at the same time: so many of
// each kernel.
inline void set_device(int ranks, int blocks = 2) {
  simulator::settings().multiprocessors = ranks * blocks;
  simulator::settings().resident_clusters = static_cast<unsigned>(2 * ranks * blocks);
}

}  // namespace winnow::expert_parallel
