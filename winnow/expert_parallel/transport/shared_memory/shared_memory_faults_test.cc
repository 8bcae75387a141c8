// Ranks as processes that are killed, stopped or late: the others get an error in time, and nothing
// remains.
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/transport/shared_memory/test_shared_memory.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

class SharedMemoryFaults : public SharedMemory {};

TEST_F(SharedMemoryFaults, AKilledRankEndsTheWaitsOfAllOthersEarly) {
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

TEST_F(SharedMemoryFaults, AKilledRankEndsAnAllocationEarly) {
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
TEST_F(SharedMemoryFaults, AKilledRankEndsAnAgreementEarly) {
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
TEST_F(SharedMemoryFaults, AStoppedRankIsNotifiedWhenItResumesAndSpoilsNothing) {
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
      signal("resumed");
      return error;
    }
    const bool impatient = rank == 0;
    if (impatient) await("stopped");
    impatient ? await("arrives") : signal("arrives");
    const std::string error = error_of([&] {
      communicator.world_barrier(impatient ? brief() : generous(), "expert_parallel::combine");
    });
    const auto second = create(rank / 2, 2, generous(), "world of the survivors");
    Communicator survivors(second, Topology(2), generous());
    const auto new_memory = survivors.allocate(4096, generous(), "the arena");
    survivors.world_barrier(generous(), "test");
    signal("survived" + std::to_string(rank));
    await("resumed");
    for (std::size_t n = 0; n < 4096; ++n) {
      if (new_memory->local()[n] != std::byte(0)) return std::string("spoiled");
      if (memory->local()[n] != std::byte(0xff)) return std::string("wrong memory");
    }
    const std::string worked = exchange(survivors);
    return worked == "right" ? error : worked;
  });
  ranks[1].await_stopped();
  signal("stopped");
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
TEST_F(SharedMemoryFaults, ARankThatIsLateAtTheOpeningTakesNoOtherFile) {
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
    signal("given up");
    await("late");
    std::vector<std::byte> bytes(kBytes, std::byte(1));
    if (pread(other, bytes.data(), kBytes, 0) != ssize_t(kBytes)) return std::string("not read");
    return std::string(bytes == std::vector<std::byte>(kBytes) ? "kept" : "spoiled");
  });
  await("given up");
  late.signal(SIGCONT);
  EXPECT_THAT(late.wait(), HasSubstr("cannot open the memory of rank 0"));
  signal("late");
  EXPECT_EQ(first.wait(), "kept");
}

// A kill at any moment of a creation: the others get an error in time, and the next job works in
// the same folder.
TEST_F(SharedMemoryFaults, AKillAtAnyMomentOfACreationLeavesNothing) {
  const int shared_before = entries_of("/dev/shm");
  int failed = 0;
  for (int round = 0; round < 16; ++round) {
    const int victim = round % 3;
    std::vector<RankProcess> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        setenv("WINNOW_JOB", ("round" + std::to_string(round)).c_str(), 1);
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
  EXPECT_EQ(keys_left(), 3);
}

}  // namespace
}  // namespace winnow::expert_parallel
