// The rows of pairs, worked by hand.
#include "winnow/expert_parallel/routing/placement.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace winnow::expert_parallel {
namespace {

using ::testing::ElementsAre;
using Indices = std::vector<std::int32_t>;

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int32_t>::max();

// The index tables of all ranks and what they have told each other.
struct World {
  ExpertMap map;
  std::vector<Indices> indices;  // [W] of [n, K]
  std::vector<PairCounts> counts;

  World(int world, int local, int experts, int topk, std::vector<Indices> given)
      : map{Topology(world, local), experts, topk}, indices(std::move(given)) {
    for (const Indices& table : indices) counts.push_back(count_pairs(map, table));
  }
  Placement place(int rank, RowOrder order = RowOrder::expert_major,
                  std::int64_t alignment = 1) const {
    WorldCounts received;
    for (const PairCounts& one : counts) {
      received.pairs.push_back(one.pairs.data());
      received.tokens.push_back(one.tokens.data());
    }
    return place_blocks(map, received, order, alignment, rank);
  }
  // The rows on `rank`'s node of its rail source on `source_node`.
  Indices rows(const Placement& placement, int rank, int source_node,
               std::int64_t limit = kNoLimit) const {
    const Topology& topology = map.topology;
    const auto source = static_cast<std::size_t>(topology.rank(source_node, topology.local(rank)));
    Indices result(indices[source].size(), 77);
    place_pairs(map, placement, source_node, topology.node(rank), limit, indices[source], result);
    return result;
  }
};

// 2 ranks with 2 experts each on one node; 4 and -1 drop a pair.
World two_ranks() { return World(2, 2, 4, 2, {{0, 3, 2, 2, 4, 1}, {1, 0, 3, -1}}); }

TEST(Placement, Counts) {
  const World world = two_ranks();
  EXPECT_THAT(world.counts[0].pairs, ElementsAre(1, 1, 2, 1));
  EXPECT_THAT(world.counts[0].tokens, ElementsAre(2, 2));  // token 1 names expert 2 twice
  EXPECT_THAT(world.counts[1].pairs, ElementsAre(1, 1, 0, 1));
  EXPECT_THAT(world.counts[1].tokens, ElementsAre(1, 1));
}

TEST(Placement, ByExpertSourceTokenAndK) {
  const World world = two_ranks();
  const Placement at0 = world.place(0), at1 = world.place(1);
  EXPECT_THAT(at0.rank_rows, ElementsAre(4, 4));
  EXPECT_THAT(at0.expert_counts, ElementsAre(2, 2));
  EXPECT_THAT(at1.expert_offsets, ElementsAre(0, 2, 4));
  // Expert 0: rank 0, rank 1. Expert 1 likewise. Expert 2: rank 0 twice. Expert 3: rank 0, rank 1.
  EXPECT_THAT(world.rows(at0, 0, 0), ElementsAre(0, 2, 0, 1, -1, 2));
  EXPECT_THAT(world.rows(at1, 1, 0), ElementsAre(3, 1, 3, -1));
}

TEST(Placement, AlignmentPadsEveryExpert) {
  const World world = two_ranks();
  const Placement placement = world.place(1, RowOrder::expert_major, 3);
  EXPECT_THAT(placement.rank_rows, ElementsAre(6, 6));
  EXPECT_THAT(placement.expert_counts, ElementsAre(2, 2));
  EXPECT_THAT(placement.expert_offsets, ElementsAre(0, 3, 6));
  EXPECT_THAT(world.rows(placement, 1, 0), ElementsAre(4, 1, 4, -1));
}

TEST(Placement, TokenMajorSharesRows) {
  const World world = two_ranks();
  const Placement at0 = world.place(0, RowOrder::token_major);
  EXPECT_THAT(at0.rank_rows, ElementsAre(3, 3));
  EXPECT_THAT(at0.source_begins, ElementsAre(0, 2, 3));
  EXPECT_THAT(at0.expert_offsets, ElementsAre(0, 2, 4));
  EXPECT_THAT(world.rows(at0, 0, 0), ElementsAre(0, 0, 1, 1, -1, 1));
  EXPECT_THAT(world.rows(world.place(1, RowOrder::token_major), 1, 0), ElementsAre(2, 2, 2, -1));
}

TEST(Placement, RowsFromTheLimitOnAreDropped) {
  const World world = two_ranks();
  EXPECT_THAT(world.rows(world.place(0), 0, 0, 2), ElementsAre(0, -1, 0, 1, -1, -1));
}

// 2 nodes of 2 ranks, one expert each: a rank places the pairs of its rail on its own node.
TEST(Placement, OfTheRailOnThisNode) {
  const World world(4, 2, 4, 2, {{0, 2, 2, 3}, {2, 2}, {3, 2}, {2, 3}});
  const Placement at2 = world.place(2), at3 = world.place(3);
  EXPECT_THAT(at2.rank_rows, ElementsAre(1, 0, 6, 3));
  // Rank 2's rows: rank 0 tokens 0 and 1, rank 1 twice, rank 2, rank 3.
  EXPECT_THAT(world.rows(at2, 2, 0), ElementsAre(-1, 0, 1, 0));
  EXPECT_THAT(world.rows(at2, 2, 1), ElementsAre(1, 4));
  EXPECT_THAT(world.rows(at3, 3, 0), ElementsAre(2, 3));
  EXPECT_THAT(world.rows(at3, 3, 1), ElementsAre(5, 2));
}

TEST(Placement, FindsTheFirstBadIndex) {
  const ExpertMap map{Topology(1), 4, 2};
  const Indices good{0, 4, -1, 3}, wrong{0, 4, -1, 3, 2, 5, -2, 0};
  EXPECT_FALSE(find_bad_index(layout_params(map, good)).has_value());
  const std::optional<BadIndex> bad = find_bad_index(layout_params(map, wrong));
  ASSERT_TRUE(bad.has_value());
  EXPECT_EQ(bad->token, 2);
  EXPECT_EQ(bad->value, 5);
  // What is out of range is dropped wherever it is met.
  EXPECT_THAT(count_pairs(map, Indices{0, 5, -2, 3}).pairs, ElementsAre(1, 0, 0, 1));
}

TEST(Placement, RunsEndWithTheirChunk) {
  const ExpertMap map{Topology(2, 1), 2, 1};  // expert x on node x
  Indices indices(2 * kChunkTokens + 4, 0);
  for (const std::size_t token : {1, 2, 5}) indices[token] = 1;
  for (std::size_t token = kChunkTokens - 2; token < kChunkTokens + 1; ++token) indices[token] = 1;
  indices.back() = 1;
  Indices begins(indices.size(), -1), ends(indices.size(), -1);
  list_runs(map, indices, 1, begins, ends);
  const auto slot = [&](std::size_t i) { return std::pair(begins[i], ends[i]); };
  EXPECT_EQ(slot(0), std::pair(1, 3));
  EXPECT_EQ(slot(1), std::pair(5, 6));
  EXPECT_EQ(slot(2), std::pair(62, 64));
  EXPECT_EQ(slot(3), std::pair(-1, -1));
  EXPECT_EQ(slot(64), std::pair(64, 65));
  EXPECT_EQ(slot(65), std::pair(-1, -1));
  EXPECT_EQ(slot(128), std::pair(131, 132));
}

}  // namespace
}  // namespace winnow::expert_parallel
