// Where the ranks of a world stand: nodes of equal size, rank = node * local_world_size + local.
#pragma once

#include <string>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {

struct Topology {
  int world_size = 1;
  int local_world_size = 1;  // ranks per node

  Topology() = default;
  // local_world_size 0: one node. Errors (winnow::Error, invalid_argument): a world_size below 1, a
  // local_world_size that does not divide it.
  explicit Topology(int world, int local = 0)
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

  int nodes() const { return world_size / local_world_size; }
  int node(int rank) const { return rank / local_world_size; }
  int local(int rank) const { return rank % local_world_size; }
  int rank(int node, int local) const { return node * local_world_size + local; }
  bool same_node(int a, int b) const { return node(a) == node(b); }

  friend bool operator==(const Topology&, const Topology&) = default;
};

}  // namespace winnow::expert_parallel
