// The regions of a layer's calls, and memory that one rank uses alone, without a GPU and without an
// exchange: the test passes the headers from rank to rank.
#include "winnow/expert_parallel/layer/regions.h"

#include <deque>
#include <memory>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/memory/own_memory.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::ElementsAreArray;
using Sizes = std::vector<std::int64_t>;

// Ranks that make the same calls, but release their regions at different times.
class Ranks {
 public:
  explicit Ranks(int world, std::int64_t bytes) : ranks_(static_cast<std::size_t>(world)) {
    for (One& one : ranks_) {
      add(one, bytes);
      one.regions.start(world);
    }
  }

  int world() const { return static_cast<int>(ranks_.size()); }
  Regions& regions(int rank) { return ranks_[std::size_t(rank)].regions; }
  int growths() const { return growths_; }
  void begin() {
    ++call_;
    for (One& one : ranks_) one.regions.begin();
  }
  // These expect every rank to give the same answer, and return it.
  bool fits(const Sizes& bytes) {
    return same([&](One& one) { return one.regions.fits(bytes); });
  }
  bool use_kept(const Sizes& bytes) {
    return same([&](One& one) { return one.regions.use_kept(bytes); });
  }
  std::vector<Header> headers() {
    std::vector<Header> headers;
    for (One& one : ranks_) {
      one.regions.offer(headers.emplace_back());
      one.regions.sign(headers.back().options);
    }
    return headers;
  }
  void learn(const std::vector<Header>& received) {
    for (One& one : ranks_) one.regions.learn(call_, received);
  }
  void await() {
    awaited_ = headers();
    for (One& one : ranks_) one.regions.await(call_);
  }
  void read_awaited() {
    for (One& one : ranks_) {
      const std::uint64_t call = one.regions.take_awaited();
      if (call != 0) one.regions.keep(call, awaited_);
    }
  }
  void refuse(const std::vector<Header>& received) {
    for (One& one : ranks_) one.regions.refused(call_, received);
  }
  std::vector<Extent> reserve(const Sizes& bytes, std::int64_t room = 0) {
    std::vector<std::vector<std::int64_t>> message;
    std::vector<Extent> extents;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      extents = reserve_at(static_cast<int>(rank), bytes, room);
      std::vector<std::int64_t>& flat = message.emplace_back();
      for (const Extent& extent : extents) {
        flat.insert(flat.end(), {extent.segment, extent.offset, extent.bytes});
      }
      EXPECT_THAT(flat, ElementsAreArray(message.front())) << "rank " << rank;
    }
    return extents;
  }
  // On one rank only, as happens if the other ranks refuse the call.
  std::vector<Extent> reserve_at(int rank, const Sizes& bytes, std::int64_t room = 0) {
    One& one = ranks_[std::size_t(rank)];
    const std::vector<Extent> extents = one.regions.reserve("op", bytes, room, [&](auto grown) {
      if (rank == 0) ++growths_;
      return add(one, grown);
    });
    const Extent& mine = extents[std::size_t(rank)];
    one.used.push_back(one.regions.arena().take(mine.segment, mine.offset, mine.bytes));
    return extents;
  }
  void release(int rank, std::size_t which) {
    auto& used = ranks_[std::size_t(rank)].used;
    if (which < used.size()) used.erase(used.begin() + std::ptrdiff_t(which));
  }

 private:
  struct One {
    Regions regions;
    std::deque<std::shared_ptr<Region>> used;
  };
  std::int64_t add(One& one, std::int64_t bytes) {
    return one.regions.arena().add(
        transport_->allocate(static_cast<std::size_t>(bytes), Deadline(), "a segment"));
  }
  template <class Ask>
  bool same(const Ask& ask) {
    const bool first = ask(ranks_.front());
    for (std::size_t rank = 1; rank < ranks_.size(); ++rank) {
      EXPECT_EQ(ask(ranks_[rank]), first) << "rank " << rank;
    }
    return first;
  }

  InProcessWorld world_{1};
  std::shared_ptr<Transport> transport_ = world_.transport(0);
  std::vector<One> ranks_;
  std::vector<Header> awaited_;
  std::uint64_t call_ = 0;
  int growths_ = 0;
};

TEST(Regions, AreTakenFromTheFrontOfWhatWasOffered) {
  Ranks ranks(2, 4096);
  ranks.begin();
  EXPECT_TRUE(ranks.fits({4096, 1}));
  EXPECT_FALSE(ranks.fits({1, 4097}));
  std::vector<Extent> extents = ranks.reserve({300, 1});
  EXPECT_EQ(extents[0].offset, 0);
  extents = ranks.reserve({256, 256});
  EXPECT_EQ(extents[0].offset, 512);
  EXPECT_EQ(extents[1].offset, 256);
  EXPECT_EQ(ranks.growths(), 0);
}

TEST(Regions, GrowOnlyAfterLearn) {
  Ranks ranks(2, 4096);
  ranks.begin();
  testing::expect_error([&] { ranks.reserve({8192, 1}); }, ErrorCode::internal,
                        "op: no room without learn()");
  ranks.begin();
  ranks.learn(ranks.headers());
  const std::vector<Extent> extents = ranks.reserve({8192, 1}, 10'000);
  EXPECT_EQ(extents[0].segment, 1);
  EXPECT_GE(ranks.regions(0).arena().largest_segment(), 10'000);
  EXPECT_EQ(ranks.growths(), 1);
}

TEST(Regions, UseWhatAnEarlierCallOffered) {
  Ranks ranks(2, 4096);
  ranks.begin();
  ranks.reserve({4096, 4096});
  ranks.release(0, 0);
  ranks.release(1, 0);
  ranks.await();
  ranks.begin();
  EXPECT_FALSE(ranks.fits({1, 1}));
  EXPECT_FALSE(ranks.use_kept({1, 1}));  // before the offers are read
  ranks.read_awaited();
  EXPECT_FALSE(ranks.use_kept({1, 8192}));
  EXPECT_TRUE(ranks.use_kept({1, 4096}));
  EXPECT_TRUE(ranks.fits({1, 4096}));
  EXPECT_FALSE(ranks.use_kept({1, 1}));  // offers are used once
}

TEST(Regions, AreLearnedAgainAfterARefusedCall) {
  Ranks ranks(2, 4096);
  ranks.begin();
  ranks.reserve_at(0, {256, 256});  // rank 1 refuses before it reserves
  const std::vector<Header> received = ranks.headers();
  EXPECT_NE(received[0].options.regions, received[1].options.regions);
  ranks.refuse(received);
  ranks.begin();
  EXPECT_FALSE(ranks.fits({1, 1}));
  ranks.learn(ranks.headers());
  EXPECT_TRUE(ranks.fits({2048, 2048}));
  const std::vector<Extent> extents = ranks.reserve({256, 256});
  EXPECT_EQ(extents[0].offset, 256);
  EXPECT_EQ(extents[1].offset, 0);
}

// Whatever ranks release and whenever they learn, all choose the same regions, and these are free.
TEST(Regions, OfRandomCallsAreFreeOnEveryRank) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % unsigned(n)); };
    Ranks ranks(1 + below(4), 256 * (1 + below(16)));
    for (int call = 0; call < 40 && !::testing::Test::HasFailure(); ++call) {
      ranks.begin();
      Sizes bytes;
      for (int rank = 0; rank < ranks.world(); ++rank) bytes.push_back(1 + below(2048));
      if (!ranks.fits(bytes)) {
        ranks.read_awaited();
        ranks.use_kept(bytes);
      }
      const bool learns = !ranks.fits(bytes);
      if (learns) ranks.learn(ranks.headers());
      ranks.reserve(bytes, below(2) * 8192);
      if (!learns && below(2) == 0) ranks.await();
      for (int rank = 0; rank < ranks.world(); ++rank) {
        for (int i = below(3); i > 0; --i) ranks.release(rank, std::size_t(below(4)));
      }
    }
  }
}

TEST(OwnMemory, IsUsedAgainAndGrows) {
  InProcessWorld world(1);
  const std::shared_ptr<Transport> transport = world.transport(0);
  std::vector<std::int64_t> allocated;
  bool full = false;
  OwnMemory own(1024, [&](std::int64_t bytes) {
    if (full) throw Error(ErrorCode::resource, "op", "no memory");
    allocated.push_back(bytes);
    return transport->allocate(static_cast<std::size_t>(bytes), Deadline(), "memory");
  });
  std::shared_ptr<Region> first = own.keep(0);
  ASSERT_NE(first->data(), nullptr);
  const std::byte* place = first->data();
  first.reset();
  first = own.keep(1024);
  EXPECT_EQ(first->data(), place);
  const std::shared_ptr<Region> second = own.keep(1);  // allocates twice the largest segment
  EXPECT_THAT(allocated, ElementsAreArray({1024, 2048}));
  full = true;
  testing::expect_error([&] { own.keep(4096); }, ErrorCode::resource, "op: no memory");
  EXPECT_NE(own.keep(1024)->data(), nullptr);
}

}  // namespace
}  // namespace winnow::expert_parallel
