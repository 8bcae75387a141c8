// Ranks that call different layers wait for each other in vain, and are told so at once.
#include <cstdint>
#include <latch>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

void call(Communicator& communicator, const char* operation, const Deadline& deadline) {
  communicator.call(operation, [&] { communicator.world_barrier(deadline, operation); });
}

// Both layers are broken then, and nobody learns of it by another rank's end.
TEST(CallOrder, RanksInDifferentLayersLearnOfIt) {
  InProcessWorld world(3);
  std::latch over(3);
  const Deadline deadline = generous();
  const std::vector<std::string> errors = on_threads(3, [&](int rank) {
    const auto transport = world.transport(rank);
    Communicator first(transport, Topology(3), generous());
    Communicator second(transport, Topology(3), generous());
    call(second, "one", deadline);
    if (rank == 1) sleep_ms(100);  // who is late is in no other call
    call(first, "one", deadline);
    const std::string error =
        error_of([&] { call(rank == 2 ? first : second, rank == 2 ? "two" : "three", deadline); });
    over.arrive_and_wait();
    EXPECT_THAT(error_of([&] { call(rank == 2 ? second : first, "four", deadline); }),
                HasSubstr("all ranks must make the same calls"));
    throw Error(ErrorCode::timeout, "", error);
  });
  const std::string two = "two of layer 1", three = "three of layer 2";
  EXPECT_THAT(errors,
              Each(AnyOf(HasSubstr("rank 2 calls " + two + " where rank 0 calls " + three),
                         HasSubstr("rank 0 calls " + three + " where rank 2 calls " + two),
                         HasSubstr("rank 1 calls " + three + " where rank 2 calls " + two))));
  EXPECT_THAT(errors, Each(HasSubstr(": all ranks must make the same calls in the same order")));
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

// A rank that waits in a call while the other one is in another, and comes nevertheless.
std::vector<std::string> meet_in_different_calls(bool known) {
  InProcessWorld world(2);
  return on_threads(2, [&](int rank) {
    const auto transport = world.transport(rank);
    Communicator first(transport, Topology(2), generous());
    const auto memory = first.allocate(16, generous(), "words");
    Communicator second(transport, Topology(2), generous());
    if (!known && rank == 0) first.forget_order();
    (rank == 0 ? first : second).call("call", [&] {
      if (rank == 0) sleep_ms(300);
      first.put_signal(*memory, 0, 1 - rank, 0, nullptr, 0, 8, 1);
      first.wait_at_least(reinterpret_cast<const std::uint64_t*>(memory->local() + 8), 1,
                          generous(), {"call", "the word", 1 - rank});
    });
  });
}

TEST(CallOrder, IsComparedOnlyWhereBothRanksHaveOne) {
  EXPECT_THAT(meet_in_different_calls(true)[1],
              HasSubstr(" where rank 0 calls call of layer 1: all ranks must make the same"));
  EXPECT_THAT(meet_in_different_calls(false), Each(""));
}

// Ranks that learned of a difference from each other, and gave up that call alone, go on.
TEST(CallOrder, IsThatOfTheLastCall) {
  InProcessWorld world(2);
  const std::vector<std::string> errors = on_threads(2, [&](int rank) {
    Communicator communicator(world.transport(rank), Topology(2), generous());
    communicator.call(rank == 0 ? "dispatch" : "combine", [] {});
    communicator.call("next", [&] {
      if (rank == 0) sleep_ms(300);
      communicator.world_barrier(generous(), "next");
    });
  });
  EXPECT_THAT(errors, Each(""));
}

// After a fault ranks may have made different numbers of calls; a new layer begins a new order.
TEST(CallOrder, BeginsAnewWithALayer) {
  InProcessWorld world(2);
  std::latch given_up(1), over(2);
  const std::vector<std::string> errors = on_threads(2, [&](int rank) {
    const auto transport = world.transport(rank);
    Communicator first(transport, Topology(2), generous());
    Communicator second(transport, Topology(2), generous());
    const std::string lonely = error_of([&] {
      if (rank == 0) call(first, "lonely", brief());
    });
    EXPECT_EQ(lonely.empty(), rank != 0);
    rank == 0 ? given_up.count_down() : given_up.wait();
    call(second, "next", generous());
    Communicator third(transport, Topology(2), generous());
    call(third, "last", generous());
    const std::string error =
        error_of([&] { call(rank == 0 ? second : third, "other", generous()); });
    over.arrive_and_wait();
    throw Error(ErrorCode::timeout, "", error);
  });
  EXPECT_THAT(errors, Each(HasSubstr(" calls other of layer ")));
}

}  // namespace
}  // namespace winnow::expert_parallel
