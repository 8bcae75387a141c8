// Which rank is where, barriers, waits and their errors, and the one record of the first fault.
#include "winnow/expert_parallel/transport/communicator.h"

#include <atomic>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;

// Runs the body with a communicator of the world on a thread per rank.
template <class Body>
std::vector<std::string> with_communicators(InProcessWorld& world, const Topology& topology,
                                            const Body& body) {
  return on_threads(topology.world_size, [&](int rank) {
    Communicator communicator(world.transport(rank), topology, generous());
    body(communicator);
  });
}

template <class Body>
std::vector<std::string> with_communicators(const Topology& topology, const Body& body) {
  InProcessWorld world(topology.world_size);
  return with_communicators(world, topology, body);
}

// The same, where no rank may throw.
template <class Body>
void expect_communicators_return(const Topology& topology, const Body& body) {
  EXPECT_THAT(with_communicators(topology, body), Each(""));
}

TEST(Communicator, AddressesByNodeAndLocalIndex) {
  expect_communicators_return(Topology(6, 3), [](Communicator& communicator) {
    const int rank = communicator.rank();
    EXPECT_EQ(rank, communicator.transport().rank());
    EXPECT_EQ(communicator.node(), rank / 3);
    EXPECT_EQ(communicator.local(), rank % 3);
    EXPECT_EQ(communicator.peer(1, 2), 5);
    EXPECT_THROW(communicator.peer(2, 0), Error);
    EXPECT_THROW(communicator.peer(0, 3), Error);
    EXPECT_THROW(communicator.peer(-1, 0), Error);
  });
}

TEST(Communicator, PointsOnlyInsideTheNodeAndPutsEverywhere) {
  expect_communicators_return(Topology(4, 2), [](Communicator& communicator) {
    const auto memory = communicator.allocate(64, generous(), "words");
    const int rank = communicator.rank();
    EXPECT_EQ(communicator.node_pointer(*memory, communicator.local()), memory->local());
    for (int local = 0; local < 2; ++local) {
      EXPECT_EQ(communicator.node_pointer(*memory, local),
                memory->peer(2 * communicator.node() + local));
    }
    EXPECT_THROW(communicator.node_pointer(*memory, 2), Error);
    const std::uint64_t value = 100 + static_cast<std::uint64_t>(rank);
    const auto slot = static_cast<std::size_t>(8 * rank);
    for (int node = 0; node < 2; ++node) {
      communicator.put(*memory, node, 0, slot, &value, 8);
      communicator.put_signal(*memory, node, 1, slot, &value, 8, 32 + slot, 1);
    }
    communicator.world_barrier(generous(), "test");
    const auto* words = reinterpret_cast<const std::uint64_t*>(communicator.local_memory(*memory));
    for (std::uint64_t n = 0; n < 4; ++n) {
      EXPECT_EQ(words[n], 100 + n);
      EXPECT_EQ(words[4 + n], communicator.local() == 1 ? 1u : 0u);
    }
  });
}

// Ranks 0 to 2 have memory here, the others elsewhere.
class PartlyReachedMemory : public SymmetricMemory {
 public:
  PartlyReachedMemory() : SymmetricMemory(nullptr, 1) {}
  std::byte* peer(int rank) override { return rank < 3 ? &bytes_[rank] : nullptr; }

 private:
  std::byte bytes_[3];
};

TEST(NodePointers, AreThoseOfTheOwnNodeAndAllThere) {
  PartlyReachedMemory memory;
  EXPECT_THAT(node_pointers(memory, Topology(4, 1), 1, "op"), ElementsAre(memory.peer(1)));
  EXPECT_THAT(node_pointers(memory, Topology(4, 2), 1, "op"),
              ElementsAre(memory.peer(0), memory.peer(1)));
  expect_error([&] { node_pointers(memory, Topology(4, 2), 2, "op"); }, ErrorCode::invalid_argument,
               "op: local_world_size: want ranks of one machine that reach each other's memory, "
               "got 2, and rank 2 does not reach rank 3");
}

// Plain counters: under ThreadSanitizer a barrier that does not order would be a race too.
TEST(Communicator, BarriersHoldBackTheRanksOfTheWorldAndOfANode) {
  const Topology topology(6, 3);
  constexpr int kRounds = 100;
  std::vector<int> rounds(6, 0);
  const auto expect_round = [&](int rank, int round) {
    EXPECT_EQ(rounds[static_cast<std::size_t>(rank)], round);
  };
  expect_communicators_return(topology, [&](Communicator& communicator) {
    int& mine = rounds[static_cast<std::size_t>(communicator.rank())];
    for (int round = 1; round <= kRounds; ++round) {
      mine = 3 * round;
      communicator.world_barrier(generous(), "test");
      for (int rank = 0; rank < 6; ++rank) {
        expect_round(rank, 3 * round);
      }
      communicator.world_barrier(generous(), "test");
      mine = 3 * round + 1;
      communicator.node_barrier(generous(), "test");
      for (int local = 0; local < 3; ++local) {
        expect_round(3 * communicator.node() + local, 3 * round + 1);
      }
      communicator.node_barrier(generous(), "test");
    }
  });
}

TEST(Communicator, RefusesATransportOfAnotherSize) {
  InProcessWorld world(3);
  const auto transport = world.transport(0);
  expect_error([&] { Communicator(transport, Topology(4, 2), generous()); },
               ErrorCode::invalid_argument,
               "expert_parallel::Communicator: transport: want one of 4 ranks, got 3");
  expect_error([&] { Communicator(nullptr, Topology(1), generous()); }, ErrorCode::invalid_argument,
               "expert_parallel::Communicator: transport: want a transport, got none");
}

// The wait of rank 0 expires; all others learn of it in their own waits, rank 2 also, which is
// late.
TEST(Communicator, TheFirstRecordReachesEveryRankAndTheLateOne) {
  const Deadline deadline = generous();
  const std::vector<std::string> errors =
      with_communicators(Topology(4, 2), [&](Communicator& communicator) {
        const auto memory = communicator.allocate(64, generous(), "words");
        auto* words = reinterpret_cast<std::uint64_t*>(memory->local());
        store_release(words, 6);
        const int rank = communicator.rank();
        if (rank == 2) {
          while (!communicator.fault()) sleep_ms(1);
          store_release(words, 7);  // what it waits for; it learns of the fault all the same
        }
        const WaitName name{"expert_parallel::dispatch", "the counts", rank == 2 ? 0 : 2};
        const std::string error = error_of(
            [&] { communicator.wait_at_least(words, 7, rank == 0 ? brief(200) : deadline, name); });
        // Broken for good: the same at every later call.
        for (int n = 0; n < 2; ++n) {
          EXPECT_EQ(error_of([&] { communicator.world_barrier(generous(), "other"); }), error);
          EXPECT_EQ(error_of([&] { communicator.check(); }), error);
          EXPECT_EQ(error_of([&] { communicator.allocate(8, generous(), "more"); }), error);
        }
        const FaultRecord fault = communicator.fault().value();
        EXPECT_EQ(int(fault.code), int(ErrorCode::timeout));
        EXPECT_EQ(fault.operation, "expert_parallel::dispatch");
        EXPECT_EQ(fault.phase, "the counts");
        EXPECT_EQ(fault.rank, 0);
        EXPECT_EQ(fault.peer, 2);
        EXPECT_EQ(fault.waited_for, 7u);
        EXPECT_EQ(fault.seen, 6u);
        throw std::runtime_error(error);
      });
  EXPECT_EQ(without_seconds(errors[0]),
            "expert_parallel::dispatch: rank 0 waited # s for the counts of rank 2 (epoch 7, seen "
            "6): thread, running");
  for (const int rank : {1, 2, 3})
    EXPECT_EQ(errors[std::size_t(rank)], errors[0] + "; reported by rank 0");
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

TEST(Communicator, ASlotKeepsItsFirstRecord) {
  FaultSlot slot{};
  EXPECT_FALSE(read_fault(slot));
  FaultRecord record;
  record.text = "first";
  EXPECT_TRUE(record_first(slot, record));
  record.text = "second";
  EXPECT_FALSE(record_first(slot, record));
  EXPECT_EQ(read_fault(slot)->text, "first");
  slot.state = FaultSlot::kBeingWritten;  // and the writer was killed
  EXPECT_EQ(read_fault(slot)->text, "a rank was killed or stopped while it recorded a fault");
}

// All expire at once; whoever is first, all tell the same.
TEST(Communicator, ManyAtOnceAgreeOnOneRecord) {
  for (int round = 0; round < 10; ++round) {
    std::atomic<int> ready{0};
    std::vector<std::string> errors =
        with_communicators(Topology(4), [&](Communicator& communicator) {
          std::uint64_t word = 0;
          ++ready;
          while (ready < 4) std::this_thread::yield();
          communicator.wait_at_least(&word, 1, brief(20),
                                     {"test", "the word", (communicator.rank() + 1) % 4, "count"});
        });
    for (std::string& error : errors) {
      const std::size_t suffix = error.find("; reported by");
      if (suffix != std::string::npos) error.resize(suffix);
    }
    EXPECT_THAT(errors[0], HasSubstr(" (count 1, seen 0): thread, running"));
    EXPECT_THAT(errors, Each(errors[0]));
  }
}

TEST(Communicator, AWaitOnNoRankInParticular) {
  InProcessWorld world(1);
  Communicator communicator(world.transport(0), Topology(1), generous());
  std::uint64_t word = 3;
  EXPECT_EQ(communicator.wait_at_least(&word, 2, generous(), {"test", "the word"}), 3u);
  EXPECT_EQ(without_seconds(error_of([&] {
              communicator.wait_at_least(&word, 4, brief(100), {"test", "the word", -1, "count"});
            })),
            "test: rank 0 waited # s for the word (count 4, seen 3)");
}

TEST(Communicator, AnAbsentRankAtABarrierIsNamed) {
  std::latch arrive(2);
  const std::vector<std::string> errors =
      with_communicators(Topology(4, 2), [&](Communicator& communicator) {
        communicator.world_barrier(generous(), "test");
        if (communicator.rank() == 3) {
          while (!communicator.fault()) sleep_ms(1);
        }
        const bool impatient = communicator.rank() == 0;
        communicator.rank() < 3 && !impatient ? arrive.count_down() : arrive.wait();
        communicator.world_barrier(impatient ? brief() : generous(), "expert_parallel::barrier");
      });
  for (const std::string& error : errors) {
    EXPECT_THAT(without_seconds(error), HasSubstr(" waited # s for the world barrier of rank 3 "
                                                  "(epoch 2, seen 1): thread, running"));
  }
}

TEST(Communicator, AClosedPeerEndsAWaitEarly) {
  const Deadline deadline = generous();
  InProcessWorld world(3);
  const std::vector<std::string> errors = on_threads(3, [&](int rank) {
    auto communicator =
        std::make_unique<Communicator>(world.transport(rank), Topology(3), deadline);
    if (rank == 1) return;
    communicator->world_barrier(deadline, "test");
  });
  EXPECT_EQ(errors[1], "");
  for (const int rank : {0, 2}) {
    EXPECT_THAT(
        errors[std::size_t(rank)],
        HasSubstr("for the world barrier of rank 1 (epoch 1, seen 0): thread, its transport "
                  "is closed"));
  }
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

// Rank 1 passes on what rank 2 has said, which may be gone by then.
TEST(Communicator, AWaitForWhatIsPassedOnLooksAtWhoWritesIt) {
  const std::vector<std::string> errors =
      with_communicators(Topology(3), [&](Communicator& communicator) {
        const auto memory = communicator.allocate(64, generous(), "words");
        if (communicator.rank() == 2) return;
        if (communicator.rank() == 1) {
          sleep_ms(200);
          const std::uint64_t word = 7;
          communicator.put_signal(*memory, 0, 0, 8, &word, sizeof(word), 0, word);
          sleep_ms(50);
          return;
        }
        auto* word = reinterpret_cast<std::uint64_t*>(memory->local());
        WaitName name{"expert_parallel::dispatch", "the counts", 2};
        name.writer = 1;
        EXPECT_EQ(communicator.wait_at_least(word, 7, generous(), name), 7u);
        communicator.wait_at_least(word, 8, generous(), name);
      });
  EXPECT_THAT(errors[0], ::testing::HasSubstr("for the counts of rank 1 (epoch 8, seen 7)"));
}

// What a rank wrote before it closed counts.
TEST(Communicator, APeerThatIsDoneMayClose) {
  for (int round = 0; round < 20; ++round) {
    expect_communicators_return(Topology(4, 2), [](Communicator& communicator) {
      communicator.world_barrier(generous(), "test");
      if (communicator.rank() == 0) sleep_ms(3);
      communicator.world_barrier(generous(), "test");
    });
  }
}

TEST(Communicator, AnyFaultCanBeNotifiedToAll) {
  const std::vector<std::string> errors =
      with_communicators(Topology(3), [](Communicator& communicator) {
        if (communicator.rank() == 1) {
          FaultRecord record;
          record.code = ErrorCode::resource;
          record.operation = "expert_parallel::dispatch";
          record.text = "no memory for the output " + std::string(2000, 'x');
          communicator.fail(record);
        }
        try {
          communicator.world_barrier(generous(), "test");
        } catch (const Error& error) {
          EXPECT_EQ(int(error.code()), int(ErrorCode::resource));
          EXPECT_EQ(error.operation(), "expert_parallel::dispatch");
          throw;
        }
      });
  EXPECT_THAT(errors, Each(HasSubstr("expert_parallel::dispatch: no memory for the output xxx")));
  EXPECT_THAT(errors[0], HasSubstr("xx; reported by rank 1"));
}

TEST(Communicator, AFailedAllocationBreaksIt) {
  std::latch arrives(1);
  const std::vector<std::string> errors =
      with_communicators(Topology(3), [&](Communicator& communicator) {
        if (communicator.rank() == 1) {  // waits for something else
          std::uint64_t word = 0;
          communicator.wait_at_least(&word, 1, generous(), {"test", "the word"});
        }
        const bool impatient = communicator.rank() == 0;
        impatient ? arrives.wait() : arrives.count_down();
        communicator.allocate(64, impatient ? brief() : generous(), "segment 2");
      });
  for (const std::string& error : errors) {
    EXPECT_THAT(
        without_seconds(error),
        HasSubstr(" waited # s for rank 1 at the allocation of segment 2: thread, running"));
  }
}

// After a fault with all ranks alive, a new communicator works over the same transports, and what
// the late rank still writes through the old one goes nowhere.
TEST(Communicator, IsMadeAnewOverTheSameTransports) {
  InProcessWorld world(3);
  std::atomic<bool> made{false};
  expect_all_return(3, [&](int rank) {
    const auto transport = world.transport(rank);
    Communicator old(transport, Topology(3), generous());
    const auto old_words = old.allocate(64, generous(), "words");
    if (rank == 1) {
      while (!old.fault()) sleep_ms(1);
    } else {
      EXPECT_NE(error_of([&] { old.world_barrier(brief(100), "test"); }), "");
    }
    Communicator communicator(transport, Topology(3), generous());
    const auto words = communicator.allocate(64, generous(), "words");
    const std::uint64_t value = 9;
    if (rank == 1) old.put_signal(*old_words, 0, 0, 8, &value, 8, 0, 9);
    for (int n = 0; n < 3; ++n) communicator.world_barrier(generous(), "test");
    EXPECT_EQ(*reinterpret_cast<std::uint64_t*>(words->local()), 0u);
    EXPECT_FALSE(communicator.fault());
    EXPECT_TRUE(old.fault());
  });
}

}  // namespace
}  // namespace winnow::expert_parallel
