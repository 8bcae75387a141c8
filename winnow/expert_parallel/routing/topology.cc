#include "winnow/expert_parallel/routing/topology.h"

#include <string>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {

Topology::Topology(int world, int local)
    : world_size(world), local_world_size(local == 0 ? world : local) {
  constexpr const char* operation = "expert_parallel::Topology";
  if (world < 1) {
    throw Error(ErrorCode::invalid_argument, operation, "world_size", "1 or more",
                std::to_string(world));
  }
  if (local < 0 || local_world_size > world || world % local_world_size != 0) {
    throw Error(ErrorCode::invalid_argument, operation, "local_world_size",
                "a divisor of world_size " + std::to_string(world), std::to_string(local));
  }
}

}  // namespace winnow::expert_parallel
