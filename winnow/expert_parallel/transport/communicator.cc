#include "winnow/expert_parallel/transport/communicator.h"

#include <utility>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"
#include "winnow/expert_parallel/transport/backoff.h"

namespace winnow::expert_parallel {
namespace {

// A look at the peer's process costs a few system calls.
constexpr std::chrono::milliseconds kLookAtPeer{20};

[[noreturn]] void refuse(const char* argument, const std::string& wanted, const std::string& got) {
  throw Error(ErrorCode::invalid_argument, "expert_parallel::Communicator", argument, wanted, got);
}

void check_index(const char* argument, int index, int end) {
  if (index >= 0 && index < end) return;
  refuse(argument, "in [0, " + std::to_string(end) + ")", std::to_string(index));
}

}  // namespace

std::vector<std::byte*> node_pointers(SymmetricMemory& memory, const Topology& topology, int rank,
                                      std::string_view operation) {
  std::vector<std::byte*> pointers;
  for (int local = 0; local < topology.local_world_size; ++local) {
    const int peer = topology.rank(topology.node(rank), local);
    pointers.push_back(memory.peer(peer));
    if (pointers.back() != nullptr) continue;
    throw Error(ErrorCode::invalid_argument, std::string(operation), "local_world_size",
                "ranks of one machine that reach each other's memory",
                std::to_string(topology.local_world_size) + ", and rank " + std::to_string(rank) +
                    " does not reach rank " + std::to_string(peer));
  }
  return pointers;
}

// The control memory of a rank: a fault slot, for each kind of barrier a word for every rank, in
// which that rank writes the epoch that it has come to, and a slot for the order of calls, of which
// the first communicator over a transport has the one that is used.
Communicator::Communicator(std::shared_ptr<Transport> transport, const Topology& topology,
                           const Deadline& deadline)
    : transport_(std::move(transport)), topology_(topology) {
  if (transport_ == nullptr) refuse("transport", "a transport", "none");
  const int size = transport_->world_size();
  if (size != topology.world_size) {
    refuse("transport", "one of " + std::to_string(topology.world_size) + " ranks",
           std::to_string(size));
  }
  node_ = topology.node(transport_->rank());
  local_ = topology.local(transport_->rank());
  const std::size_t order =
      sizeof(FaultSlot) + kBarriers * static_cast<std::size_t>(size) * sizeof(std::uint64_t);
  control_ = transport_->allocate(order + sizeof(CallOrder::Slot), deadline,
                                  "the control memory of a communicator");
  order_ = transport_->call_order();
  if (order_ == nullptr) {
    order_ = std::make_shared<CallOrder>(control_, order, transport_->rank());
    transport_->call_order() = order_;
  }
  layer_ = order_->begin_layer(this);
}

Communicator::~Communicator() { order_->end_layer(this); }

int Communicator::peer(int node, int local) const {
  check_index("node", node, topology_.nodes());
  check_index("local", local, topology_.local_world_size);
  return topology_.rank(node, local);
}

std::byte* Communicator::node_pointer(SymmetricMemory& memory, int local) const {
  check_index("local", local, topology_.local_world_size);
  return memory.peer(topology_.rank(node_, local));
}

void Communicator::put(SymmetricMemory& memory, int node, int local, std::size_t offset,
                       const void* source, std::size_t bytes) {
  transport_->put(memory, peer(node, local), offset, source, bytes);
}

void Communicator::put_signal(SymmetricMemory& memory, int node, int local, std::size_t offset,
                              const void* source, std::size_t bytes, std::size_t signal_offset,
                              std::uint64_t value) {
  transport_->put_signal(memory, peer(node, local), offset, source, bytes, signal_offset, value);
}

std::shared_ptr<SymmetricMemory> Communicator::allocate(std::size_t bytes, const Deadline& deadline,
                                                        std::string_view what) {
  check();
  try {
    return transport_->allocate(bytes, deadline, what);
  } catch (const Error& error) {
    // The text already names the rank that reports.
    FaultRecord record;
    record.code = error.code();
    record.reason = error.reason();
    record.operation = error.operation();
    record.phase = what;
    record.text = message_of(error);
    break_with(record);
  } catch (...) {
    signal_interrupt("expert_parallel::allocate");
    throw;
  }
}

void Communicator::fail_alone(std::string_view operation, ErrorCode code, const std::string& text) {
  FaultRecord fault;
  fault.code = code;
  fault.operation = operation;
  fault.text = "rank " + std::to_string(rank()) + ": " + text;
  fail(std::move(fault));
}

// ---- Barriers: each rank tells every other its epoch, so that an error can name the missing one.

std::size_t Communicator::barrier_word(Barrier kind, int rank) const {
  const int word = kind * transport_->world_size() + rank;
  return sizeof(FaultSlot) + static_cast<std::size_t>(word) * sizeof(std::uint64_t);
}

void Communicator::barrier(Barrier kind, const std::vector<int>& members, const Deadline& deadline,
                           std::string_view operation) {
  constexpr std::string_view kNames[] = {"the world barrier", "the node barrier"};
  check();
  const int own = transport_->rank();
  const std::uint64_t epoch = ++epochs_[kind];
  for (const int member : members) {
    if (member == own) continue;
    transport_->put_signal(*control_, member, 0, nullptr, 0, barrier_word(kind, own), epoch);
  }
  for (const int member : members) {
    if (member == own) continue;
    const auto* word =
        reinterpret_cast<const std::uint64_t*>(control_->local() + barrier_word(kind, member));
    wait_at_least(word, epoch, deadline, {operation, kNames[kind], member});
  }
}

void Communicator::world_barrier(const Deadline& deadline, std::string_view operation) {
  std::vector<int> members;
  for (int rank = 0; rank < topology_.world_size; ++rank) members.push_back(rank);
  barrier(kWorld, members, deadline, operation);
}

void Communicator::node_barrier(const Deadline& deadline, std::string_view operation) {
  std::vector<int> members;
  for (int local = 0; local < topology_.local_world_size; ++local) {
    members.push_back(peer(node_, local));
  }
  barrier(kNode, members, deadline, operation);
}

// ---- Waits and faults.

template <class GiveUp>
std::uint64_t Communicator::wait(const std::uint64_t* word, std::uint64_t value,
                                 const Deadline& deadline, const WaitName& name,
                                 const GiveUp& give_up) {
  Backoff backoff;
  Interrupts interrupts;
  auto next_look = Deadline::Clock::now() + kLookAtPeer;
  // The peer is the missing rank, unless the rank that would pass on its word is gone.
  int named = name.peer;
  const int writer = name.writer >= 0 ? name.writer : name.peer;
  for (;;) {
    check();
    const std::uint64_t seen = load_acquire(word);
    if (seen >= value) return seen;
    if (backoff.patient()) {
      try {
        interrupts.look();
      } catch (...) {
        signal_interrupt(name.operation);
        throw;
      }
      const auto now = Deadline::Clock::now();
      bool over = now >= deadline.end();
      if (writer >= 0 && now >= next_look) {
        next_look = now + kLookAtPeer;
        if (transport_->peer_gone(writer)) {
          over = true;
          named = writer;
        }
        const std::string other = order_->other_call(writer);
        if (!other.empty() && load_acquire(word) < value) fail_apart(name, other);
      }
      // Once more, in this order: what a rank wrote before it ended counts.
      if (over && load_acquire(word) < value) {
        give_up(named, seen);
        return seen;
      }
    }
    backoff.pause();
  }
}

bool Communicator::comes(const std::uint64_t* word, std::uint64_t value, const Deadline& deadline,
                         const WaitName& name) {
  return wait(word, value, deadline, name, [](int, std::uint64_t) {}) >= value;
}

std::uint64_t Communicator::wait_at_least(const std::uint64_t* word, std::uint64_t value,
                                          const Deadline& deadline, const WaitName& name) {
  return wait(word, value, deadline, name, [&](int named, std::uint64_t seen) {
    FaultRecord record;
    record.reason =
        named >= 0 && transport_->peer_gone(named) ? ErrorReason::peer_gone : ErrorReason::absent;
    record.operation = name.operation;
    record.phase = name.phase;
    record.peer = named;
    record.waited_for = value;
    record.seen = seen;
    record.text = "rank " + std::to_string(rank()) + " waited " + to_seconds(deadline.elapsed()) +
                  " for " + record.phase;
    if (named >= 0) record.text += " of rank " + std::to_string(named);
    record.text += " (" + std::string(name.unit) + " " + std::to_string(value) + ", seen " +
                   std::to_string(seen) + ")";
    if (named >= 0) record.text += ": " + transport_->describe_peer(named);
    fail(std::move(record));
  });
}

// Both layers are broken, so that the ranks in the other one learn of it, too.
void Communicator::fail_apart(const WaitName& name, const std::string& other_call) {
  const int writer = name.writer >= 0 ? name.writer : name.peer;
  FaultRecord record;
  record.reason = ErrorReason::call_order;
  record.operation = name.operation;
  record.rank = rank();
  record.phase = name.phase;
  record.peer = writer;
  record.text = "rank " + std::to_string(rank()) + " calls " + std::string(name.operation) +
                " of layer " + std::to_string(layer_) + " where rank " + std::to_string(writer) +
                " calls " + other_call + ": all ranks must make the same calls in the same order";
  order_->for_each_layer([&](Communicator& layer) {
    if (other_call.ends_with(" of layer " + std::to_string(layer.layer_))) {
      layer.record_everywhere(record);
    }
  });
  fail(std::move(record));
}

void Communicator::signal_interrupt(std::string_view operation) {
  FaultRecord record;
  record.reason = ErrorReason::interrupted;
  record.operation = operation;
  record.rank = rank();
  record.text = "rank " + std::to_string(rank()) + " was interrupted";
  record_everywhere(record);
  order_->forget();
}

FaultSlot& Communicator::fault_slot(SymmetricMemory& memory) const {
  return *reinterpret_cast<FaultSlot*>(memory.local());
}

void Communicator::check() const {
  const FaultSlot& slot = fault_slot(*control_);
  if (!fault_ && !has_fault(slot)) return;
  order_->forget();  // the other ranks may have gone on
  if (!fault_) fault_ = read_fault(slot);
  if (fault_) throw_fault(*fault_, rank());
}

std::optional<FaultRecord> Communicator::fault() const {
  return fault_ ? fault_ : read_fault(fault_slot(*control_));
}

void Communicator::fail(FaultRecord record) {
  if (record.rank < 0) record.rank = rank();
  break_with(record);
}

// The slot of the transport's rank 0 decides which rank was first; that rank writes its record into
// the slots of all the others, each of which reads only its own. If no pointer reaches rank 0, each
// rank's own slot decides for it.
void Communicator::break_with(const FaultRecord& record) {
  record_everywhere(record);
  order_->forget();
  throw_fault(*fault_, rank());
}

void Communicator::record_everywhere(const FaultRecord& record) {
  std::byte* arbiter = control_->peer(0);
  FaultSlot& first =
      arbiter != nullptr ? *reinterpret_cast<FaultSlot*>(arbiter) : fault_slot(*control_);
  const bool won = record_first(first, record);
  fault_ = read_fault(first).value_or(record);
  if (won) {
    constexpr std::size_t kState = offsetof(FaultSlot, state);
    constexpr std::size_t kContent = offsetof(FaultSlot, record);
    const auto* content = reinterpret_cast<const std::byte*>(&first) + kContent;
    for (int member = 0; member < transport_->world_size(); ++member) {
      if (control_->peer(member) == reinterpret_cast<const std::byte*>(&first)) continue;
      transport_->put_signal(*control_, member, kContent, content, sizeof(FaultSlot) - kContent,
                             kState, FaultSlot::kWritten);
    }
  }
}

}  // namespace winnow::expert_parallel
