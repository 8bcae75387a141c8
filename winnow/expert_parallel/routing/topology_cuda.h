// The place of a rank and of the experts in the world, as kernels know it. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/host_device.h"
#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {

// Expert x lives on rank x / per_rank().
struct CudaTopology {
  int world = 1, locals = 1, nodes = 1;  // W, L, NN
  int rank = 0, node = 0, local = 0;
  int experts = 0, topk = 0;  // E, K

  WINNOW_HOST_DEVICE int per_rank() const { return experts / world; }
  WINNOW_HOST_DEVICE int rank_at(int at_node, int at_local) const {
    return at_node * locals + at_local;
  }
  // The rank that writes the words of rank `from` to this rank's memory: `from` itself, or the rank
  // of this node that passes them on.
  WINNOW_HOST_DEVICE int writer_for(int from) const {
    const bool itself = from / locals == node || from % locals == local;
    return itself ? from : rank_at(node, from % locals);
  }
  WINNOW_HOST_DEVICE bool kept(std::int32_t expert) const {
    return expert >= 0 && expert < experts;
  }
};

inline CudaTopology topology_of(const ExpertMap& map, int rank) {
  CudaTopology topology;
  topology.world = map.topology.world_size;
  topology.locals = map.topology.local_world_size;
  topology.nodes = map.topology.nodes();
  topology.rank = rank;
  topology.node = map.topology.node(rank);
  topology.local = map.topology.local(rank);
  topology.experts = map.experts;
  topology.topk = map.topk;
  return topology;
}

}  // namespace winnow::expert_parallel
