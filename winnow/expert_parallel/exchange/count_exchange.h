// How counts travel between the ranks: notify below the door. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::expert_parallel {

// One rank's counts of tokens to every rank and node and of pairs for every expert.
struct CountsOut {
  Header statement;
  std::vector<std::int64_t> per_rank, per_node, per_expert;  // [W], [NN], [E]
};

struct CountsIn {
  std::vector<Header> statements;       // [W]
  std::vector<std::int64_t> from_rank;  // [W]: tokens for this rank
  std::vector<std::int64_t> from_node;  // [NN]: tokens of the rail for this node
  std::vector<std::int64_t> pairs;      // [E/W]: for this rank's experts, of all ranks
};

// Two phases, each one message per pair of ranks:
//   between nodes  (a, l) -> (b, l): statement | tokens per rank of b | pairs per expert of b |
//                                    tokens for node b
//   in node b      (b, l) -> (b, m): of every node a: statement of (a, l), tokens (a, l) -> (b, m);
//                                    pairs per expert of (b, m), summed over the rail
// A message is valid when its signal holds the number of this call. Calls of even and of odd
// numbers have memory of their own. A rank ends call i when it has heard from its whole node in
// call i, which has heard from every rank before: so nobody begins call i + 2, which writes to the
// memory of call i again, before everybody has ended call i.
class CountExchange {
 public:
  // Collective. `operation` is what faults are reported for.
  CountExchange(std::shared_ptr<Communicator> communicator, std::int64_t experts,
                const char* operation, const Deadline& deadline);

  // What the next call tells; the caller fills it.
  CountsOut& out() { return out_; }
  // Collective: what it told. Throws nothing but faults of the transport.
  const CountsIn& run(const Deadline& deadline);

 private:
  using Word = std::int64_t;  // all memory is counted in words

  void post_between_nodes();
  void hear_between_nodes(const Deadline& deadline);
  void post_in_node();
  void hear_in_node(const Deadline& deadline);

  // Places in the symmetric memory for this call's parity, in words.
  std::size_t parity() const { return epoch_ % 2; }
  std::size_t node_signal(int source_node) const;
  std::size_t local_signal(int source_local) const;
  std::size_t node_message(int source_node) const;
  std::size_t local_message(int source_local) const;
  const Word* at(std::size_t place) const;
  void send(int node, int local, std::size_t place, std::size_t signal);

  std::shared_ptr<Communicator> communicator_;
  const char* operation_;
  std::size_t nodes_, locals_, experts_per_rank_;
  std::size_t node_message_words_, local_message_words_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::uint64_t epoch_ = 0;
  std::vector<Word> message_;  // being composed
  CountsOut out_;
  CountsIn in_;
};

}  // namespace winnow::expert_parallel
