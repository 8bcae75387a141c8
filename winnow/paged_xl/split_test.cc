// How a decode step is dealt out to the warps of a GPU: every tile once, evenly, and within the
// workspace.
#include "winnow/paged_xl/split.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/testing/generate.h"

namespace winnow::paged_xl {
namespace {

constexpr int kTileTokens = 16, kHeads = 16;
constexpr Machine kMachine{.blocks = 132, .warps = 16, .max_parts = 129055};  // an H200, 64 MiB

int tiles_of(int length) { return (length + kTileTokens - 1) / kTileTokens; }

StepWork work_of(const std::vector<int>& context_lens) {
  StepWork work;
  for (const int length : context_lens) {
    work.tiles += tiles_of(length);
    work.longest = std::max(work.longest, length);
  }
  return work;
}

Split plan(const std::vector<int>& context_lens, const Machine& machine = kMachine) {
  return plan_split(work_of(context_lens), static_cast<int>(context_lens.size()), kHeads, 1,
                    machine);
}

std::vector<int> random_lengths(testing::Random& random, std::int64_t count, std::int64_t most) {
  std::vector<int> lengths;
  for (std::int64_t s = 0; s < count; ++s) {
    lengths.push_back(random.below(5) == 0 ? 0 : static_cast<int>(1 + random.below(most)));
  }
  return lengths;
}

TEST(Split, PartsMakeUpTheirContext) {
  Split split;
  for (const int part_tiles : {1, 4, 16, 100}) {
    split.part_tiles = part_tiles;
    for (const int tiles : {0, 1, 3, 4, 5, 16, 17, 1000}) {
      int sum = 0;
      for (int part = 0; part < split.parts_of(tiles); ++part) {
        EXPECT_GT(split.tiles_in(tiles, part), 0);
        EXPECT_LE(split.tiles_in(tiles, part), part_tiles);
        sum += split.tiles_in(tiles, part);
      }
      EXPECT_EQ(sum, tiles);
      EXPECT_EQ(split.tiles_in(tiles, split.parts_of(tiles)), 0);
      EXPECT_EQ(split.tiles_in(tiles, 1 << 29), 0);
    }
  }
}

// What each block gets when parts are dealt out by their first tile, whatever the lengths are.
TEST(Split, BlocksGetTheSameTilesWithinOnePart) {
  testing::Random random(1);
  for (int repeat = 0; repeat < 50; ++repeat) {
    const std::vector<int> lengths =
        random_lengths(random, 1 + random.below(80), 1 + random.below(20000));
    const Split split = plan(lengths);
    ASSERT_EQ(split.begin(0), 0);
    ASSERT_EQ(split.begin(split.blocks), split.line());
    std::vector<std::int64_t> given(static_cast<std::size_t>(split.blocks));
    std::int64_t at = 0;
    int block = 0;
    for (int head = 0; head < kHeads; ++head) {
      for (int part = 0; part < split.parts_of(tiles_of(work_of(lengths).longest)); ++part) {
        for (const int length : lengths) {
          const int tiles = split.tiles_in(tiles_of(length), part);
          if (tiles == 0) continue;
          while (at >= split.begin(block + 1)) ++block;
          given[static_cast<std::size_t>(block)] += tiles;
          at += tiles;
        }
      }
    }
    EXPECT_EQ(at, split.line());
    for (const std::int64_t tiles : given) {
      EXPECT_NEAR(double(tiles), double(split.line()) / split.blocks, split.part_tiles + 1);
    }
  }
}

TEST(Split, HugeLinesStayExact) {
  Split split;
  split.tiles = std::int64_t{1} << 44;
  split.heads = 65535;
  split.blocks = 132;
  EXPECT_EQ(split.begin(132), split.line());
  for (int block = 0; block < 132; ++block) {
    EXPECT_NEAR(double(split.begin(block + 1) - split.begin(block)), double(split.line()) / 132, 1);
  }
}

TEST(Split, ShapesOfTheBenchmarks) {
  const auto text = [](const std::vector<int>& context_lens, bool fused) {
    Machine machine = kMachine;
    machine.fused = fused;
    return to_string(plan(context_lens, machine));
  };
  const std::vector<int> many(64, 4096), long_ones(8, 32768);
  EXPECT_EQ(text(many, false), "16384 tiles x 16 heads, parts of 32 tiles, 132 blocks");
  EXPECT_EQ(text(long_ones, false), "16384 tiles x 16 heads, parts of 32 tiles, 132 blocks");
  EXPECT_EQ(text({8192}, false), "512 tiles x 16 heads, parts of 4 tiles, 132 blocks");
  EXPECT_EQ(text({131072}, false), "8192 tiles x 16 heads, parts of 16 tiles, 132 blocks");
  EXPECT_EQ(text(many, true), "16384 tiles x 16 heads, parts of 8 tiles, 132 blocks");
  EXPECT_EQ(text(long_ones, true), "16384 tiles x 16 heads, parts of 8 tiles, 132 blocks");
}

TEST(Split, OneSequenceAlone) {
  const auto text = [](std::int64_t heads, int passes) {
    return describe_one_sequence(heads, passes, kMachine);
  };
  EXPECT_EQ(text(16, 1), "8 blocks for each of 16 heads");
  EXPECT_EQ(text(8, 1), "16 blocks for each of 8 heads");
  EXPECT_EQ(text(4, 2), "16 blocks for each of 4 heads in 2 passes");
  EXPECT_EQ(text(4, 1), "32 blocks for each of 4 heads");
  EXPECT_EQ(text(3, 1), "a plan");  // 32 blocks each would leave a quarter idle
  EXPECT_EQ(text(64, 1), "2 blocks for each of 64 heads");
  EXPECT_EQ(text(67, 1), "a plan");  // one block each
  EXPECT_EQ(blocks_of_head(2, 16, 1, kMachine), 0);
  EXPECT_EQ(blocks_of_head(0, 16, 1, kMachine), 0);
}

// Whatever the heads and the machine: all blocks run at the same time, and most of the machine.
TEST(Split, OneSequenceFillsTheMachine) {
  for (const int blocks : {1, 7, 58, 108, 132, 160}) {
    for (int heads = 1; heads <= 300; ++heads) {
      for (const int passes : {1, 2, 5}) {
        const int each = blocks_of_head(1, heads, passes, {.blocks = blocks, .warps = 8});
        if (each == 0) continue;
        EXPECT_GE(each, 2);
        EXPECT_LE(each, kMostOfHead);
        EXPECT_LE(each * heads * passes, blocks);
        EXPECT_GE(4 * each * heads * passes, 3 * blocks);
      }
    }
  }
}

// However many tokens and however little room: no more parts than fit.
TEST(Split, PartsFitTheWorkspace) {
  testing::Random random(2);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const std::vector<int> lengths =
        random_lengths(random, 1 + random.below(300), 1 + random.below(200000));
    const auto num_seqs = static_cast<std::int64_t>(lengths.size());
    Machine machine = kMachine;
    machine.max_parts = 2 * kHeads * num_seqs + random.below(100000);
    const Split split = plan(lengths, machine);
    std::int64_t parts = 0;
    for (const int length : lengths) parts += split.parts_of(tiles_of(length));
    EXPECT_LE(parts * kHeads, machine.max_parts);
  }
}

}  // namespace
}  // namespace winnow::paged_xl
