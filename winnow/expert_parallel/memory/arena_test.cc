// The arena of one rank: free extents, regions that outlive it, and segments that come and go.
#include "winnow/expert_parallel/memory/arena.h"

#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

class ArenaTest : public ::testing::Test {
 protected:
  std::int64_t add(std::int64_t bytes) {
    return arena_.add(
        transport_->allocate(static_cast<std::size_t>(bytes), Deadline(), "a segment"));
  }
  void expect_free_extent(std::int64_t segment, std::int64_t offset, std::int64_t bytes) {
    const Extent free_extent = arena_.largest_free();
    EXPECT_EQ(free_extent.segment, segment);
    EXPECT_EQ(free_extent.offset, offset);
    EXPECT_EQ(free_extent.bytes, bytes);
  }

  InProcessWorld world_{1};
  std::shared_ptr<Transport> transport_ = world_.transport(0);
  Arena arena_;
};

TEST_F(ArenaTest, RegionsAreRoundedUpAndGivenBack) {
  add(4096);
  expect_free_extent(0, 0, 4096);
  auto a = arena_.take(0, 0, 300);
  EXPECT_EQ(a->extent().bytes, 512);
  auto b = arena_.take(0, 512, 1);
  EXPECT_EQ(b->data() - a->data(), 512);
  expect_free_extent(0, 768, 4096 - 768);
  a.reset();
  expect_free_extent(0, 768, 4096 - 768);  // two free extents
  b.reset();
  expect_free_extent(0, 0, 4096);  // joined
}

TEST_F(ArenaTest, FreeExtentsJoinOnBothSides) {
  add(4096);
  std::vector<std::shared_ptr<Region>> regions;
  for (int i = 0; i < 16; ++i) regions.push_back(arena_.take(0, 256 * i, 256));
  EXPECT_EQ(arena_.largest_free().bytes, 0);
  for (const int i : {4, 6, 5}) regions[std::size_t(i)].reset();
  expect_free_extent(0, 4 * 256, 3 * 256);
  // A free extent that somebody else has taken since.
  auto taken = arena_.take(0, 4 * 256, 256);
  testing::expect_error([&] { arena_.take(0, 4 * 256, 256); }, ErrorCode::internal,
                        "expert_parallel::Arena: the hole that was offered is gone");
}

// A tensor may be destroyed between the offer of a free extent and its use.
TEST_F(ArenaTest, AnOfferedFreeExtentMayGrowMeanwhile) {
  add(4096);
  auto before = arena_.take(0, 0, 256);
  auto after = arena_.take(0, 3072, 1024);
  const Extent offered = arena_.largest_free();
  EXPECT_EQ(offered.offset, 256);
  before.reset();
  after.reset();
  auto region = arena_.take(0, 256, 2816);
  EXPECT_EQ(region->extent().offset, 256);
  expect_free_extent(0, 3072, 1024);
  EXPECT_EQ(arena_.take(0, 0, 256)->extent().bytes, 256);
  region.reset();
  expect_free_extent(0, 0, 4096);
}

TEST_F(ArenaTest, EmptySegmentsCanBeReleasedButNotTheNewest) {
  add(4096);
  auto in_first = arena_.take(0, 0, 256);
  add(8192);
  add(16384);
  EXPECT_EQ(arena_.bytes(), 4096 + 8192 + 16384);
  EXPECT_EQ(arena_.largest_segment(), 16384);
  const Extent free_extent = arena_.largest_free();
  EXPECT_EQ(free_extent.segment, 2);
  EXPECT_EQ(arena_.releasable(free_extent), 0b010u);
  in_first.reset();
  EXPECT_EQ(arena_.releasable(free_extent), 0b011u);
  EXPECT_EQ(arena_.releasable({0, 0, 256}), 0b010u);  // the free extent is about to be used
  arena_.release(0b010);
  EXPECT_EQ(arena_.bytes(), 4096 + 16384);
  EXPECT_EQ(arena_.releasable(free_extent), 0b01u);
  EXPECT_EQ(arena_.take(2, 0, 256)->extent().segment, 2);  // numbers stay
  testing::expect_error([&] { arena_.memory(1); }, ErrorCode::internal,
                        "expert_parallel::Arena: there is no segment 1");
}

TEST_F(ArenaTest, LocatesMemoryOfItsOwn) {
  add(4096);
  auto region = arena_.take(0, 0, 1024);
  const Extent found = arena_.locate(region->data() + 256, 768);
  EXPECT_EQ(found.segment, 0);
  EXPECT_EQ(found.offset, 256);
  EXPECT_EQ(arena_.locate(region->data() + 256, 4096).segment, -1);  // reaches beyond
  const std::byte elsewhere{};
  EXPECT_EQ(arena_.locate(&elsewhere, 1).segment, -1);
}

TEST_F(ArenaTest, RegionsOutliveItAndGoOnAnyThread) {
  add(4096);
  auto region = arena_.take(0, 0, 512);
  std::byte* data = region->data();
  arena_.close();
  EXPECT_EQ(arena_.bytes(), 0);
  for (int i = 0; i < 512; ++i) data[i] = std::byte{1};
  std::thread([&] { region.reset(); }).join();
}

TEST(TakeRegions, ComeFromTheFrontOfEachFreeExtent) {
  std::vector<Extent> free_extents = {{3, 256, 1024}, {4, 0, 512}};
  const std::vector<Extent> regions =
      take_regions(free_extents, std::vector<std::int64_t>{300, 512}, [](std::int64_t) -> Extent {
        ADD_FAILURE() << "there is room";
        return {};
      });
  EXPECT_EQ(regions[0].segment, 3);
  EXPECT_EQ(regions[0].offset, 256);
  EXPECT_EQ(regions[0].bytes, 300);
  EXPECT_EQ(regions[1].segment, 4);
  EXPECT_EQ(free_extents[0].offset, 256 + 512);  // rounded up
  EXPECT_EQ(free_extents[0].bytes, 1024 - 512);
  EXPECT_EQ(free_extents[1].bytes, 0);
}

TEST(TakeRegions, GrowOnceForTheLargestThatHasNoRoom) {
  std::vector<Extent> free_extents = {{0, 0, 4096}, {0, 0, 256}, {0, 0, 512}, {}};
  int grown = 0;
  const std::vector<Extent> regions = take_regions(
      free_extents, std::vector<std::int64_t>{256, 257, 512, 1000}, [&](std::int64_t missing) {
        ++grown;
        EXPECT_EQ(missing, 1024);
        return Extent{7, 0, 2048};
      });
  EXPECT_EQ(grown, 1);
  EXPECT_EQ(regions[0].segment, 0);  // a free extent that is large enough stays
  for (const std::size_t rank : {1, 2, 3}) EXPECT_EQ(regions[rank].segment, 7);
  EXPECT_EQ(free_extents[1].offset, 512);
  EXPECT_EQ(free_extents[3].bytes, 2048 - 1024);
}

}  // namespace
}  // namespace winnow::expert_parallel
