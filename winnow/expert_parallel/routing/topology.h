// The ranks of a world on nodes of equal size: rank = node * local_world_size + local.
#pragma once

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

struct WINNOW_EXPORT Topology {
  int world_size = 1;
  int local_world_size = 1;  // ranks per node

  Topology() = default;
  // A `local` of 0 means one node. Errors (winnow::Error, invalid_argument): a world size below 1,
  // a local world size that does not divide it.
  explicit Topology(int world, int local = 0);

  int nodes() const { return world_size / local_world_size; }
  int node(int rank) const { return rank / local_world_size; }
  int local(int rank) const { return rank % local_world_size; }
  int rank(int node, int local) const { return node * local_world_size + local; }
  bool same_node(int a, int b) const { return node(a) == node(b); }

  friend bool operator==(const Topology&, const Topology&) = default;
};

}  // namespace winnow::expert_parallel
