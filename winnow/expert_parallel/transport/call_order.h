// The order in which a rank makes the calls of all layers over one transport, as the others see it:
// ranks that make different calls wait for each other in vain, and know it from here. Internal.
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
    std::uint64_t word = 0;  // layers made, calls begun since, digest of the last; 0: unknown
    char text[kTextBytes] = {};
  };

  // `memory` has a Slot at `offset`, on every rank.
  CallOrder(std::shared_ptr<SymmetricMemory> memory, std::size_t offset, int rank);

  // Collective: a new layer. Returns its number, from 1; the order begins anew.
  int begin_layer(Communicator* layer);
  void end_layer(Communicator* layer);
  // Those of this rank. A layer that another thread lets go of stays meanwhile.
  template <class Visit>
  void for_each_layer(const Visit& visit) {
    const std::lock_guard lock(mutex_);
    for (Communicator* const layer : layers_) visit(*layer);
  }
  // All ranks make the call, in the same order.
  void begin_call(int layer, std::string_view operation);
  // Nothing is known of this rank until the next layer: a call of its own has ended otherwise than
  // on the other ranks, or it need not be made in the same order.
  void forget();
  // What another rank has called where this rank has made its last call; empty unless that is
  // certainly something else.
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
