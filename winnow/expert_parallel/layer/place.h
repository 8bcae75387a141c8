// A rank's place in its world. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/device.h"
#include "winnow/core/dtype.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {

struct Place {
  Config config;  // the same on every rank; checked, its defaults resolved
  ExpertMap map;
  int rank = 0;

  Device device() const { return config.device; }
  int world() const { return map.topology.world_size; }
  int node() const { return map.topology.node(rank); }
  int local() const { return map.topology.local(rank); }
  int locals() const { return map.topology.local_world_size; }
  int nodes() const { return map.topology.nodes(); }
  std::int64_t row_bytes() const { return config.hidden * size_of(config.dtype); }
};

}  // namespace winnow::expert_parallel
