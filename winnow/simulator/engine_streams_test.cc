// What runs side by side: blocks of a grid, grids of several streams, and those of several host
// threads.
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>

#include <gmock/gmock.h>
#include <poll.h>

#include "winnow/core/error.h"
#include "winnow/simulator/engine_faults.h"
#include "winnow/simulator/launch.h"
#include "winnow/simulator/testing/simulate.h"

namespace winnow::engine_faults {
namespace {

class EngineStreams : public ::testing::TestWithParam<const char*> {
 protected:
  EngineStreams() : memory_(simulator::allocate(4 * kFaultWords), simulator::free) {
    simulator::settings().schedule = simulator::parse_schedule(GetParam());
    std::memset(memory_.get(), 0, 4 * kFaultWords);
  }
  std::uint64_t* words() const { return static_cast<std::uint64_t*>(memory_.get()); }
  std::uint32_t* halves() const { return static_cast<std::uint32_t*>(memory_.get()); }

 private:
  std::unique_ptr<void, void (*)(void*)> memory_;
};

// Any address names a stream.
char first_stream, second_stream;

TEST_P(EngineStreams, BlocksThatWaitForEachOther) {
  const unsigned blocks = simulator::settings().resident_clusters;
  queue_meeting(halves(), blocks);
  simulator::synchronize_all();
  EXPECT_EQ(words()[0], blocks);
}

TEST_P(EngineStreams, MoreBlocksThanAreResidentDeadlock) {
  queue_meeting(halves(), simulator::settings().resident_clusters + 1);
  EXPECT_THROW(simulator::synchronize_all(), simulator::Failure);
  EXPECT_NO_THROW(simulator::synchronize_all());
}

TEST_P(EngineStreams, KernelsOfTwoStreamsThatWaitForEachOther) {
  queue_exchange(&first_stream, words(), 0, 1, 5);
  queue_exchange(&second_stream, words(), 1, 0, 5);
  simulator::synchronize(simulator::last_operation(&first_stream));
  EXPECT_EQ(words()[0], 5u);
  simulator::synchronize_all();
  EXPECT_EQ(words()[1], 5u);
}

TEST_P(EngineStreams, KernelsOfOneStreamFollowEachOther) {
  queue_exchange(&first_stream, words(), 0, 1, 5);
  queue_exchange(&first_stream, words(), 1, 0, 5);
  EXPECT_THROW(simulator::synchronize_all(), simulator::Failure);
}

TEST_P(EngineStreams, AStreamWaitsForAnother) {
  queue_exchange(&first_stream, words(), 0, 0, 5);
  simulator::wait_in_stream(&second_stream, simulator::last_operation(&first_stream));
  std::uint64_t seen = 0;
  simulator::enqueue(&second_stream, [&] { seen = words()[0]; });
  simulator::synchronize(simulator::last_operation(&second_stream));
  EXPECT_EQ(seen, 5u);
}

TEST_P(EngineStreams, HostThreadsWhoseKernelsWaitForEachOther) {
  const auto run = [&](const void* stream, int mine, int other) {
    for (std::uint64_t round = 1; round <= 20; ++round) {
      queue_exchange(const_cast<void*>(stream), words(), mine, other, round);
      simulator::synchronize(simulator::last_operation(stream));
    }
  };
  simulator::run_hosts(
      2, [&](int host) { host == 0 ? run(&first_stream, 0, 1) : run(&second_stream, 1, 0); });
  EXPECT_EQ(words()[0], 20u);
  EXPECT_EQ(words()[1], 20u);
}

// However long a busy machine suspends them, no deadline of theirs expires; and one does if they do
// nothing but wait.
TEST(EngineHosts, HaveTheClockOfKernels) {
  using Clock = std::chrono::steady_clock;
  using std::chrono::milliseconds;
  simulator::run_hosts(2, [](int) {
    const auto begin = Clock::now();
    poll(nullptr, 0, 30);
    EXPECT_LT(Clock::now() - begin, milliseconds(1));
    while (Clock::now() - begin < milliseconds(300)) simulator::let_others_run();
  });
}

TEST(EngineHosts, LookUntilTheirTimeIsOverBehindAFailure) {
  using Clock = std::chrono::steady_clock;
  const std::unique_ptr<void, void (*)(void*)> words(simulator::allocate(4 * kFaultWords),
                                                     simulator::free);
  std::memset(words.get(), 0, 4 * kFaultWords);
  simulator::run_hosts(2, [&](int host) {
    const auto begin = Clock::now();
    if (host == 0) {
      queue_meeting(static_cast<std::uint32_t*>(words.get()),
                    simulator::settings().resident_clusters + 1);
      EXPECT_THROW(simulator::synchronize_all(), simulator::Failure);
    } else {
      while (Clock::now() - begin < std::chrono::seconds(60)) simulator::let_others_run();
    }
  });
}

// What tells a thread of the same GPU tells none of another rank, which has a GPU of its own.
TEST_P(EngineStreams, AReleaseOfTheGpuDoesNotReachAnotherRank) {
  queue_release_of_gpu(&first_stream, halves(), true);
  queue_release_of_gpu(&second_stream, halves(), false);
  EXPECT_NO_THROW(simulator::synchronize_all());
  simulator::run_hosts(2, [&](int host) {
    const void* const stream = host == 0 ? &first_stream : &second_stream;
    queue_release_of_gpu(const_cast<void*>(stream), halves(), host == 0);
    try {
      simulator::synchronize(simulator::last_operation(stream));
      ADD_FAILURE() << "there was no report";
    } catch (const simulator::Failure& failure) {
      EXPECT_EQ(failure.check(), "race");
    }
  });
}

// What a case has queued when it throws is no fault of the case behind it.
TEST(EngineCases, EndWithWhatTheyHaveQueued) {
  const auto run = [](const testing::Target&) -> testing::CaseOutcome {
    const std::unique_ptr<void, void (*)(void*)> words(simulator::allocate(4 * kFaultWords),
                                                       simulator::free);
    std::memset(words.get(), 0, 4 * kFaultWords);
    queue_meeting(static_cast<std::uint32_t*>(words.get()),
                  simulator::settings().resident_clusters + 1);
    throw Error(ErrorCode::timeout, "a case", "its kernels are queued");
  };
  const testing::Operation operation{"cases", "", {{"throws", "", run, true}}, {}};
  EXPECT_EQ(simulator::simulate(operation, "throws", {}).failed, "error");
  EXPECT_NO_THROW(simulator::synchronize_all());
}

// So does code that takes for a count what a kernel has not written.
TEST(EngineCases, FailByWhateverTheyThrow) {
  const auto run = [](const testing::Target&) -> testing::CaseOutcome {
    throw std::length_error("a count");
  };
  const testing::Operation operation{"cases", "", {{"throws", "", run, true}}, {}};
  const simulator::Simulated simulated = simulator::simulate(operation, "throws", {});
  EXPECT_EQ(simulated.failed, "error");
  EXPECT_EQ(simulated.report, "error: a count");
}

INSTANTIATE_TEST_SUITE_P(Schedules, EngineStreams,
                         ::testing::Values("eager", "late", "random:1", "starved:0"),
                         [](const auto& schedule) {
                           return std::string(schedule.param, std::strcspn(schedule.param, ":"));
                         });

}  // namespace
}  // namespace winnow::engine_faults
