// A world whose ranks are threads of one process: for embedded use and for tests.
#pragma once

#include <memory>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// Thread-safe. The transports and the memory stay usable after the world object is destroyed.
class WINNOW_EXPORT InProcessWorld {
 public:
  // Errors (winnow::Error): world_size below 1.
  explicit InProcessWorld(int world_size);

  int world_size() const;
  // The rank's transport, for one thread. Returns the same object while any reference to it exists.
  // Errors: a rank outside the world; a rank whose transport was closed (make a new world).
  std::shared_ptr<Transport> transport(int rank);
  // A MemoryStore that the ranks of this world share.
  std::shared_ptr<Store> store() const;

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace winnow::expert_parallel
