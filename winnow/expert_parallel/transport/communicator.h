// The places of the ranks, and how they wait for each other: peers by node and local index,
// barriers, waits with a deadline, and the record of the first fault, which every rank sees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/error.h"
#include "winnow/core/export.h"
#include "winnow/expert_parallel/routing/topology.h"
#include "winnow/expert_parallel/transport/call_order.h"
#include "winnow/expert_parallel/transport/fault.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// What errors call a wait: "dispatch: rank 0 waited 30.0 s for the counts of rank 2 (epoch 7,
// ...)".
struct WaitName {
  std::string_view operation;       // "expert_parallel::dispatch"
  std::string_view phase;           // "the counts"
  int peer = -1;                    // the rank that has to write the word; -1: no one
  std::string_view unit = "epoch";  // what the word counts
  int writer = -1;  // the rank that passes it on from the peer; -1: the peer writes it itself
};

// The memory of every rank of `rank`'s node, by local index; memory of other nodes is not accessed.
// For kernels, which use only these pointers. Errors (winnow::Error, invalid_argument): a rank of
// the node whose memory no pointer reaches.
WINNOW_EXPORT std::vector<std::byte*> node_pointers(SymmetricMemory& memory,
                                                    const Topology& topology, int rank,
                                                    std::string_view operation);

// For one thread at a time, like its transport. All ranks make the calls of all communicators over
// one transport in the same order; a rank that waits while another one is in another call of the
// same place in the order learns of it soon. After a fault (an expired wait, or a call of
// fail()) it is broken for good: every later wait on every rank throws the first record.
class WINNOW_EXPORT Communicator {
 public:
  // Collective (allocates control memory). Errors (winnow::Error): a transport whose size is not
  // that of the topology; those of allocate().
  Communicator(std::shared_ptr<Transport> transport, const Topology& topology,
               const Deadline& deadline);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Topology& topology() const { return topology_; }
  Transport& transport() { return *transport_; }
  int rank() const { return topology_.rank(node_, local_); }
  int node() const { return node_; }
  int local() const { return local_; }

  // The rank at that place. Errors: a place outside the topology.
  int peer(int node, int local) const;

  // Collective as Transport::allocate(), over the ranks of the transport. Where it fails, the
  // communicator is broken.
  std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes, const Deadline& deadline,
                                            std::string_view what);

  static std::byte* local_memory(SymmetricMemory& memory) { return memory.local(); }
  // The memory of a rank of this node; null where only puts reach it. Across nodes there are no
  // pointers.
  std::byte* node_pointer(SymmetricMemory& memory, int local) const;

  // Transport::put() and put_signal() to a rank of any node.
  void put(SymmetricMemory& memory, int node, int local, std::size_t offset, const void* source,
           std::size_t bytes);
  void put_signal(SymmetricMemory& memory, int node, int local, std::size_t offset,
                  const void* source, std::size_t bytes, std::size_t signal_offset,
                  std::uint64_t value);

  // Collective over all ranks, over those of this node. `operation` is what errors name.
  void world_barrier(const Deadline& deadline, std::string_view operation);
  void node_barrier(const Deadline& deadline, std::string_view operation);

  // Waits until a word of local memory (a symmetric memory, or any word that another thread writes)
  // is `value` or more, with acquire, and returns it. Ends early if the peer is certainly gone.
  std::uint64_t wait_at_least(const std::uint64_t* word, std::uint64_t value,
                              const Deadline& deadline, const WaitName& name);

  // The same, but returns false instead of recording a fault if the peer does not come.
  bool comes(const std::uint64_t* word, std::uint64_t value, const Deadline& deadline,
             const WaitName& name);

  // Runs the body of a collective call. An error of this rank alone in the middle of it (out of
  // memory, internal, or the exception of an interrupt) breaks the communicator for all ranks,
  // which would wait for this rank otherwise; every rank throws other errors by itself.
  template <class Body>
  auto call(std::string_view operation, const Body& body) {
    transport_->check();
    check();
    try {
      order_->begin_call(layer_, operation);
      return body();
    } catch (const std::bad_alloc&) {
      fail_alone(operation, ErrorCode::resource, "out of memory in the call");
    } catch (const Error& error) {
      if (error.code() != ErrorCode::internal) throw;
      fail_alone(operation, error.code(), message_of(error));
    } catch (...) {
      signal_interrupt(operation);
      throw;
    }
  }

  // For calls in halves, which ranks may make in different orders: see CallOrder::forget().
  void forget_order() { order_->forget(); }

  // Throws the first record if there is one.
  void check() const;
  std::optional<FaultRecord> fault() const;
  // Makes the record known to every rank, unless another one was first, and throws the first one. A
  // record without `rank` is one of this rank.
  [[noreturn]] void fail(FaultRecord record);

 private:
  enum Barrier { kWorld, kNode, kBarriers };

  // Waits until the word is `value` or more. If it will not be, calls give_up(who is missing, what
  // was seen), which need not return.
  template <class GiveUp>
  std::uint64_t wait(const std::uint64_t* word, std::uint64_t value, const Deadline& deadline,
                     const WaitName& name, const GiveUp& give_up);
  [[noreturn]] void fail_alone(std::string_view operation, ErrorCode code, const std::string& text);
  FaultSlot& fault_slot(SymmetricMemory& memory) const;
  [[noreturn]] void fail_apart(const WaitName& name, const std::string& other_call);
  [[noreturn]] void break_with(const FaultRecord& record);
  void record_everywhere(const FaultRecord& record);
  void signal_interrupt(std::string_view operation);
  void barrier(Barrier kind, const std::vector<int>& members, const Deadline& deadline,
               std::string_view operation);
  std::size_t barrier_word(Barrier kind, int rank) const;

  std::shared_ptr<Transport> transport_;
  Topology topology_;
  int node_ = 0;
  int local_ = 0;
  std::shared_ptr<SymmetricMemory> control_;
  std::shared_ptr<CallOrder> order_;
  int layer_ = 0;  // of the order
  std::uint64_t epochs_[kBarriers] = {};
  mutable std::optional<FaultRecord> fault_;  // once this rank has thrown it
};

}  // namespace winnow::expert_parallel
