// A program interrupts a wait of one rank, and the others are told.

#include "winnow/core/interrupt.h"

#include <latch>
#include <memory>
#include <stdexcept>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::HasSubstr;

struct Interrupt : std::runtime_error {
  Interrupt() : std::runtime_error("interrupted here") {}
};
thread_local bool t_interrupt = false;

// Rank 1 waits in vain for rank 0, which comes when rank 1 has been interrupted.
class AnInterrupt : public ::testing::Test {
 protected:
  void SetUp() override {
    set_interrupt_hook([] {
      if (t_interrupt) throw Interrupt();
    });
  }
  void TearDown() override { set_interrupt_hook(nullptr); }

  template <class Wait>
  void expect_signalled(const std::string& operation, const Wait& wait) {
    InProcessWorld world(2);
    std::latch interrupted(1);
    const Deadline deadline = generous();
    const auto errors = on_threads(2, [&](int rank) {
      const std::shared_ptr<Transport> transport = world.transport(rank);
      t_interrupt = rank == 1;
      if (rank == 0) interrupted.wait();
      const std::string error = error_of([&] { wait(world, transport); });
      if (rank == 1) interrupted.count_down();
      if (rank == 1) sleep_ms(300);  // it has not left the world
      throw std::runtime_error(error);
    });
    EXPECT_EQ(errors[1], "interrupted here");
    EXPECT_THAT(errors[0], HasSubstr(operation + ": rank 1 was interrupted"));
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
};

TEST_F(AnInterrupt, EndsAnAllocationAndTheOthersAreNotified) {
  expect_signalled("expert_parallel::allocate", [](auto&, const auto& transport) {
    transport->allocate(8, generous(), "the arena");
  });
}

TEST_F(AnInterrupt, EndsAnAgreementAndTheOthersAreNotified) {
  expect_signalled("layer", [](auto& world, const auto& transport) {
    agree(*transport, *world.store(), "layer", {}, generous());
  });
}

TEST_F(AnInterrupt, EndsABarrierAndTheOthersAreNotified) {
  std::latch made(2), interrupted(1);
  InProcessWorld world(2);
  const Deadline deadline = generous();
  const auto errors = on_threads(2, [&](int rank) {
    Communicator communicator(world.transport(rank), Topology(2), generous());
    made.arrive_and_wait();
    t_interrupt = rank == 1;
    if (rank == 0) interrupted.wait();
    const std::string error =
        error_of([&] { communicator.world_barrier(generous(), "expert_parallel::barrier"); });
    if (rank == 1) interrupted.count_down();
    if (rank == 1) t_interrupt = false;
    // The communicator is broken for good, and says why.
    EXPECT_THAT(error_of([&] { communicator.check(); }),
                HasSubstr("expert_parallel::barrier: rank 1 was interrupted"));
    throw std::runtime_error(error);
  });
  EXPECT_EQ(errors[1], "interrupted here");
  EXPECT_EQ(errors[0], "expert_parallel::barrier: rank 1 was interrupted; reported by rank 1");
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

// Not only in waits: rank 1 is interrupted while it sends its rows.
TEST_F(AnInterrupt, EndsTheRowsOfACallAndTheOthersAreNotified) {
  constexpr std::int64_t kTokens = 4, kHidden = 128;
  std::latch made(2), interrupted(1);
  InProcessWorld world(2);
  const Deadline deadline = generous();
  const auto errors = on_threads(2, [&](int rank) {
    LowLatency layer(world.transport(rank), world.store(),
                     {.max_tokens = kTokens, .hidden = kHidden, .topk = 1, .experts = 2});
    const Tensor input(DType::bf16, {kTokens, kHidden}), experts(DType::i32, {kTokens, 1});
    const LowLatencyDispatchArgs args{
        .input = input, .expert_indices = experts, .part = CallPart::send};
    made.arrive_and_wait();
    if (rank == 0) interrupted.wait();
    if (rank == 1) sleep_ms(100);  // a look is due
    t_interrupt = rank == 1;
    const std::string error = error_of([&] { layer.dispatch(args); });
    if (rank == 1) interrupted.count_down();
    t_interrupt = false;
    EXPECT_THAT(error_of([&] { layer.dispatch(args); }),
                HasSubstr("expert_parallel::low_latency_dispatch: rank 1 was interrupted"));
    throw std::runtime_error(error);
  });
  EXPECT_EQ(errors[1], "interrupted here");
  EXPECT_EQ(errors[0],
            "expert_parallel::low_latency_dispatch: rank 1 was interrupted; reported by rank 1");
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

TEST_F(AnInterrupt, EndsTheWaitOfAStore) {
  const TemporaryFolder folder;
  const Deadline deadline = generous();
  t_interrupt = true;
  EXPECT_EQ(error_of([&] { MemoryStore().get("a key", generous()); }), "interrupted here");
  EXPECT_EQ(error_of([&] { FileStore(folder.path()).get("a key", generous()); }),
            "interrupted here");
  t_interrupt = false;
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

}  // namespace
}  // namespace winnow::expert_parallel
