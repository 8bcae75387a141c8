// A world whose ranks are processes of one host.
#pragma once

#include <memory>
#include <string>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// Collective over the processes: they meet in the store under `prefix` and share memory from then
// on. The memory has no name in any file system, so that a kill at any moment leaves nothing
// behind, and it counts against the memory of the processes' container, not against the size of
// /dev/shm. The store is used only during the call; of each rank one short key remains in it,
// `prefix`/begun/RANK.
//
// All processes belong to one user, machine and process namespace. The same ranks may create one
// world after the other under one prefix. A world of other ranks needs another prefix, and so does
// a new world of those that are left after a fault.
//
// Errors (winnow::Error): timeout, naming the ranks that did not come; invalid_argument: a rank
// outside the world, another world size or library version on some rank, two processes of one rank;
// unsupported: a rank on another machine or in another container; resource.
WINNOW_EXPORT std::shared_ptr<Transport> create_shared_memory(Store& store, int rank,
                                                              int world_size,
                                                              const Deadline& deadline,
                                                              const std::string& prefix = "winnow");

}  // namespace winnow::expert_parallel
