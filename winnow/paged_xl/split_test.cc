// How a decode step is dealt out to thread blocks: every tile once, evenly, and parts of contexts
// where the merge looks for them.
#include "winnow/paged_xl/split.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/testing/generate.h"

namespace winnow::paged_xl {
namespace {

constexpr std::int64_t kTileTokens = 16;
constexpr Machine kMachine{.blocks = 528, .min_tiles = 4, .r_budget = 20 << 20};

StepWork work_of(const std::vector<std::int64_t>& context_lens) {
  StepWork work;
  for (const std::int64_t length : context_lens) {
    work.tiles += (length + kTileTokens - 1) / kTileTokens;
    work.longest = std::max(work.longest, length);
  }
  return work;
}

TEST(Split, StretchesCoverTheLineAndDifferByOneTileAtMost) {
  for (const std::int64_t tiles : {1, 2, 527, 528, 529, 1000, 16384 * 16, 1'000'003}) {
    for (const int blocks : {1, 2, 3, 132, 528}) {
      const Stretches stretches{tiles / blocks, tiles % blocks, blocks};
      ASSERT_EQ(stretches.tiles(), tiles);
      ASSERT_EQ(stretches.begin(0), 0);
      ASSERT_EQ(stretches.begin(blocks), tiles);
      std::int64_t least = tiles, most = 0;
      for (int block = 0; block < blocks; ++block) {
        const std::int64_t begin = stretches.begin(block), end = stretches.begin(block + 1);
        least = std::min(least, end - begin);
        most = std::max(most, end - begin);
        if (begin == end) continue;
        ASSERT_EQ(stretches.owner(begin), block);
        ASSERT_EQ(stretches.owner(end - 1), block);
      }
      EXPECT_LE(most - least, 1);
    }
  }
}

// The longest lines that the kernels allow do not overflow.
TEST(Split, HugeLinesStayExact) {
  const std::int64_t tiles = std::int64_t{1} << 60;
  const Stretches stretches{tiles / 527, tiles % 527, 527};
  EXPECT_EQ(stretches.begin(527), tiles);
  EXPECT_EQ(stretches.owner(tiles - 1), 526);
  EXPECT_EQ(stretches.owner(stretches.begin(300)), 300);
  EXPECT_EQ(stretches.owner(stretches.begin(300) - 1), 299);
}

// Contexts cut by the stretches: the merge expects one part per block from the first to the last,
// of which only the first begins the context, and no block ends or begins more than one part.
TEST(Split, ABlockHasAtMostTwoPartsOfContexts) {
  testing::Random random(1);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<std::int64_t> tiles;  // of each context
    std::int64_t line = 0;
    for (std::int64_t n = 1 + random.below(40); n > 0; --n) {
      tiles.push_back(random.below(4) == 0 ? 0 : random.below(300));
      line += tiles.back();
    }
    const int blocks = static_cast<int>(1 + random.below(60));
    const Stretches stretches{line / blocks, line % blocks, blocks};
    std::vector<int> begun(static_cast<std::size_t>(blocks)), ended = begun;
    std::int64_t first = 0;
    for (const std::int64_t length : tiles) {
      if (length == 0) continue;
      const int from = stretches.owner(first), to = stretches.owner(first + length - 1);
      for (int block = from; block <= to && from != to; ++block) {
        const std::int64_t begin = std::max(first, stretches.begin(block));
        const std::int64_t end = std::min(first + length, stretches.begin(block + 1));
        ASSERT_LT(begin, end);
        ASSERT_EQ(begin == first, block == from);
        ++(block == from ? begun : ended)[static_cast<std::size_t>(block)];
      }
      first += length;
    }
    EXPECT_LE(std::ranges::max(begun), 1);
    EXPECT_LE(std::ranges::max(ended), 1);
  }
}

TEST(Split, ShapesOfTheBenchmarks) {
  const auto plan = [](const std::vector<std::int64_t>& lengths, std::int64_t r_bytes_per_token) {
    return to_string(plan_split(work_of(lengths), std::int64_t(lengths.size()), 16,
                                r_bytes_per_token, kMachine));
  };
  constexpr std::int64_t kR = 16 * 128 * 2;  // bytes per token
  EXPECT_EQ(plan(std::vector<std::int64_t>(64, 4096), 0),
            "16384 tiles x 16 heads, 1 phase, 528 blocks of 496 or 497 tiles");
  EXPECT_EQ(plan({8192}, 0), "512 tiles x 16 heads, 1 phase, 528 blocks of 15 or 16 tiles");
  EXPECT_EQ(plan({131072}, 0), "8192 tiles x 16 heads, 1 phase, 528 blocks of 248 or 249 tiles");
  // 16 MiB of r fit, 128 MiB do not: two heads have 16 MiB.
  EXPECT_EQ(plan(std::vector<std::int64_t>(64, 4096), kR),
            "16384 tiles x 16 heads, 1 phase, 528 blocks of 496 or 497 tiles");
  EXPECT_EQ(plan(std::vector<std::int64_t>(8, 32768), kR),
            "16384 tiles x 16 heads, 8 phases, 528 blocks of 62 or 63 tiles");
  // A single sequence reads each row once, whatever fits.
  EXPECT_EQ(plan({131072}, kR), "8192 tiles x 16 heads, 1 phase, 528 blocks of 248 or 249 tiles");
}

TEST(Split, LittleWorkTakesFewBlocks) {
  const auto blocks = [](std::int64_t tiles, int heads) {
    return plan_split({.tiles = tiles, .longest = tiles * kTileTokens}, 1, heads, 0, kMachine)
        .blocks;
  };
  EXPECT_EQ(blocks(0, 16), 1);
  EXPECT_EQ(blocks(1, 1), 1);
  EXPECT_EQ(blocks(8, 1), 2);
  EXPECT_EQ(blocks(8, 16), 32);
  EXPECT_EQ(blocks(1 << 20, 16), 528);
}

}  // namespace
}  // namespace winnow::paged_xl
