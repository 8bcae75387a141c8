// How the blocks of topk_paged share out a batch. A line has, one group of queries after the
// other, the tiles of two pages that the group sees. It is cut into equal ranges, one for each
// block, so that all blocks end together however lengths differ, which only the device knows. A
// piece is where a range and a group overlap.
#pragma once

#include <cstdint>

#include "winnow/core/row_limits.h"
#include "winnow/device/common/kernel_order.cuh"
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
  bool of_queries;  // it is [b, s_q]: the rows that each query sees
  // The launch begins with this group of this sequence.
  std::int64_t first_sequence;
  unsigned first_group;
  device::FastDivmod of_a_sequence{1};  // by groups_of_a_sequence
  int groups, groups_of_a_sequence;     // of the launch
  int queries;                          // of a group
  std::int64_t s_q;
  int table;  // pages of a row of block_tables; 0 if there are no pages

  // The groups of a launch, [begin, end), counted through all sequences.
  void set_groups(std::int64_t begin, std::int64_t end) {
    first_sequence = begin / groups_of_a_sequence;
    first_group = static_cast<unsigned>(begin % groups_of_a_sequence);
    of_a_sequence = device::FastDivmod(static_cast<std::uint32_t>(groups_of_a_sequence));
    groups = static_cast<int>(end - begin);
  }
};

// Queries [first, first + count) of a sequence.
struct QueryGroup {
  std::int64_t sequence, first;
  int count;
};
__device__ __forceinline__ QueryGroup query_group(const PageLine& line, int group) {
  const device::FastDivmod::Result place =
      line.of_a_sequence.divide(line.first_group + static_cast<unsigned>(group));
  const std::int64_t first = std::int64_t{place.remainder} * line.queries;
  return {line.first_sequence + place.quotient, first,
          static_cast<int>(min(line.s_q - first, std::int64_t{line.queries}))};
}

// Where the length that query j of a sequence goes by is.
__device__ __forceinline__ const std::int32_t* length_of_query(const PageLine& line,
                                                               std::int64_t sequence,
                                                               std::int64_t j) {
  return line.context_lens + sequence * line.context_stride + (line.of_queries ? j : 0);
}

// The rows that query j of a sequence of such a length sees.
__device__ __forceinline__ int rows_of_length(const PageLine& line, std::int32_t length,
                                              std::int64_t j) {
  const int context = max(0, min(length, line.table * kPagedPageRows));
  if (line.of_queries) return context;
  return static_cast<int>(rows_of_step<std::int64_t>(context, line.s_q, j));
}
__device__ __forceinline__ int rows_of_query(const PageLine& line, std::int64_t sequence,
                                             std::int64_t j) {
  return rows_of_length(line, __ldg(length_of_query(line, sequence, j)), j);
}

// The most rows that a query of a group sees. `last`: where the length for its last query is.
__device__ __forceinline__ int rows_of_group(const PageLine& line, const QueryGroup& group,
                                             const std::int32_t* last) {
  int rows = rows_of_length(line, __ldg(last), group.first + group.count - 1);
  for (int n = 0; n < group.count - 1 && line.of_queries; ++n) {
    rows = max(rows, rows_of_query(line, group.sequence, group.first + n));
  }
  return rows;
}
__device__ __forceinline__ const std::int32_t* last_length(const PageLine& line,
                                                           const QueryGroup& group) {
  return length_of_query(line, group.sequence, group.first + group.count - 1);
}

// In shared memory. A warp of each block measures 32 groups.
struct LineShared {
  std::int32_t end[kMostGroups];   // tiles of this group and of those before that its warp measures
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
  // Waits for the kernel before and measures the line; all kMostGroups threads of the block call
  // it. Calls of a few microseconds begin with it: it has one barrier and no division, and what
  // does not read memory comes before the wait. `blocks`: those of the grid.
  __device__ LineRange(const PageLine& line, device::FastDivmod blocks, LineShared& shared)
      : shared_(shared) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int warps = device::ceil_div(line.groups, 32);
    const QueryGroup group = query_group(line, thread);
    const std::int32_t* const last = last_length(line, group);
    device::wait_for_kernel_before(last);
    if (thread / 32 < warps) {
      const int rows = thread < line.groups ? rows_of_group(line, group, last) : 0;
      const unsigned tiles = (rows + unsigned{kPagedTileRows} - 1) / kPagedTileRows;
      const unsigned total = __reduce_add_sync(device::kFullWarp, tiles);
      // Of as many lanes as the launch has groups.
      unsigned through = tiles;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        if (distance >= line.groups) break;
        const unsigned below = __shfl_up_sync(device::kFullWarp, through, distance);
        if (lane >= distance) through += below;
      }
      shared.end[thread] = static_cast<int>(through);
      shared.rows[thread] = rows;
      if (lane == 0) shared.warp_total[thread / 32] = static_cast<int>(total);
    }
    __syncthreads();
    const unsigned all = __reduce_add_sync(
        device::kFullWarp, lane < warps ? static_cast<unsigned>(shared.warp_total[lane]) : 0u);
    device::FastDivmod::Result share = blocks.divide(all);
    if (share.quotient < kLeastTiles) share = {kLeastTiles, 0};
    const unsigned before = blockIdx.x * share.quotient + min(blockIdx.x, share.remainder);
    const unsigned tiles = share.quotient + (blockIdx.x < share.remainder ? 1 : 0);
    at_ = static_cast<int>(min(before, all));
    end_ = static_cast<int>(min(before + tiles, all));
  }

  // The pieces of this block, the same sequence for every role; all lanes of a warp call it.
  __device__ bool next(Piece& piece) {
    if (at_ >= end_) return false;
    while (at_ >= before_ + shared_.warp_total[warp_]) before_ += shared_.warp_total[warp_++];
    // The first group of the warp's that ends behind at_.
    const std::int32_t* const ends = shared_.end + 32 * warp_;
    const int first = at_ - before_, lane = static_cast<int>(threadIdx.x % 32);
    const int group = __ffs(__ballot_sync(device::kFullWarp, ends[lane] > first)) - 1;
    const int begin = group == 0 ? 0 : ends[group - 1];
    piece = {32 * warp_ + group, first - begin, min(ends[group], end_ - before_) - first};
    at_ += piece.tiles;
    return true;
  }

  // The rows of a piece's group that one of its queries sees.
  __device__ int rows(const Piece& piece) const { return shared_.rows[piece.group]; }

 private:
  const LineShared& shared_;
  int at_, end_;
  int warp_ = 0, before_ = 0;  // the warp that measured the group at at_, and the tiles before its
};

}  // namespace winnow::indexer::gpu
