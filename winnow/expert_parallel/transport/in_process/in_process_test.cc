// Ranks as threads: memory, puts and their order, and every way in which an allocation can fail.
#include "winnow/expert_parallel/transport/in_process/in_process.h"

#include <algorithm>
#include <cstring>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using testing::expect_error;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::uint64_t* word_at(SymmetricMemory& memory, std::size_t offset) {
  return reinterpret_cast<std::uint64_t*>(memory.local() + offset);
}

void wait_for(const std::uint64_t* word, std::uint64_t value) {
  const Deadline deadline = generous();
  // Spins first: a reader that is slow to notice would not notice a wrong order either.
  for (int spin = 0; spin < 10'000 && load_acquire(word) < value; ++spin) {
  }
  while (load_acquire(word) < value) {
    if (deadline.expired()) throw std::runtime_error("the word never came");
    std::this_thread::yield();
  }
}

TEST(InProcess, TransportsKnowTheirWorld) {
  InProcessWorld world(3);
  EXPECT_EQ(world.world_size(), 3);
  const auto transport = world.transport(1);
  EXPECT_EQ(transport->rank(), 1);
  EXPECT_EQ(transport->world_size(), 3);
  EXPECT_EQ(transport->name(), "in_process");
  EXPECT_EQ(transport, world.transport(1));
  EXPECT_EQ(transport->world_id(), world.transport(0)->world_id());
  EXPECT_NE(transport->world_id(), InProcessWorld(3).transport(1)->world_id());
  world.store()->set("key", "value");
  EXPECT_EQ(world.store()->get("key", Deadline::now()), "value");
}

TEST(InProcess, DescribesItsPeers) {
  InProcessWorld world(3);
  const auto first = world.transport(0);
  world.transport(1);  // and closed again
  const auto third = world.transport(2);
  EXPECT_EQ(third->describe_peer(0), "thread, running");
  EXPECT_EQ(third->describe_peer(1), "thread, its transport is closed");
  EXPECT_EQ(InProcessWorld(2).transport(0)->describe_peer(1), "thread, not there yet");
  EXPECT_FALSE(third->peer_gone(0));
  EXPECT_TRUE(third->peer_gone(1));
  expect_error([&] { world.transport(1); }, ErrorCode::invalid_argument,
               "expert_parallel::InProcessWorld: the transport of rank 1 was closed: make a new "
               "world of all ranks");
}

TEST(InProcess, SaysWhatIsWrong) {
  expect_error([] { InProcessWorld(0); }, ErrorCode::invalid_argument,
               "expert_parallel::InProcessWorld: world_size: want 1 or more, got 0");
  InProcessWorld world(2);
  for (const int rank : {-1, 2}) {
    expect_error(
        [&] { world.transport(rank); }, ErrorCode::invalid_argument,
        "expert_parallel::InProcessWorld: rank: want in [0, 2), got " + std::to_string(rank));
  }
}

TEST(InProcess, MemoryIsZeroAlignedAndTheSameSeenFromEveryRank) {
  constexpr int kRanks = 5;
  constexpr std::size_t kBytes = 10'000;
  InProcessWorld world(kRanks);
  std::vector<std::shared_ptr<SymmetricMemory>> memories(kRanks);
  expect_all_return(kRanks, [&](int rank) {
    const auto transport = world.transport(rank);
    for (int n = 0; n < 3; ++n) {
      memories[std::size_t(rank)] = transport->allocate(kBytes, generous(), "memory");
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    SymmetricMemory& memory = *memories[std::size_t(rank)];
    EXPECT_EQ(memory.bytes(), kBytes);
    EXPECT_EQ(memory.local(), memory.peer(rank));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.local()) % 4096, 0u);
    for (int peer = 0; peer < kRanks; ++peer) {
      EXPECT_EQ(memory.peer(peer), memories[std::size_t(peer)]->local());
    }
    for (std::size_t n = 0; n < kBytes; ++n) ASSERT_EQ(memory.local()[n], std::byte(0));
    std::memset(memory.local(), rank + 1, kBytes);
  }
  for (int rank = 0; rank < kRanks; ++rank) {  // nobody has written into another's
    for (std::size_t n = 0; n < kBytes; ++n) {
      ASSERT_EQ(memories[std::size_t(rank)]->local()[n], std::byte(rank + 1));
    }
  }
}

TEST(InProcess, MemoryOutlivesItsWorld) {
  std::shared_ptr<SymmetricMemory> memory;
  {
    InProcessWorld world(1);
    memory = world.transport(0)->allocate(4096, generous(), "memory");
  }
  std::memset(memory->peer(0), 1, memory->bytes());
  EXPECT_EQ(memory->local()[4095], std::byte(1));
}

TEST(InProcess, PutsStayInsideTheMemory) {
  InProcessWorld world(1);
  const auto transport = world.transport(0);
  const auto memory = transport->allocate(64, generous(), "memory");
  const std::uint64_t value = 5;
  transport->put(*memory, 0, 56, &value, 8);
  EXPECT_EQ(*word_at(*memory, 56), 5u);
  transport->put_signal(*memory, 0, 0, nullptr, 0, 8, 7);  // a signal alone
  EXPECT_EQ(*word_at(*memory, 8), 7u);
  const auto put = [&](std::size_t offset, std::size_t bytes) {
    transport->put(*memory, 0, offset, &value, bytes);
  };
  expect_error([&] { put(57, 8); }, ErrorCode::invalid_argument,
               "expert_parallel::put: offset: want a range inside the 64 bytes of memory, got 8 "
               "bytes at 57");
  EXPECT_THROW(put(65, 0), Error);
  EXPECT_THROW(put(8, std::size_t(-8)), Error);  // the sum overflows
  EXPECT_THROW(put(std::size_t(-8), 16), Error);
  expect_error([&] { transport->put(*memory, 1, 0, &value, 8); }, ErrorCode::invalid_argument,
               "expert_parallel::Transport: rank: want in [0, 1), got 1");
  expect_error([&] { transport->put_signal(*memory, 0, 0, &value, 8, 12, 1); },
               ErrorCode::invalid_argument,
               "expert_parallel::put_signal: signal_offset: want a multiple of 8, got 12");
  EXPECT_THROW(transport->put_signal(*memory, 0, 0, &value, 8, 64, 1), Error);
}

// Every rank sends to every other at once; who sees the signal sees the data. Under ThreadSanitizer
// this proves that the words order everything.
TEST(InProcess, SignalsComeAfterTheirData) {
  constexpr int kRanks = 4, kRounds = 200;
  constexpr std::ptrdiff_t kWords = 4096;
  constexpr std::size_t kBytes = kWords * 8;
  // Memory: an inbox per source, then the signals, then how far the readers are.
  constexpr std::size_t kSignals = kRanks * kBytes, kRead = kSignals + kRanks * 8;
  InProcessWorld world(kRanks);
  expect_all_return(kRanks, [&](int rank) {
    const auto transport = world.transport(rank);
    const auto memory = transport->allocate(kRead + kRanks * 8, generous(), "boxes");
    const auto at = [](int source) { return static_cast<std::size_t>(source); };
    std::vector<std::uint64_t> data(kWords);
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      for (int n = 1; n < kRanks; ++n) {
        const int target = (rank + n) % kRanks;
        wait_for(word_at(*memory, kRead + at(target) * 8), round - 1);
        std::fill(data.begin(), data.end(), round * 100 + at(rank));
        transport->put(*memory, target, at(rank) * kBytes, data.data(), kBytes / 2);
        transport->put_signal(*memory, target, at(rank) * kBytes + kBytes / 2, data.data(),
                              kBytes / 2, kSignals + at(rank) * 8, round);
      }
      for (int n = 1; n < kRanks; ++n) {
        const int source = (rank + n) % kRanks;
        wait_for(word_at(*memory, kSignals + at(source) * 8), round);
        const std::uint64_t* box = word_at(*memory, at(source) * kBytes);
        if (box[kWords - 1] != round * 100 + at(source) ||  // what is written last, first
            std::count(box, box + kWords, round * 100 + at(source)) != kWords) {
          throw std::runtime_error("a signal came before its data");
        }
        transport->put_signal(*memory, source, 0, nullptr, 0, kRead + at(rank) * 8, round);
      }
    }
  });
}

TEST(InProcess, AnAbsentRankIsNamedOnEveryRankAndTheLateOneIsNotified) {
  constexpr int kRanks = 4;
  InProcessWorld world(kRanks);
  std::latch arrive(2), left(3);
  const std::vector<std::string> errors = on_threads(kRanks, [&](int rank) {
    const auto transport = world.transport(rank);
    if (rank == 0) arrive.wait();
    if (rank == 1 || rank == 3) arrive.count_down();
    if (rank == 2) left.wait();
    const std::string error =
        error_of([&] { transport->allocate(4096, rank == 0 ? brief() : generous(), "the arena"); });
    if (rank != 2) left.count_down();
    throw std::runtime_error(error);
  });
  EXPECT_THAT(without_seconds(errors[0]),
              StartsWith("expert_parallel::allocate: rank 0 waited # s for rank 2 at the "
                         "allocation of the arena: thread, "));
  for (const int rank : {1, 2, 3}) {  // one record for all
    EXPECT_EQ(errors[std::size_t(rank)], errors[0] + "; reported by rank 0");
  }

  InProcessWorld again(kRanks);
  expect_all_return(
      kRanks, [&](int rank) { again.transport(rank)->allocate(4096, generous(), "the arena"); });
}

TEST(InProcess, SeveralAbsentRanksAreAllNamed) {
  InProcessWorld world(4);
  const auto fourth = world.transport(3);
  const auto transport = world.transport(1);
  EXPECT_EQ(without_seconds(error_of([&] { transport->allocate(8, brief(50), "the arena"); })),
            "expert_parallel::allocate: rank 1 waited # s for ranks 0, 2, 3 at the allocation of "
            "the arena: rank 0: thread, not there yet; rank 2: thread, not there yet; rank 3: "
            "thread, running");
  // The same error at once from then on, on every rank.
  const Deadline deadline = generous();
  EXPECT_THAT(error_of([&] { transport->allocate(8, generous(), "more"); }),
              HasSubstr("for ranks 0, 2, 3 at the allocation of the arena"));
  EXPECT_THAT(error_of([&] { fourth->allocate(8, generous(), "more"); }),
              HasSubstr("; reported by rank 1"));
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

TEST(InProcess, AClosedRankEndsTheWaitEarly) {
  InProcessWorld world(2);
  const auto transport = world.transport(0);
  world.transport(1);
  const Deadline deadline = generous();
  EXPECT_THAT(error_of([&] { transport->allocate(8, deadline, "the arena"); }),
              HasSubstr("for rank 1 at the allocation of the arena: thread, its transport is "
                        "closed"));
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

TEST(InProcess, DifferingAllocationsAreAnErrorOnEveryRank) {
  for (const bool names : {false, true}) {
    InProcessWorld world(3);
    const std::vector<std::string> errors = on_threads(3, [&](int rank) {
      const auto transport = world.transport(rank);
      transport->allocate(rank == 1 && !names ? 8192 : 4096, generous(),
                          rank == 1 && names ? "scratch" : "the arena");
    });
    const std::string other = names ? "4096 bytes for scratch" : "8192 bytes for the arena";
    EXPECT_THAT(errors, Each(StartsWith("expert_parallel::allocate: the ranks differ: rank 0 "
                                        "allocates 4096 bytes for the arena, rank 1 " +
                                        other)));
  }
}

TEST(InProcess, ImpossibleSizesAreErrors) {
  for (const std::size_t bytes : {std::size_t(0), std::size_t(-1), std::size_t(1) << 62}) {
    InProcessWorld world(2);
    EXPECT_THAT(
        on_threads(
            2, [&](int rank) { world.transport(rank)->allocate(bytes, generous(), "the arena"); }),
        Each(HasSubstr("the arena: want at least 1 byte and what a machine can have")));
  }
  InProcessWorld world(2);  // mmap refuses this one on rank 0, and the other rank is told
  EXPECT_THAT(on_threads(2,
                         [&](int rank) {
                           world.transport(rank)->allocate(std::size_t(1) << 60, generous(), "x");
                         }),
              Each(HasSubstr("bytes of memory: Cannot allocate memory")));
}

TEST(InProcess, IsRefusedAfterFork) {
  InProcessWorld world(2);
  const auto transport = world.transport(0);
  RankProcess child([&]() -> std::string {
    const std::string error = error_of([&] { transport->allocate(8, generous(), "x"); });
    world = InProcessWorld(1);  // the child may let go of what it got
    return error;
  });
  EXPECT_EQ(
      child.wait(),
      "expert_parallel::Transport: used after fork() in the child: rank 0 is the parent; make "
      "a new world in the child");
}

}  // namespace
}  // namespace winnow::expert_parallel
