#include <algorithm>
#include <cstring>
#include <utility>

#include "winnow/expert_parallel/exchange/count_exchange.h"

namespace winnow::expert_parallel {
namespace {

using Word = std::int64_t;
constexpr std::size_t kStatementWords = sizeof(Header) / sizeof(Word);

void append(std::vector<Word>& message, const Header& statement) {
  const std::size_t end = message.size();
  message.resize(end + kStatementWords);
  std::memcpy(message.data() + end, &statement, sizeof(statement));
}

void append(std::vector<Word>& message, const Word* counts, std::size_t size) {
  message.insert(message.end(), counts, counts + size);
}

}  // namespace

CountExchange::CountExchange(std::shared_ptr<Communicator> communicator, std::int64_t experts,
                             const char* operation, const Deadline& deadline)
    : communicator_(std::move(communicator)), operation_(operation) {
  const Topology& topology = communicator_->topology();
  const auto ranks = static_cast<std::size_t>(topology.world_size);
  nodes_ = static_cast<std::size_t>(topology.nodes());
  locals_ = static_cast<std::size_t>(topology.local_world_size);
  experts_per_rank_ = static_cast<std::size_t>(experts) / ranks;
  node_message_words_ = kStatementWords + locals_ + locals_ * experts_per_rank_ + 1;
  local_message_words_ = nodes_ * (kStatementWords + 1) + experts_per_rank_;
  out_.per_rank.resize(ranks);
  out_.per_node.resize(nodes_);
  out_.per_expert.resize(static_cast<std::size_t>(experts));
  in_.statements.resize(ranks);
  in_.from_rank.resize(ranks);
  in_.from_node.resize(nodes_);
  in_.pairs.resize(experts_per_rank_);
  message_.reserve(std::max(node_message_words_, local_message_words_));
  const std::size_t words =
      2 * (nodes_ * (1 + node_message_words_) + locals_ * (1 + local_message_words_));
  memory_ = communicator_->allocate(words * sizeof(Word), deadline, "the counts of notify");
}

// [2][NN] signals | [2][L] signals | [2][NN] messages | [2][L] messages
std::size_t CountExchange::node_signal(int source_node) const {
  return parity() * nodes_ + static_cast<std::size_t>(source_node);
}
std::size_t CountExchange::local_signal(int source_local) const {
  return 2 * nodes_ + parity() * locals_ + static_cast<std::size_t>(source_local);
}
std::size_t CountExchange::node_message(int source_node) const {
  return 2 * (nodes_ + locals_) +
         (parity() * nodes_ + static_cast<std::size_t>(source_node)) * node_message_words_;
}
std::size_t CountExchange::local_message(int source_local) const {
  return 2 * (nodes_ + locals_) + 2 * nodes_ * node_message_words_ +
         (parity() * locals_ + static_cast<std::size_t>(source_local)) * local_message_words_;
}

const Word* CountExchange::at(std::size_t place) const {
  return reinterpret_cast<const Word*>(memory_->local()) + place;
}

void CountExchange::send(int node, int local, std::size_t place, std::size_t signal) {
  communicator_->put_signal(*memory_, node, local, place * sizeof(Word), message_.data(),
                            message_.size() * sizeof(Word), signal * sizeof(Word), epoch_);
}

const CountsIn& CountExchange::run(const Deadline& deadline) {
  ++epoch_;
  post_between_nodes();
  hear_between_nodes(deadline);
  post_in_node();
  hear_in_node(deadline);
  return in_;
}

void CountExchange::post_between_nodes() {
  const Topology& topology = communicator_->topology();
  const int me = communicator_->rank();
  for (int node = 0; node < topology.nodes(); ++node) {
    const std::size_t first_rank = static_cast<std::size_t>(node) * locals_;
    message_.clear();
    append(message_, out_.statement);
    append(message_, &out_.per_rank[first_rank], locals_);
    append(message_, &out_.per_expert[first_rank * experts_per_rank_], locals_ * experts_per_rank_);
    append(message_, &out_.per_node[static_cast<std::size_t>(node)], 1);
    send(node, topology.local(me), node_message(topology.node(me)), node_signal(topology.node(me)));
  }
}

void CountExchange::hear_between_nodes(const Deadline& deadline) {
  const Topology& topology = communicator_->topology();
  const int local = topology.local(communicator_->rank());
  for (int node = 0; node < topology.nodes(); ++node) {
    communicator_->wait_at_least(reinterpret_cast<const std::uint64_t*>(at(node_signal(node))),
                                 epoch_, deadline,
                                 {operation_, "the counts", topology.rank(node, local)});
    in_.from_node[static_cast<std::size_t>(node)] = at(node_message(node))[node_message_words_ - 1];
  }
}

void CountExchange::post_in_node() {
  const Topology& topology = communicator_->topology();
  const int me = communicator_->rank(), own_node = topology.node(me);
  for (int local = 0; local < topology.local_world_size; ++local) {
    const auto to = static_cast<std::size_t>(local);
    message_.clear();
    for (int node = 0; node < topology.nodes(); ++node) {
      const Word* heard = at(node_message(node));
      append(message_, heard, kStatementWords);
      append(message_, heard + kStatementWords + to, 1);
    }
    const std::size_t sums = message_.size();
    message_.resize(sums + experts_per_rank_, 0);
    for (int node = 0; node < topology.nodes(); ++node) {
      const Word* pairs =
          at(node_message(node)) + kStatementWords + locals_ + to * experts_per_rank_;
      for (std::size_t x = 0; x < experts_per_rank_; ++x) message_[sums + x] += pairs[x];
    }
    send(own_node, local, local_message(topology.local(me)), local_signal(topology.local(me)));
  }
}

void CountExchange::hear_in_node(const Deadline& deadline) {
  const Topology& topology = communicator_->topology();
  const int own_node = topology.node(communicator_->rank());
  std::fill(in_.pairs.begin(), in_.pairs.end(), 0);
  for (int local = 0; local < topology.local_world_size; ++local) {
    communicator_->wait_at_least(reinterpret_cast<const std::uint64_t*>(at(local_signal(local))),
                                 epoch_, deadline,
                                 {operation_, "the sums", topology.rank(own_node, local)});
    const Word* heard = at(local_message(local));
    for (int node = 0; node < topology.nodes(); ++node, heard += kStatementWords + 1) {
      const auto source = static_cast<std::size_t>(topology.rank(node, local));
      in_.statements[source] = *reinterpret_cast<const Header*>(heard);
      in_.from_rank[source] = heard[kStatementWords];
    }
    for (std::size_t x = 0; x < experts_per_rank_; ++x) in_.pairs[x] += heard[x];
  }
}

}  // namespace winnow::expert_parallel
