// The reason of an error is the same on every rank, whichever has found it.
#include <functional>
#include <latch>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"
#include "winnow/expert_parallel/testing/test_agreement.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;

// Of what each rank throws.
std::vector<ErrorReason> reasons(int ranks, const std::function<void(int rank)>& body) {
  std::vector<ErrorReason> found(std::size_t(ranks), ErrorReason::none);
  expect_all_return(ranks, [&](int rank) {
    try {
      body(rank);
    } catch (const Error& error) {
      found[std::size_t(rank)] = error.reason();
    }
  });
  return found;
}

// Rank 0 finds it, and rank 1 learns of it.
TEST(ErrorReason, OfAWait) {
  for (const bool closes : {false, true}) {
    InProcessWorld world(3);
    std::latch over(2);
    const auto found = reasons(3, [&](int rank) {
      auto communicator =
          std::make_unique<Communicator>(world.transport(rank), Topology(3), generous());
      if (rank == 2) {
        if (closes) communicator.reset();
        return over.wait();
      }
      try {
        communicator->world_barrier(rank == 0 && !closes ? brief() : generous(), "test");
      } catch (...) {
        over.count_down();
        throw;
      }
    });
    const ErrorReason reason = closes ? ErrorReason::peer_gone : ErrorReason::absent;
    EXPECT_EQ(found[0], reason);
    EXPECT_EQ(found[1], reason);
  }
}

TEST(ErrorReason, OfAnAllocation) {
  InProcessWorld world(2);
  std::latch over(1);
  EXPECT_EQ(reasons(2,
                    [&](int rank) {
                      const auto transport = world.transport(rank);
                      if (rank == 1) return over.wait();
                      try {
                        transport->allocate(8, brief(), "the arena");
                      } catch (...) {
                        over.count_down();
                        throw;
                      }
                    })[0],
            ErrorReason::absent);
  InProcessWorld other(2);
  EXPECT_THAT(reasons(2,
                      [&](int rank) {
                        other.transport(rank)->allocate(std::size_t(8 + rank), generous(), "x");
                      }),
              Each(ErrorReason::arguments_differ));
}

TEST(ErrorReason, OfDifferentCalls) {
  InProcessWorld world(2);
  std::latch over(2);
  EXPECT_THAT(reasons(2,
                      [&](int rank) {
                        Communicator one(world.transport(rank), Topology(2), generous());
                        Communicator two(world.transport(rank), Topology(2), generous());
                        Communicator& mine = rank == 0 ? one : two;
                        try {
                          mine.call("call", [&] { mine.world_barrier(generous(), "call"); });
                        } catch (...) {
                          over.arrive_and_wait();
                          throw;
                        }
                      }),
              Each(ErrorReason::call_order));
}

thread_local bool t_interrupt = false;

TEST(ErrorReason, OfAnInterrupt) {
  struct Interrupt {};
  set_interrupt_hook([] {
    if (t_interrupt) throw Interrupt();
  });
  InProcessWorld world(2);
  std::latch interrupted(1);
  EXPECT_EQ(reasons(2,
                    [&](int rank) {
                      Communicator communicator(world.transport(rank), Topology(2), generous());
                      t_interrupt = rank == 1;
                      if (rank == 0) interrupted.wait();
                      try {
                        communicator.world_barrier(generous(), "test");
                      } catch (const Interrupt&) {
                        interrupted.count_down();
                        sleep_ms(300);  // it has not left the world
                      }
                    })[0],
            ErrorReason::interrupted);
  set_interrupt_hook(nullptr);
}

TEST(ErrorReason, OfAnAgreement) {
  MemoryStore differ, absent, callers;
  EXPECT_THAT(reasons(2,
                      [&](int rank) {
                        AgreementRequest request = request_of(rank, 2);
                        if (rank == 1) request.same[0].second = "64";
                        try {
                          agree(differ, request, generous());
                        } catch (const Error& error) {
                          EXPECT_EQ(error.details().differing, "hidden");
                          throw;
                        }
                      }),
              Each(ErrorReason::arguments_differ));
  EXPECT_THAT(reasons(2,
                      [&](int rank) {
                        if (rank == 1) await_announced(absent, {0});
                        agree(absent, request_of(rank, 3), rank == 1 ? brief() : generous());
                      }),
              Each(ErrorReason::absent));
  EXPECT_THAT(reasons(2, [&](int) { agree(callers, request_of(1, 2), generous()); }),
              Each(ErrorReason::two_callers));
}

}  // namespace
}  // namespace winnow::expert_parallel
