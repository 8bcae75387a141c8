// Shows the other ranks which call each rank has begun last, over all layers of one transport.
// Ranks that make different calls would wait for each other until the timeout; here they see it
// while they wait. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

class Communicator;
class SymmetricMemory;

// For one thread at a time, like its transport.
class WINNOW_EXPORT CallOrder {
 public:
  // What a rank has begun last, in its own memory.
  struct Slot {
    static constexpr std::size_t kTextBytes = 56;
    std::uint64_t word = 0;      // layers made, calls begun since, digest of the last; 0: unknown
    char text[kTextBytes] = {};  // "dispatch of layer 7", by whose end Communicator finds the layer
  };

  // `memory` has a Slot at `offset`, on every rank.
  CallOrder(std::shared_ptr<SymmetricMemory> memory, std::size_t offset, int rank);

  // Collective: a new layer. Returns its number, from 1; calls are counted from 0 again.
  int begin_layer(Communicator* layer);
  void end_layer(Communicator* layer);
  // Visits the layers of this rank. A thread that destroys one meanwhile waits in end_layer().
  template <class Visit>
  void for_each_layer(const Visit& visit) {
    const std::lock_guard lock(mutex_);
    for (Communicator* const layer : layers_) visit(*layer);
  }
  // Called at the beginning of a call that all ranks make in the same order.
  void begin_call(int layer, std::string_view operation);
  // Makes this rank's slot unknown until the next layer: after a call that ended otherwise here
  // than on the other ranks, and before calls that ranks may make in different orders.
  void forget();
  // The text of the call that `rank` has begun in the place of this rank's last one; empty if it is
  // the same call, if the rank is ahead or behind, or if one of the two is unknown.
  std::string other_call(int rank) const;

 private:
  Slot& slot(int rank) const;

  std::shared_ptr<SymmetricMemory> memory_;
  std::size_t offset_;
  int rank_;
  std::mutex mutex_;  // of layers_
  std::vector<Communicator*> layers_;
  int made_ = 0;  // layers
  std::uint32_t calls_ = 0;
  bool known_ = true;
};

}  // namespace winnow::expert_parallel
