// A rank whose host has no memory at some point of a collective call: each allocation of the rank
// fails in turn, and no rank waits for another one in vain.
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/expert_parallel/testing/on_each_device.h"

namespace {

// Allocations of this thread until one fails; negative: none does.
thread_local int g_until_failure = -1;
thread_local bool g_failed = false;

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (g_until_failure >= 0 && g_until_failure-- == 0) {
    g_failed = true;
    throw std::bad_alloc();
  }
  const std::size_t rounded = (bytes + alignment) / alignment * alignment;
  void* const memory = alignment <= alignof(std::max_align_t)
                           ? std::malloc(bytes == 0 ? 1 : bytes)
                           : std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// The allocations of the whole program, the library's included.
void* operator new(std::size_t bytes) { return allocate(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, std::size_t(alignment));
}
// Not inlined: next to an operator new that is not, g++ takes free() for a mistake.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace winnow::expert_parallel {
namespace {

using ::testing::HasSubstr;

constexpr const char* kText = "rank 1: out of memory in the call";

class HostMemory : public OnEachDevice {
 protected:
  // call(rank) on both ranks, again and again: the first allocation of rank 1 fails, then the
  // second one, and so on. Until the ranks exchange what they want, rank 1 refuses the call, and
  // later() works. Then it breaks the call, and later() too, for both; make() makes all anew.
  template <class Make, class Call, class Later>
  void fail_each_allocation(const World& world, const Make& make, const Call& call,
                            const Later& later) {
    make();
    int refused = 0, broken = 0;
    for (int allocation = 0;; ++allocation) {
      SCOPED_TRACE(allocation);
      ASSERT_LT(allocation, 1000);
      bool failed = false;
      const std::vector<Outcome> outcomes = world.run([&](int rank) {
        if (rank == 0) return call(rank);
        struct Failing {
          bool& failed;
          ~Failing() {
            g_until_failure = -1;
            failed = g_failed;
          }
        } failing{failed};
        g_failed = false;
        g_until_failure = allocation;
        call(rank);
      });
      const std::vector<Outcome> after = later();
      if (!failed) {  // the call needs no more allocations
        expect_all_return(outcomes);
        expect_all_return(after);
        break;
      }
      for (const Outcome& outcome : outcomes) {
        EXPECT_LT(outcome.seconds, 20);  // the deadline is a minute away
        if (!outcome.code) continue;     // rank 0 may have ended the call before rank 1 failed
        EXPECT_EQ(outcome.code, ErrorCode::resource) << outcome.text;
        EXPECT_THAT(outcome.text, HasSubstr("rank 1: "));
      }
      EXPECT_TRUE(outcomes[1].code) << "an allocation failed, and the call went on";
      if (!after[0].code) {
        ++refused;
        EXPECT_TRUE(outcomes[0].code) << "rank 0 took part in a call that rank 1 refused";
        expect_all_return(after);
        continue;
      }
      ++broken;
      EXPECT_THAT(outcomes[1].text, HasSubstr(kText));
      for (const Outcome& outcome : after) {
        EXPECT_EQ(outcome.code, ErrorCode::resource);
        EXPECT_THAT(outcome.text, HasSubstr(kText));
      }
      make();
    }
    EXPECT_GT(refused, 0);
    // A GPU's part of notify needs no memory of the host once the ranks have exchanged.
    EXPECT_TRUE(broken > 0 || device().type == DeviceType::cuda);
  }
};
INSTANTIATE_TEST_SUITE_P(Cpu, HostMemory, ::testing::Values(Device{}));
INSTANTIATE_TEST_SUITE_P(Gpu, HostMemory, ::testing::Values(kGpu));

TEST_P(HostMemory, OfADispatch) {
  World world(device(), 2);
  const auto make = [&] {
    world.make(small_config(2));
    world.dispatched([](int, Given&) {});  // makes what only a first call makes
    for (int rank = 0; rank < 2; ++rank) {
      world.give(rank, 3, 1);
      world.place(rank).wait();
    }
  };
  const auto dispatch = [&](int rank) { world.layer(rank).dispatch(world.given(rank).args); };
  // On a GPU the first barrier may come back before the fault is seen, and the second says it.
  fail_each_allocation(world, make, dispatch, [&] {
    world.barrier();
    for (int rank = 0; rank < 2; ++rank) world.place(rank).wait();
    return world.barrier();
  });
  expect_working(world);
}

TEST_P(HostMemory, OfNotify) {
  World world(device(), 2);
  world.make(small_config(2));  // for its places
  std::vector<std::unique_ptr<Notifier>> notifiers(2);
  std::vector<std::vector<Tensor>> tensors(2);
  std::vector<NotifyArgs> given(2);
  const auto counts = [&](int rank, DType dtype,
                          std::initializer_list<std::int64_t> shape) -> Tensor& {
    return tensors[std::size_t(rank)].emplace_back(world.place(rank).copy(Tensor(dtype, shape)));
  };
  for (int rank = 0; rank < 2; ++rank) {  // no tokens
    tensors[std::size_t(rank)].reserve(5);
    given[std::size_t(rank)] = {.tokens_per_rank = counts(rank, DType::i32, {2}),
                                .tokens_per_node = counts(rank, DType::i32, {1}),
                                .tokens_per_expert = counts(rank, DType::i32, {4}),
                                .is_token_in_rank = counts(rank, DType::u8, {3, 2}),
                                .stream = world.place(rank).stream(),
                                .recv_rank_prefix_sum = counts(rank, DType::i32, {2})};
    world.place(rank).wait();
  }
  const auto notify = [&](int rank) {
    notifiers[std::size_t(rank)]->notify(given[std::size_t(rank)]);
  };
  const auto notify_all = [&] { return world.run(notify); };
  const auto make = [&] {
    expect_all_return(world.run([&](int rank) {
      const NotifierConfig config{.experts = 4, .device = device()};
      notifiers[std::size_t(rank)].reset();
      notifiers[std::size_t(rank)] =
          std::make_unique<Notifier>(world.ranks().transport(rank), world.ranks().store(), config);
    }));
    expect_all_return(notify_all());  // makes what only a first call makes
  };
  fail_each_allocation(world, make, notify, notify_all);
}

}  // namespace
}  // namespace winnow::expert_parallel
