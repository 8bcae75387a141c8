// How the blocks of topk_paged share out a batch. A line has, one group of queries after the
// other, the tiles of two pages that the group sees. It is cut into equal ranges, one for each
// block, so that all blocks end together however lengths differ, which only the device knows. A
// piece is where a range and a group overlap.
#pragma once

#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/warp.cuh"

namespace winnow::indexer::gpu {

inline constexpr int kPagedPageRows = 64;
inline constexpr int kPagedTileRows = 2 * kPagedPageRows;
inline constexpr int kMostGroups = 512;  // of a launch: one for each thread
inline constexpr int kLeastTiles = 4;    // of a block's range, where there are so many

struct PageLine {
  const std::int32_t* context_lens;  // [b], or [b, s_q]
  std::int64_t context_stride;
  bool of_queries;                   // it is [b, s_q]: the rows that each query sees
  std::int64_t first_group;          // of the launch, counted through all sequences
  int groups, groups_of_a_sequence;  // of the launch
  int queries;                       // of a group
  std::int64_t s_q;
  int table;  // pages of a row of block_tables; 0 if there are no pages
};

// Queries [first, first + count) of a sequence.
struct QueryGroup {
  std::int64_t sequence, first;
  int count;
};
__device__ __forceinline__ QueryGroup query_group(const PageLine& line, int group) {
  const std::int64_t number = line.first_group + group;
  const std::int64_t sequence = number / line.groups_of_a_sequence;
  const std::int64_t first = number % line.groups_of_a_sequence * line.queries;
  return {sequence, first, static_cast<int>(min(line.s_q - first, std::int64_t{line.queries}))};
}

// The rows that query j of a sequence sees.
__device__ __forceinline__ int rows_of_query(const PageLine& line, std::int64_t sequence,
                                             std::int64_t j) {
  const std::int32_t* const given = line.context_lens + sequence * line.context_stride;
  const int context =
      max(0, min(__ldg(line.of_queries ? given + j : given), line.table * kPagedPageRows));
  if (line.of_queries) return context;
  return static_cast<int>(max(context - line.s_q + j + 1, std::int64_t{0}));
}

// The most rows that a query of a group sees.
__device__ __forceinline__ int rows_of_group(const PageLine& line, const QueryGroup& group) {
  const int last = group.count - 1;
  int rows = rows_of_query(line, group.sequence, group.first + last);
  for (int n = 0; n < last && line.of_queries; ++n) {
    rows = max(rows, rows_of_query(line, group.sequence, group.first + n));
  }
  return rows;
}

// In shared memory.
struct LineShared {
  std::int32_t end[kMostGroups];   // tiles of this group and of those before
  std::int32_t rows[kMostGroups];  // the most that a query of the group sees
  std::int32_t warp_total[kMostGroups / 32];
};

// Tiles [first, first + tiles) of a group.
struct Piece {
  int group;
  int first, tiles;
};

class LineRange {
 public:
  // Measures the line; all kMostGroups threads of the block call it.
  __device__ LineRange(const PageLine& line, LineShared& shared)
      : shared_(shared), groups_(line.groups) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    int rows = 0;
    if (thread < groups_) rows = rows_of_group(line, query_group(line, thread));
    const int tiles = (rows - 1 + kPagedTileRows) / kPagedTileRows;
    int through = device::warp_prefix(tiles, lane);
    if (lane == 31) shared.warp_total[thread / 32] = through;
    __syncthreads();
    for (int warp = 0; warp < thread / 32; ++warp) through += shared.warp_total[warp];
    shared.end[thread] = through;
    shared.rows[thread] = rows;
    __syncthreads();
    const std::int64_t all = shared.end[kMostGroups - 1];
    const std::int64_t wanted = device::ceil_div(all, std::int64_t{kLeastTiles});
    const std::int64_t blocks = max(std::int64_t{1}, min(wanted, std::int64_t{gridDim.x}));
    const std::int64_t block = blockIdx.x;
    at_ = static_cast<int>(block < blocks ? all * block / blocks : all);
    end_ = static_cast<int>(block < blocks ? all * (block + 1) / blocks : all);
  }

  // The pieces of this block, the same sequence for every role.
  __device__ bool next(Piece& piece) {
    if (at_ >= end_) return false;
    int low = 0, high = groups_ - 1;  // the first group that ends behind at_
    while (low < high) {
      const int middle = (low + high) / 2;
      if (shared_.end[middle] > at_) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int begin = low == 0 ? 0 : shared_.end[low - 1];
    piece = {low, at_ - begin, min(shared_.end[low], end_) - at_};
    at_ += piece.tiles;
    return true;
  }

  // The rows of a piece's group that one of its queries sees.
  __device__ int rows(const Piece& piece) const { return shared_.rows[piece.group]; }

 private:
  const LineShared& shared_;
  int groups_, at_, end_;
};

}  // namespace winnow::indexer::gpu
