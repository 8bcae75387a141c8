// Ranks that are processes with shared memory, for tests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"

namespace winnow::expert_parallel {

class SharedMemory : public ::testing::Test {
 protected:
  // Starts a process per rank, which runs the body with its transport.
  using Body = std::function<std::string(const std::shared_ptr<Transport>&)>;
  std::vector<RankProcess> start(int ranks, const Body& body, const std::string& prefix = "world") {
    std::vector<RankProcess> processes;
    for (int rank = 0; rank < ranks; ++rank) {
      processes.emplace_back([=, this] { return body(create(rank, ranks, generous(), prefix)); });
    }
    return processes;
  }
  std::shared_ptr<Transport> create(int rank, int ranks, const Deadline& deadline,
                                    const std::string& prefix = "world") const {
    FileStore store(folder_.path() / "rendezvous");
    return create_shared_memory(store, rank, ranks, deadline, prefix);
  }

  // Words for processes of a test to tell each other how far they are.
  void signal(const std::string& key, const std::string& value = "") const {
    FileStore(folder_.path() / "test").set(key, value);
  }
  void await(const std::string& key) const {
    if (!FileStore(folder_.path() / "test").get(key, generous())) {
      throw std::runtime_error("never told: " + key);
    }
  }

  // Until that rank has begun to meet the others of the world.
  void await_announced(int rank) const {
    FileStore(folder_.path() / "rendezvous")
        .get("world/1/announce/" + std::to_string(rank), generous());
  }

  // Of this job.
  int keys_left() const { return entries_of(folder_.path() / "rendezvous" / "test"); }

  static std::vector<std::string> answers(std::vector<RankProcess>& processes) {
    std::vector<std::string> texts;
    for (RankProcess& process : processes) texts.push_back(process.wait());
    return texts;
  }

  // Sums of all ranks by puts, several times.
  static std::string exchange(Communicator& communicator, int rounds = 50) {
    const int ranks = communicator.topology().world_size, rank = communicator.rank();
    const auto memory =
        communicator.allocate(static_cast<std::size_t>(ranks) * 16, generous(), "words");
    const auto* words = reinterpret_cast<const std::uint64_t*>(memory->local());
    for (int round = 1; round <= rounds; ++round) {
      const auto number = static_cast<std::uint64_t>(round);
      for (int to = 0; to < ranks; ++to) {
        const std::uint64_t value = number * 100 + static_cast<std::uint64_t>(rank);
        communicator.put_signal(*memory, communicator.topology().node(to),
                                communicator.topology().local(to),
                                static_cast<std::size_t>(rank) * 16, &value, 8,
                                static_cast<std::size_t>(rank) * 16 + 8, number);
      }
      for (int from = 0; from < ranks; ++from) {
        communicator.wait_at_least(words + 2 * from + 1, number, generous(),
                                   {"exchange", "the word", from});
        if (words[2 * from] != number * 100 + static_cast<std::uint64_t>(from)) return "wrong";
      }
      communicator.world_barrier(generous(), "exchange");
    }
    return "right";
  }
  static std::string exchange_over(const std::shared_ptr<Transport>& transport) {
    Communicator communicator(transport, Topology(transport->world_size()), generous());
    return exchange(communicator);
  }

  TemporaryFolder folder_;
};

}  // namespace winnow::expert_parallel
