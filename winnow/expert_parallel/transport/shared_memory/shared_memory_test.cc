// Ranks as processes: what they share, and what remains when they are killed or stopped.
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
  void tell(const std::string& key, const std::string& value = "") const {
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
        .get("world/announce/" + std::to_string(rank), generous());
  }

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

TEST_F(SharedMemory, ProcessesExchangeWords) {
  auto ranks = start(4, [](const std::shared_ptr<Transport>& transport) {
    if (transport->name() != "shared_memory") return std::string("another transport");
    Communicator communicator(transport, Topology(4, 2), generous());
    return exchange(communicator);
  });
  EXPECT_THAT(answers(ranks), Each("right"));
  EXPECT_EQ(entries_of(folder_.path() / "rendezvous"), 1);  // who has met
}

// Two jobs of two ranks take the same folder and prefix by mistake, and make a layer once all four
// have come. Their launchers have said which job they are, or not.
class TwoJobs : public SharedMemory, public ::testing::WithParamInterface<bool> {
 protected:
  // What each rank says: "its own" where it has met its own job.
  std::vector<std::string> meet(int round) const {
    const std::string name = "round" + std::to_string(round);
    std::vector<RankProcess> processes;
    for (int caller = 0; caller < 4; ++caller) {
      processes.emplace_back([=, this] {
        if (GetParam()) setenv("WINNOW_JOB", std::to_string(caller / 2).c_str(), 1);
        all_come_to(name + "/begin", caller);
        std::this_thread::sleep_for(
            std::chrono::microseconds((caller * 7919 + round * 104729) % (1 + round % 5 * 500)));
        std::string said;
        const std::string error = error_of([&] { said = world_of(caller, name); });
        all_come_to(name + "/end", caller);  // a process that has ended is no second caller
        return error.empty() ? said : error;
      });
    }
    return answers(processes);
  }

 private:
  void all_come_to(const std::string& point, int caller) const {
    tell(point + std::to_string(caller));
    for (int other = 0; other < 4; ++other) await(point + std::to_string(other));
  }

  std::string world_of(int caller, const std::string& prefix) const {
    const int job = caller / 2, rank = caller % 2;
    FileStore store(folder_.path() / "rendezvous");
    const Deadline deadline(std::chrono::seconds(10));
    std::shared_ptr<Transport> transport;
    const std::string error =
        error_of([&] { transport = create_shared_memory(store, rank, 2, deadline, prefix); });
    all_come_to(prefix + "/met", caller);
    if (!error.empty()) return error;
    agree(*transport, store, "layer", {}, deadline);
    const auto memory = transport->allocate(8, deadline, "words");
    const auto number = static_cast<std::uint64_t>(1 + job);
    transport->put_signal(*memory, 1 - rank, 0, nullptr, 0, 0, number);
    while (load_acquire(reinterpret_cast<std::uint64_t*>(memory->local())) == 0) {
      if (deadline.expired()) return "nothing";
      sleep_ms(1);
    }
    return load_acquire(reinterpret_cast<std::uint64_t*>(memory->local())) == number
               ? "its own"
               : "another job";
  }
};

TEST_P(TwoJobs, ThatMeetGetTheErrorOrTheirOwnWorld) {
  int errors = 0;
  for (int round = 0; round < 40; ++round) {
    for (const std::string& said : meet(round)) {
      const bool error = said.find(": rank: want one caller as rank ") != std::string::npos ||
                         (GetParam() && said.find(": job: want the same on every rank, got ") !=
                                            std::string::npos);
      errors += error;
      EXPECT_TRUE(error || said == "its own") << "round " << round << ": " << said;
    }
  }
  EXPECT_GT(errors, 0);
}

INSTANTIATE_TEST_SUITE_P(SharedMemory, TwoJobs, ::testing::Bool(), [](const auto& one) {
  return one.param ? "OfKnownLaunchers" : "StartedByHand";
});

TEST_F(SharedMemory, TwoWorldsAtOnce) {
  auto a = start(3, exchange_over, "a");
  auto b = start(2, exchange_over, "b");
  EXPECT_THAT(answers(a), Each("right"));
  EXPECT_THAT(answers(b), Each("right"));
}

TEST_F(SharedMemory, AnAbsentRankAtCreationIsNamed) {
  std::vector<RankProcess> ranks;
  for (const int rank : {0, 2}) {
    ranks.emplace_back([&, rank] {
      if (rank == 0) await_announced(2);
      return create(rank, 3, rank == 0 ? brief() : generous())->name();
    });
  }
  EXPECT_THAT(answers(ranks),
              Each("expert_parallel::shared_memory: rank 1 has not arrived within 0.3 s"));
}

TEST_F(SharedMemory, AnAbsentRankAtAnAllocationIsNamed) {
  auto ranks = start(3, [&](const std::shared_ptr<Transport>& transport) {
    if (transport->rank() == 1) {
      await("over");
      transport->allocate(8, generous(), "the arena");
    }
    const bool impatient = transport->rank() == 0;
    impatient ? await("arrives") : tell("arrives");
    const std::string error =
        error_of([&] { transport->allocate(8, impatient ? brief() : generous(), "the arena"); });
    tell("over");
    return error;
  });
  const std::string pid = std::to_string(ranks[1].pid());
  for (const std::string& text : answers(ranks)) {
    EXPECT_THAT(without_seconds(text),
                HasSubstr(" waited # s for rank 1 at the allocation of the arena: process " + pid +
                          ", running"));
  }
}

// Memory without a name counts as a file there.
TEST_F(SharedMemory, ALimitOfFileSizesIsAnErrorOnEveryRank) {
  std::vector<RankProcess> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const rlimit limit{1000, 1000};  // what ranks write into the store is smaller
      if (rank == 0) setrlimit(RLIMIT_FSIZE, &limit);
      FileStore store(folder_.path() / "rendezvous");
      create_shared_memory(store, rank, 2, generous());
      return std::string("made");
    });
  }
  EXPECT_THAT(answers(ranks), Each(::testing::MatchesRegex(
                                  "expert_parallel::shared_memory: rank 0: no [0-9]+ bytes "
                                  "of shared memory: File too large")));
}

TEST_F(SharedMemory, AnotherWorldSizeIsNamed) {
  std::vector<RankProcess> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const std::string error = error_of([&] { create(rank, rank == 1 ? 2 : 3, generous()); });
      tell("done" + std::to_string(rank));
      for (int other = 0; other < 3; ++other) await("done" + std::to_string(other));
      return error;
    });
  }
  for (const std::string& text : answers(ranks)) {
    EXPECT_THAT(text, StartsWith("expert_parallel::shared_memory: world_size: want the same on "
                                 "every rank, got "));
    EXPECT_THAT(text, HasSubstr("2 (rank 1)"));
  }
}

TEST_F(SharedMemory, AKilledRankEndsTheWaitsOfAllOthersEarly) {
  const Deadline deadline = generous();
  auto ranks = start(4, [&](const std::shared_ptr<Transport>& transport) {
    Communicator communicator(transport, Topology(4, 2), generous());
    communicator.world_barrier(generous(), "test");
    if (communicator.rank() == 2) raise(SIGKILL);
    std::uint64_t word = 0;
    // Rank 3 does not even wait for the killed one.
    const int peer = communicator.rank() == 3 ? 0 : 2;
    communicator.wait_at_least(&word, 1, generous(),
                               {"expert_parallel::dispatch", "the counts", peer});
    return std::string("no error");
  });
  const std::string pid = std::to_string(ranks[2].pid());
  const std::vector<std::string> texts = answers(ranks);
  EXPECT_EQ(texts[2], "killed by signal 9");
  for (const int rank : {0, 1, 3}) {
    EXPECT_THAT(without_seconds(texts[std::size_t(rank)]),
                HasSubstr(" waited # s for the counts of rank 2 (epoch 1, seen 0): process " + pid +
                          ", gone"));
  }
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

TEST_F(SharedMemory, AKilledRankEndsAnAllocationEarly) {
  for (const int killed : {0, 2}) {
    const Deadline deadline = generous();
    const std::string prefix = "world" + std::to_string(killed);
    auto ranks = start(
        3,
        [&](const std::shared_ptr<Transport>& transport) {
          if (transport->rank() == killed) raise(SIGKILL);
          transport->allocate(8, generous(), "the arena");
          return std::string("no error");
        },
        prefix);
    const std::string pid = std::to_string(ranks[std::size_t(killed)].pid());
    const std::vector<std::string> texts = answers(ranks);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == killed) continue;
      EXPECT_THAT(texts[std::size_t(rank)],
                  AnyOf(HasSubstr("process " + pid + ", gone"), HasSubstr("reported by rank")));
    }
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
}

// A process that ends between its world and its first layer.
TEST_F(SharedMemory, AKilledRankEndsAnAgreementEarly) {
  for (const int killed : {0, 2}) {
    const Deadline deadline = generous();
    auto ranks = start(
        3,
        [&](const std::shared_ptr<Transport>& transport) {
          if (transport->rank() == killed) raise(SIGKILL);
          FileStore store(folder_.path() / "rendezvous");
          agree(*transport, store, "layer", {}, generous());
          return std::string("no error");
        },
        "world" + std::to_string(killed));
    const std::string pid = std::to_string(ranks[std::size_t(killed)].pid());
    const std::vector<std::string> texts = answers(ranks);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == killed) continue;
      EXPECT_EQ(texts[std::size_t(rank)], "layer: rank " + std::to_string(killed) +
                                              " ended before all ranks had met: process " + pid +
                                              ", gone");
    }
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
}

// Rank 1 is stopped in the middle. The others get the error, make a new world without it and work
// there. Resumed, rank 1 gets the same error and writes what it had to write into the old memory.
TEST_F(SharedMemory, AStoppedRankIsToldWhenItResumesAndSpoilsNothing) {
  auto ranks = start(3, [&](const std::shared_ptr<Transport>& transport) {
    const int rank = transport->rank();
    Communicator communicator(transport, Topology(3), generous());
    const auto memory = communicator.allocate(4096, generous(), "the arena");
    communicator.world_barrier(generous(), "test");
    if (rank == 1) {
      raise(SIGSTOP);
      std::vector<std::byte> garbage(4096, std::byte(0xff));
      for (int to = 0; to < 3; ++to) communicator.put(*memory, 0, to, 0, garbage.data(), 4096);
      const std::string error =
          error_of([&] { communicator.world_barrier(generous(), "expert_parallel::combine"); });
      tell("resumed");
      return error;
    }
    const bool impatient = rank == 0;
    if (impatient) await("stopped");
    impatient ? await("arrives") : tell("arrives");
    const std::string error = error_of([&] {
      communicator.world_barrier(impatient ? brief() : generous(), "expert_parallel::combine");
    });
    const auto second = create(rank / 2, 2, generous(), "world of the survivors");
    Communicator survivors(second, Topology(2), generous());
    const auto new_memory = survivors.allocate(4096, generous(), "the arena");
    survivors.world_barrier(generous(), "test");
    tell("survived" + std::to_string(rank));
    await("resumed");
    for (std::size_t n = 0; n < 4096; ++n) {
      if (new_memory->local()[n] != std::byte(0)) return std::string("spoiled");
      if (memory->local()[n] != std::byte(0xff)) return std::string("wrong memory");
    }
    const std::string worked = exchange(survivors);
    return worked == "right" ? error : worked;
  });
  ranks[1].await_stopped();
  tell("stopped");
  await("survived0");
  await("survived2");
  const std::string pid = std::to_string(ranks[1].pid());
  ranks[1].signal(SIGCONT);
  for (std::string& text : answers(ranks)) {
    EXPECT_THAT(
        without_seconds(text),
        HasSubstr(" waited # s for the world barrier of rank 1 (epoch 2, seen 1): process " + pid +
                  ", stopped"));
  }
}

// Rank 1 is stopped before it opens the memory of rank 0, which gives it up meanwhile: its number
// is another file's then.
TEST_F(SharedMemory, ARankThatIsLateAtTheOpeningTakesNoOtherFile) {
  class StoppingStore : public FileStore {
   public:
    using FileStore::FileStore;
    void remove(const std::string& key) override {  // the last step of the agreement
      FileStore::remove(key);
      if (key.find("announce") != std::string::npos) raise(SIGSTOP);
    }
  };
  constexpr std::size_t kBytes = 1 << 20;
  RankProcess late([this] {
    StoppingStore store(folder_.path() / "rendezvous");
    create_shared_memory(store, 1, 2, generous(), "world");
    return std::string("it has a world");
  });
  RankProcess first([this] {
    await_announced(1);
    const std::string error = error_of([&] { create(0, 2, brief(1000)); });
    const int other = memfd_create("other", 0);
    if (error.empty() || ftruncate(other, kBytes) != 0) return std::string("no other file");
    tell("given up");
    await("late");
    std::vector<std::byte> bytes(kBytes, std::byte(1));
    if (pread(other, bytes.data(), kBytes, 0) != ssize_t(kBytes)) return std::string("not read");
    return std::string(bytes == std::vector<std::byte>(kBytes) ? "kept" : "spoiled");
  });
  await("given up");
  late.signal(SIGCONT);
  EXPECT_THAT(late.wait(), HasSubstr("cannot open the memory of rank 0"));
  tell("late");
  EXPECT_EQ(first.wait(), "kept");
}

// A kill at any moment of a creation: the others get an error in time, and the next creation under
// the same prefix works, although the dead one's keys may still be there.
TEST_F(SharedMemory, AKillAtAnyMomentOfACreationLeavesNothing) {
  const int shared_before = entries_of("/dev/shm");
  int failed = 0;
  for (int round = 0; round < 16; ++round) {
    const int victim = round % 3;
    std::vector<RankProcess> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        const auto transport = create(rank, 3, brief(250));
        transport->allocate(8, brief(250), "the arena");
        return std::string("made");
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(500 * round));
    ranks[std::size_t(victim)].signal(SIGKILL);
    const std::vector<std::string> texts = answers(ranks);
    for (int rank = 0; rank < 3; ++rank) {
      const std::string& text = texts[std::size_t(rank)];
      const bool error = text.find("expert_parallel::") == 0;
      failed += error;
      EXPECT_TRUE(error || text == "made" || (rank == victim && text == "killed by signal 9"))
          << text;
    }
  }
  EXPECT_GT(failed, 0);
  auto ranks = start(3, exchange_over);
  EXPECT_THAT(answers(ranks), Each("right"));
  EXPECT_EQ(entries_of("/dev/shm"), shared_before);
  // The key of the world that has met, and perhaps the temporary file of one that was being
  // written.
  EXPECT_LE(entries_of(folder_.path() / "rendezvous"), 2);
}

TEST_F(SharedMemory, AHundredWorldsLeakNothing) {
  const int shared_before = entries_of("/dev/shm");
  std::vector<RankProcess> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      int files = 0, maps = 0;
      for (int n = 0; n < 105; ++n) {
        if (n == 5) {
          files = open_files();
          maps = mappings("/memfd:");
        }
        const auto transport = create(rank, 2, generous());
        const auto a = transport->allocate(100'000, generous(), "a");
        const auto b = transport->allocate(5'000'000, generous(), "b");
        std::memset(a->local(), 1, a->bytes());
        std::memset(b->peer(1 - rank), 1, 4096);
      }
      return std::to_string(open_files() - files) + " files, " +
             std::to_string(mappings("/memfd:") - maps) + " mappings";
    });
  }
  EXPECT_THAT(answers(ranks), Each("0 files, 0 mappings"));
  EXPECT_EQ(entries_of("/dev/shm"), shared_before);
  EXPECT_EQ(entries_of(folder_.path() / "rendezvous"), 1);  // who has met
}

// The child of a rank has the memory but is not the rank: it may neither use the transport nor, at
// its end, close it.
TEST_F(SharedMemory, AChildOfARankDisturbsNobody) {
  auto ranks = start(2, [&](const std::shared_ptr<Transport>& given) {
    std::shared_ptr<Transport> transport = given;
    std::string said = "nothing";
    if (transport->rank() == 0) {
      const auto* keep = &given;  // the only other owner
      RankProcess child([&, keep]() -> std::string {
        const std::string error = error_of([&] { transport->allocate(8, generous(), "x"); });
        transport.reset();
        const_cast<std::shared_ptr<Transport>*>(keep)->reset();
        return error;
      });
      said = child.wait();
      sleep_ms(100);  // rank 1 waits and looks whether this one is closed
    }
    transport->allocate(8, generous(), "y");
    return said;
  });
  const std::vector<std::string> texts = answers(ranks);
  EXPECT_THAT(texts[0], HasSubstr("used after fork() in the child: rank 0 is the parent"));
  EXPECT_EQ(texts[1], "nothing");
}

}  // namespace
}  // namespace winnow::expert_parallel
