// What ranks call together, with odd arguments on each: every call returns or throws an Error that
// says whose and which argument is at fault, nothing is read or written outside of a tensor, no
// rank waits in vain, and the next calls work. WINNOW_SOAK_ITERATIONS (200) pairs of a dispatch and
// a combine of expert_parallel::LowLatency; a failure names the WINNOW_SOAK_SEED that repeats it.
// Each tensor has a block of its size, so that AddressSanitizer sees the first byte outside.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tools/winnow/fuzz/tensors.h"
#include <gtest/gtest.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/generate.h"

namespace winnow {
namespace {

using fuzz::Bytes;
using fuzz::Tensors;

using namespace expert_parallel;

constexpr int kWorld = 3;

// Every rank's layer, for as long as the process lives.
struct World {
  explicit World(std::int64_t columns) : hidden(columns) {
    run([&](int rank) {
      layers[std::size_t(rank)] =
          std::make_unique<LowLatency>(world.transport(rank), world.store(),
                                       LowLatencyConfig{.max_tokens = 3,
                                                        .hidden = hidden,
                                                        .topk = 2,
                                                        .experts = 2 * kWorld,
                                                        .timeout = std::chrono::seconds(30)});
    });
  }
  static void run(const std::function<void(int)>& body) {
    std::array<std::thread, kWorld> ranks;
    for (int rank = 0; rank < kWorld; ++rank) {
      ranks[std::size_t(rank)] = std::thread([&body, rank] { body(rank); });
    }
    for (std::thread& rank : ranks) rank.join();
  }
  LowLatency& layer(int rank) { return *layers[std::size_t(rank)]; }

  std::int64_t hidden;
  InProcessWorld world{kWorld};
  std::array<std::unique_ptr<LowLatency>, kWorld> layers;
};

// The tensors of a rank: some as they should be, some as the bytes have them.
class RankTensors {
 public:
  RankTensors(Bytes& bytes, std::int64_t hidden)
      : odd_(bytes),
        odd_places_(bytes.take<std::uint32_t>() & bytes.take<std::uint32_t>() &
                    bytes.take<std::uint32_t>()),
        hidden_(hidden),
        tokens_(3 - bytes.take<std::uint8_t>() % 4) {}

  LowLatencyDispatchArgs dispatch(RowFormat format) {
    const bool plain = format == RowFormat::bf16, packed = format == RowFormat::fp8_ue8m0;
    LowLatencyDispatchArgs args;
    args.format = format;
    args.input = make(DType::bf16, {tokens_, hidden_});
    args.expert_indices = experts();
    args.output = make(plain ? DType::bf16 : DType::f8_e4m3, {2, 9, hidden_});
    if (!plain || is_odd()) {
      args.scales = make(packed ? DType::i32 : DType::f32, {2, 9, hidden_ / (packed ? 512 : 128)});
    }
    args.counts = make(DType::i32, {2});
    args.source_tokens = make(DType::i32, {2, 9});
    args.source_pairs = make(DType::i32, {2, 9});
    args.pair_rows = make(DType::i32, {kWorld, 3, 2});
    args.ranges = make(DType::i64, {2, kWorld});
    if (is_odd()) args.expert_statistics = make(DType::i32, {2});
    if (is_odd()) args.wait_statistics = make(DType::i64, {kWorld});
    return args;
  }

  // With what a dispatch of the same rank has written, or anything.
  LowLatencyCombineArgs combine(const LowLatencyDispatchArgs& dispatched) {
    LowLatencyCombineArgs args;
    args.expert_output = make(DType::bf16, {2, 9, hidden_});
    args.pair_rows = dispatched.pair_rows;
    if (is_odd()) args.pair_rows = make(DType::i32, {kWorld, 3, 2});
    args.expert_indices = is_odd() ? experts() : dispatched.expert_indices;
    const std::int64_t tokens =
        dispatched.expert_indices.rank() == 2 ? dispatched.expert_indices.size(0) : tokens_;
    args.weights = make(DType::f32, {tokens, 2});
    args.out = make(DType::bf16, {tokens, hidden_});
    if (is_odd()) args.wait_statistics = make(DType::i64, {kWorld});
    return args;
  }

 private:
  bool is_odd() {
    const bool odd = (odd_places_ & 1) != 0;
    odd_places_ >>= 1;
    return odd;
  }
  TensorView make(DType dtype, const std::vector<std::int64_t>& shape) {
    return is_odd() ? odd_(dtype, shape, true) : right_(dtype, shape, false);
  }
  ConstTensorView experts() {
    const bool odd = is_odd();
    const DType dtype = is_odd() ? DType::i64 : DType::i32;
    if (odd) return odd_(dtype, {tokens_, 2}, true);
    const TensorView indices = right_(dtype, {tokens_, 2}, false);
    for (std::int64_t token = 0; token < tokens_; ++token) {
      for (std::int64_t k = 0; k < 2; ++k) {
        const int expert = int((token + 3 * k) % (2 * kWorld));
        if (dtype == DType::i64) indices.at<std::int64_t>(token, k) = expert;
        if (dtype == DType::i32) indices.at<std::int32_t>(token, k) = expert;
      }
    }
    return indices;
  }

  Bytes none_{nullptr, 0};
  Tensors odd_, right_{none_};
  std::uint32_t odd_places_;
  std::int64_t hidden_, tokens_;
};

// What the calls of a rank are given; those that come as they should be, once more at the end.
struct Rank {
  Rank(Bytes& bytes, std::int64_t hidden, RowFormat common)
      : tensors(bytes, hidden), right(none, hidden) {
    const auto odd = bytes.take<std::uint8_t>();
    const auto format = odd % 16 == 1 ? static_cast<RowFormat>(odd / 16) : common;
    dispatch = tensors.dispatch(format);
    right_dispatch = right.dispatch(RowFormat::bf16);
    refuses = odd % 16 == 2;
    refuses_combine = odd % 16 == 3;
  }
  Bytes none{nullptr, 0};
  RankTensors tensors, right;
  LowLatencyDispatchArgs dispatch, right_dispatch;
  bool refuses = false, refuses_combine = false;
};

const Error& refusal() {
  static const Error error(ErrorCode::invalid_argument, "an engine", "no rows");
  return error;
}

// Whether the call was refused in the words that all ranks throw, or returned.
template <class Call>
bool attempt(const Call& call) {
  try {
    call();
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    EXPECT_FALSE(error.operation().empty()) << error.what();
    const std::string text = error.what();
    const bool of_all = text.find(": rank ") != text.npos || text.find("differs") != text.npos;
    const bool named = !error.argument().empty() || error.operation() == refusal().operation();
    EXPECT_TRUE(of_all || named) << text;
    return of_all;
  }
}

// A call, whole or in halves. A half that only this rank refuses is still pending: the call is
// received with `right`.
template <class Args, class Call>
void in_parts(bool halves, Args args, Args right, const Call& call) {
  if (!halves) {
    attempt([&] { call(args); });
    return;
  }
  args.part = CallPart::send;
  attempt([&] { args.sent = right.sent = call(args); });
  if (args.sent == LowLatencySent::none) return;
  args.part = right.part = CallPart::receive;
  args.refusal = nullptr;
  if (!attempt([&] { call(args); })) attempt([&] { call(right); });
}

void run_once(World& world, Bytes& bytes) {
  const bool halves = bytes.flag();
  const auto format =
      static_cast<RowFormat>(world.hidden == 8 ? 0 : bytes.take<std::uint8_t>() % 4);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.push_back(std::make_unique<Rank>(bytes, world.hidden, format));
  }
  World::run([&](int rank) {
    Rank& mine = *ranks[std::size_t(rank)];
    if (mine.refuses) mine.dispatch.refusal = &refusal();
    in_parts(halves, mine.dispatch, mine.right_dispatch,
             [&](const auto& args) { return world.layer(rank).dispatch(args); });
  });
  // One after another: they take their bytes from the same place.
  std::vector<LowLatencyCombineArgs> combines(kWorld);
  for (int rank = 0; rank < kWorld; ++rank) {
    Rank& mine = *ranks[std::size_t(rank)];
    combines[std::size_t(rank)] = mine.tensors.combine(mine.dispatch);
    if (mine.refuses_combine) combines[std::size_t(rank)].refusal = &refusal();
  }
  World::run([&](int rank) {
    Rank& mine = *ranks[std::size_t(rank)];
    const LowLatencyCombineArgs right = mine.right.combine(mine.right_dispatch);
    in_parts(halves, combines[std::size_t(rank)], right,
             [&](const auto& args) { return world.layer(rank).combine(args); });
    // Nothing is left of all this.
    EXPECT_NO_THROW(world.layer(rank).dispatch(mine.right_dispatch));
    EXPECT_NO_THROW(world.layer(rank).combine(mine.right.combine(mine.right_dispatch)));
  });
}

// Experts and rows of pairs that other threads of a caller rewrite while the calls run: the rows
// may be wrong, or the call refused, and nothing outside of the tensors is read or written.
TEST(OddRanks, LowLatencyRewrittenMeanwhile) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "this is a data race of the caller";
#endif
  constexpr int kCalls = 50;
  World world(512);
  Bytes none(nullptr, 0);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.push_back(std::make_unique<Rank>(none, world.hidden, RowFormat::bf16));
  }
  std::atomic<bool> ended = false;
  // Half of the time what is right, half of it one of the largest and smallest numbers, or a
  // repeat.
  const auto rewrite = [&ended]<class T>(const ConstTensorView& view, T /*type*/) {
    T* const numbers = const_cast<T*>(static_cast<const T*>(view.data()));
    const std::vector<T> right(numbers, numbers + view.numel());
    constexpr T kOdd[] = {std::numeric_limits<T>::max(), std::numeric_limits<T>::min(), T{100},
                          T{0}};
    for (std::size_t i = 0; !ended; ++i) {
      for (std::size_t at = 0; at < right.size(); ++at) {
        const T value = i % 2 == 0 ? right[at] : kOdd[i / 2 % 4];
        __atomic_store_n(numbers + at, value, __ATOMIC_RELAXED);
      }
    }
  };
  World::run([&](int rank) {
    Rank& mine = *ranks[std::size_t(rank)];
    world.layer(rank).dispatch(mine.dispatch);
  });
  std::vector<LowLatencyCombineArgs> combines;
  std::vector<std::thread> writers;
  for (const std::unique_ptr<Rank>& rank : ranks) {
    combines.push_back(rank->right.combine(rank->dispatch));
    writers.emplace_back([&, args = combines.back()] { rewrite(args.pair_rows, std::int32_t{}); });
    writers.emplace_back(
        [&, args = rank->dispatch] { rewrite(args.expert_indices, std::int32_t{}); });
  }
  std::atomic<std::int64_t> returned = 0;
  World::run([&](int rank) {
    const auto me = std::size_t(rank);
    for (int i = 0; i < kCalls; ++i) {
      attempt([&] {
        world.layer(rank).dispatch(ranks[me]->right_dispatch);
        ++returned;
      });
      attempt([&] {
        LowLatencyDispatchArgs args = ranks[me]->right_dispatch;
        args.expert_indices = ranks[me]->dispatch.expert_indices;
        world.layer(rank).dispatch(args);
        ++returned;
      });
      attempt([&] {
        world.layer(rank).combine(combines[me]);
        ++returned;
      });
    }
  });
  ended = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_GE(returned, kCalls * kWorld);  // those with their own experts, at least
}

TEST(OddRanks, LowLatency) {
  World worlds[] = {World(8), World(512)};
  const std::int64_t count = testing::environment_number("WINNOW_SOAK_ITERATIONS", 200);
  const std::int64_t seed = testing::environment_number("WINNOW_SOAK_SEED", 1);
  for (std::int64_t i = 0; i < count && !HasFailure(); ++i) {
    testing::Random random(std::uint64_t(seed + i));
    std::vector<std::uint8_t> drawn(2048);
    for (std::uint8_t& byte : drawn) byte = static_cast<std::uint8_t>(random.below(256));
    // From few odd tensors to many, and their bytes from short to long.
    drawn.resize(std::size_t(8 + random.below(2000)));
    Bytes bytes(drawn.data(), drawn.size());
    run_once(worlds[random.below(2)], bytes);
    if (HasFailure()) ADD_FAILURE() << "WINNOW_SOAK_ITERATIONS=1 WINNOW_SOAK_SEED=" << seed + i;
  }
}

}  // namespace
}  // namespace winnow
