// The choice of rows from a paged cache of f8_e4m3 keys, sm90. A persistent block scores its range
// of the line of pages (page_line_sm90.cuh), and leaves for every query and part of a piece the
// candidates that it could not rule out; the merge (topk/merge_sm90.cuh) chooses among them.
//
//   load      one warp         the heads and weights of a piece, and tiles of two pages into a
//                              ring, with their scales
//   multiply  2 or 4           a page each, or a page and half of the columns: its 64 rows by the
//             warpgroups       heads, then the weighted sums over the heads
//   sink      four warps       a query and a part of a piece each: candidates above a bar
//
//   pages --load--> keys (full, empty) --multiply--> scores (ready, free) --sink--> candidates
//         --load--> scales, behind the scores (ready)
//   heads --load--> (heads_full, heads_empty) --multiply
#pragma once

#include <cstdint>

#include "winnow/indexer/score_tiles_sm90.cuh"
#include "winnow/indexer/topk/merge_sm90.cuh"
#include "winnow/indexer/topk_paged/page_line_sm90.cuh"
#include "winnow/indexer/topk_paged/shared_bar_sm90.cuh"

namespace winnow::indexer::sm90_detail {

static_assert(kPagedTileRows == kTileRows);

// kHeadsPadded: 16, 32, 64 or 128; kColumns: the heads of a group's queries, 64, 128 or 256.
template <int kHeadsPadded, int kColumns>
struct PagedShape {
  static constexpr Element kElement = Element::f8;
  static constexpr int kHeads = kHeadsPadded;
  static constexpr int kGroupColumns = kColumns;
  static constexpr int kQueries = kColumns / kHeads;
  // A warpgroup multiplies a page with the columns of its side, kUnits times as many as a product
  // has. Small products in more warpgroups: one's sums hide the waits of another.
  static constexpr int kProductColumns = kHeads == 128 ? 128 : 64;
  static constexpr int kSides = kColumns == kProductColumns ? 1 : 2;
  static constexpr int kUnits = kColumns / kProductColumns / kSides;
  static constexpr int kWarpgroups = 2 * kSides;  // that multiply
  static constexpr int kMultiplyWarps = 4 * kWarpgroups;
  static constexpr int kThreads = (kWarpgroups + 2) * 128;
  // Warps of the sink that look at the same tile, and parts of a piece.
  static constexpr int kTogether = kQueries < kSinkWarps ? kQueries : kSinkWarps;
  static constexpr int kParts = kSinkWarps / kTogether;
  static constexpr int kOwn = kQueries / kTogether;  // queries of a warp
  static constexpr bool kSharedBars = kParts > 1;
  // Registers per thread; a launch gets 128 or 80 for each.
  static constexpr int kMultiplyRegisters = kSides == 1 ? 152 : kUnits == 1 ? 88 : 96;
  static constexpr int kSinkRegisters = kSides == 1 ? 120 : kUnits == 1 ? 72 : 56;
  static constexpr int kLoadRegisters = kSides == 1 ? 88 : 40;
  static_assert(kWarpgroups * kMultiplyRegisters + kSinkRegisters + kLoadRegisters <=
                (kSides == 1 ? 4 * 128 : 6 * 80));
};

// A product of a warpgroup, by the names that score_tiles_sm90.cuh knows.
template <class Shape>
struct PagedProduct {
  static constexpr Element kElement = Element::f8;
  static constexpr int kHeads = Shape::kHeads;
  static constexpr bool kMasked = false;  // a weight of 0 hides the padding
  static constexpr int kPanels = 1;
  static constexpr int kSideQueries = Shape::kProductColumns / Shape::kHeads;
  static constexpr bool kSplit = false;
  static constexpr int kProductColumns = Shape::kProductColumns;
};

// Rows [first, end) of a tile are there: 0, 64 or 128.
struct alignas(8) PresentRows {
  int first, end;
};

// Shared memory, by the names that Shared wants; two places for heads and their weights.
template <class Shape>
struct PagedPlan {
  static constexpr int kPageBytes = kPagedPageRows * kPanelRowBytes;
  static constexpr int kTileBytes = 2 * kPageBytes;
  static constexpr int kSideBytes = Shape::kGroupColumns * kPanelRowBytes;
  static constexpr int kStages = 4;  // more at once, and memory gives less
  static constexpr int kScoreStride = kTileRows + 16;
  static constexpr int kScaleBytes = kTileRows * 4;
  static constexpr int kPresentBytes = 16;
  static constexpr int kScoreBytes =
      Shape::kQueries * kScoreStride * 4 + kPresentBytes + kScaleBytes;
  static constexpr int kBarBytes = Shape::kSharedBars ? Shape::kQueries * SharedBar::kBytes : 0;
  static constexpr int kBinBytes = kSinkWarps * Selection::kBinWords * 4;
  static constexpr int kSinkBytes = kBarBytes + kBinBytes;
  // The weights of kSideColumns columns make a slot.
  static constexpr int kWeightSlots = (Shape::kGroupColumns + kSideColumns - 1) / kSideColumns;
  static constexpr int kWeightBytes = 2 * kWeightSlots * kSideColumns * 4;
  static constexpr int kLineBytes = sizeof(LineShared);
  static constexpr int kSpace =
      232448 - 640 - kLineBytes - kWeightBytes - 2 * kSideBytes - kStages * kTileBytes - kSinkBytes;
  static constexpr int kScoreStages = kSpace / kScoreBytes < 24 ? kSpace / kScoreBytes : 24;

  // Offsets in bytes.
  static constexpr int kHeads = 0;
  static constexpr int kKeys = kHeads + 2 * kSideBytes;
  static constexpr int kScores = kKeys + kStages * kTileBytes;
  static constexpr int kSink = kScores + kScoreStages * kScoreBytes;
  static constexpr int kWeights = kSink + kSinkBytes;
  static constexpr int kLine = kWeights + kWeightBytes;
  static constexpr int kFull = kLine + kLineBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kReady = kEmpty + 8 * kStages;
  static constexpr int kFree = kReady + 8 * kScoreStages;
  static constexpr int kHeadsFull = kFree + 8 * kScoreStages;
  static constexpr int kHeadsEmpty = kHeadsFull + 16;
  static constexpr int kBytes = kHeadsEmpty + 16;
  static_assert(kScoreStages >= kStages && kBytes <= 232448 && kFull % 8 == 0);
  static_assert(kSideBytes % 1024 == 0 && kScoreBytes % 16 == 0 && kWeights % 16 == 0);

  // Behind the scores of a tile.
  __device__ static PresentRows* present(const Shared<PagedPlan>& shared, int slot) {
    return reinterpret_cast<PresentRows*>(shared.scores(slot) + Shape::kQueries * kScoreStride);
  }
};

// Barriers and their arrivals:
//   full         the loading thread, with the bytes of two pages
//   empty        one lane of each multiplying warp, after its product of the tile
//   ready        one lane of each multiplying warp, after its scores of the tile are stored, and
//                the loading thread, with the bytes of the scales
//   free         one lane of each warp of the sink that looks at the tile
//   heads_full   the copies of each lane of the loading warp, and one lane for all, after their
//                weights are stored
//   heads_empty  one lane of each multiplying warp
inline constexpr int kPagedHeadsFullArrivals = 32 + device::kWarpArrival;
template <class Shape>
inline constexpr int kPagedEmptyArrivals = Shape::kMultiplyWarps * device::kWarpArrival;
template <class Shape>
inline constexpr int kPagedReadyArrivals = kPagedEmptyArrivals<Shape> + 1;

struct PagedParams {
  CUtensorMap pages;  // [pages, 64, d], of which the map's page 0 is at `page_base`
  const std::uint8_t* page_base;
  std::int64_t page_stride;  // bytes, above 0
  // The map counts pages of negative stride from the other end, and has one if the stride is 0.
  int map_first, map_step;
  const std::uint8_t* q;  // [b, s_q, h, d]
  std::int64_t q_stride0, q_stride1, q_head_stride;
  const void* weights;  // [b, s_q, h], f32 or bf16
  std::int64_t weights_stride0, weights_stride1;
  int weights_are_bf16;
  const std::int32_t* block_tables;  // [b, table]
  std::int64_t block_tables_stride;
  int h, d, num_pages;
  PageLine line;
  GroupPieces* pieces;       // of each group
  Candidate* candidates;     // [piece][part][query][capacity]
  std::int32_t* part_count;  // [piece][part][query]
  int capacity, topk, later_ties;
};

// ---- Load --------------------------------------------------------------------------------------

template <class Shape, class Plan>
struct PagedLoader {
  const PagedParams& p;
  const Shared<Plan>& shared;
  device::PipelineState<Plan::kStages> ring{};
  device::PipelineState<Plan::kScoreStages> out{};
  device::PipelineState<2> heads{};

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }

  __device__ __forceinline__ void load_heads(const QueryGroup& group, std::uint64_t policy) {
    device::mbarrier_wait(shared.heads_empty(heads.stage), heads.parity ^ 1, "heads", heads.stage);
#pragma unroll
    for (int slot = 0; slot < Plan::kWeightSlots; ++slot) {
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // in the order of load_weights()
        const int column =
            slot * kSideColumns + lane() / 4 * 16 + lane() % 4 * 2 + i % 2 + i / 2 * 8;
        const int query = column / Shape::kHeads, head = column % Shape::kHeads;
        weight[i] = 0.0f;
        if (query < group.count && head < p.h) {
          const std::int64_t at =
              group.sequence * p.weights_stride0 + (group.first + query) * p.weights_stride1 + head;
          weight[i] = p.weights_are_bf16
                          ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[at])
                          : static_cast<const float*>(p.weights)[at];
        }
      }
      shared.weights(heads.stage * Plan::kWeightSlots + slot)[lane()] =
          make_float4(weight[0], weight[1], weight[2], weight[3]);
    }
    const std::uint8_t* const q = p.q + group.sequence * p.q_stride0 + group.first * p.q_stride1;
    // Four rows at once, eight lanes for the 128 bytes of a row.
    const int column16 = lane() % 8;
#pragma unroll 4
    for (int row = lane() / 8; row < Shape::kGroupColumns; row += 4) {
      const int query = row / Shape::kHeads, head = row % Shape::kHeads;
      const bool there = query < group.count && head < p.h && 16 * column16 < p.d;
      const std::int64_t at = query * p.q_stride1 + head * p.q_head_stride + 16 * column16;
      device::cp_async_zfill(shared.heads(heads.stage) + device::chunk_offset(row, column16),
                             q + (there ? at : 0), there, policy);
    }
    device::mbarrier_arrive_cp_async(shared.heads_full(heads.stage));
    device::mbarrier_arrive_warp(shared.heads_full(heads.stage));
    heads.advance();
  }

  // Two pages, of which -1 is none: another one is read in its place, and never looked at.
  __device__ __forceinline__ void load_tile(int first, int second, std::uint64_t policy) {
    const int map_page[2] = {p.map_first + p.map_step * max(first, 0),
                             p.map_first + p.map_step * max(second, 0)};
    device::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1, "keys", ring.stage);
    if (lane() == 0) {
      device::mbarrier_arrive_expect(shared.full(ring.stage), Plan::kTileBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        device::tensor_load(shared.keys(ring.stage) + i * Plan::kPageBytes, &p.pages,
                            shared.full(ring.stage), 0, 0, map_page[i], policy);
      }
    }
    ring.advance();
    device::mbarrier_wait(shared.free(out.stage), out.parity ^ 1, "scales", out.stage);
    if (lane() == 0) {
      *Plan::present(shared, out.stage) = {first < 0 ? kPagedPageRows : 0,
                                           second < 0 ? kPagedPageRows : kPagedTileRows};
      device::mbarrier_arrive_expect(shared.ready(out.stage), Plan::kScaleBytes);
      const std::uint32_t scales = device::shared_address(shared.scales(out.stage));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        device::bulk_load(scales + i * kPagedPageRows * 4,
                          p.page_base + map_page[i] * p.page_stride + kPagedPageRows * p.d,
                          kPagedPageRows * 4, shared.ready(out.stage), policy);
      }
    }
    out.advance();
  }

  __device__ __forceinline__ void run(LineRange range) {
    constexpr int kBatch = 16;  // tiles whose pages are looked up at once, one by each lane
    const std::uint64_t once = device::policy_evict_first();
    const std::uint64_t again = device::policy_evict_last();
    const std::uint64_t pages_policy = p.line.groups_of_a_sequence == 1 ? once : again;
    Piece piece;
    while (range.next(piece)) {
      const QueryGroup group = query_group(p.line, piece.group);
      const std::int32_t* const table = p.block_tables + group.sequence * p.block_tables_stride;
      const PieceWalk<Shape::kParts> walk(piece);
      // Entries behind the context are not read.
      const int pages_seen = device::ceil_div(range.rows(piece), kPagedPageRows);
      const auto look_up = [&](int turn) {
        const int tile = walk.tile(turn + lane() / 2);
        const int place = 2 * (piece.first + tile) + lane() % 2;
        if (turn + lane() / 2 >= walk.turns() || tile >= walk.tiles || place >= pages_seen) {
          return -1;
        }
        const int page = __ldg(table + place);
        return page < 0 || page >= p.num_pages ? -1 : page;
      };
      int next = look_up(0);
      for (int from = 0; from < walk.turns(); from += kBatch) {
        const int pages = next;
        next = look_up(from + kBatch);
        for (int n = 0; n < kBatch && from + n < walk.turns(); ++n) {
          const int first = __shfl_sync(device::kFullWarp, pages, 2 * n);
          const int second = __shfl_sync(device::kFullWarp, pages, 2 * n + 1);
          if (walk.tile(from + n) < walk.tiles) load_tile(first, second, pages_policy);
          if (from + n == 0) load_heads(group, once);  // the first keys are on their way
        }
      }
    }
  }
};

// ---- Multiply ----------------------------------------------------------------------------------

template <class Shape, class Plan>
__device__ __forceinline__ void multiply_pages(const Shared<Plan>& shared, LineRange range,
                                               int warpgroup) {
  using Product = PagedProduct<Shape>;
  const int page = warpgroup % 2, side = warpgroup / 2;
  const std::uint64_t keys = device::descriptor_k_major(shared.keys(0) + page * Plan::kPageBytes);
  const std::uint64_t all_heads = device::descriptor_k_major(shared.heads(0));
  device::PipelineState<Plan::kStages> ring;
  device::PipelineState<Plan::kScoreStages> out;
  device::PipelineState<2> heads;
  WeightedSum<Product, Plan> weighted_sum[Shape::kUnits];
  const LinearPart<Product> not_split{};
  const auto first_column = [&](int unit) {
    return (side * Shape::kUnits + unit) * Shape::kProductColumns;
  };
  Piece piece;
  while (range.next(piece)) {
    device::mbarrier_wait(shared.heads_full(heads.stage), heads.parity, "heads", heads.stage);
#pragma unroll
    for (int unit = 0; unit < Shape::kUnits; ++unit) {
      weighted_sum[unit].load(
          shared.weights(heads.stage * Plan::kWeightSlots) + first_column(unit) / 4, false);
    }
    const std::uint64_t columns = device::descriptor_offset(
        all_heads, heads.stage * Plan::kSideBytes + first_column(0) * kPanelRowBytes);
    for (int tile = 0; tile < piece.tiles; ++tile) {
      device::mbarrier_wait(shared.full(ring.stage), ring.parity, "multiply", ring.stage);
#pragma unroll
      for (int unit = 0; unit < Shape::kUnits; ++unit) {
        float product[Shape::kProductColumns / 2];
        begin_product<Product>(
            device::descriptor_offset(keys, ring.stage * Plan::kTileBytes),
            device::descriptor_offset(columns, unit * Shape::kProductColumns * kPanelRowBytes),
            product);
        if (unit == 0) {
          device::mbarrier_wait(shared.free(out.stage), out.parity ^ 1, "scores", out.stage);
        }
        device::wgmma_wait<0>();
        device::wgmma_pin(product);
        if (unit == Shape::kUnits - 1) device::mbarrier_arrive_warp(shared.empty(ring.stage));
        weighted_sum[unit].template store<false>(
            Shape::kHeads, product, not_split,
            shared.scores(out.stage) + page * kPagedPageRows +
                first_column(unit) / Shape::kHeads * Plan::kScoreStride);
      }
      device::mbarrier_arrive_warp(shared.ready(out.stage));
      ring.advance();
      out.advance();
    }
    device::mbarrier_arrive_warp(shared.heads_empty(heads.stage));
    heads.advance();
  }
}

// ---- Choose ------------------------------------------------------------------------------------

inline constexpr int kTilesOfABar = 4;  // after so many a warp looks for a higher one

template <class Shape, class Plan>
__device__ __forceinline__ void choose_rows(const PagedParams& p, const Shared<Plan>& shared,
                                            LineRange range, int warp) {
  const int part = warp / Shape::kTogether, first_query = warp % Shape::kTogether;
  std::uint32_t* const all_bins = reinterpret_cast<std::uint32_t*>(shared.pointer + Plan::kSink);
  std::uint32_t* const bins = all_bins + Plan::kBarBytes / 4 + warp * Selection::kBinWords;
  const SharedBar bar(all_bins + first_query * SharedBar::kBins);
  device::PipelineState<Plan::kScoreStages> ring;
  Selection selection[Shape::kOwn];
  int visible[Shape::kOwn];
  Piece piece;
  while (range.next(piece)) {
    const PieceWalk<Shape::kParts> walk(piece);
    const int count = query_group(p.line, piece.group).count;
    const std::int64_t buffer =
        (std::int64_t{piece.number} * Shape::kParts + part) * Shape::kQueries + first_query;
#pragma unroll
    for (int own = 0; own < Shape::kOwn; ++own) {
      const int query = first_query + own * Shape::kTogether;
      selection[own].begin(p.candidates + (buffer + own * Shape::kTogether) * p.capacity,
                           p.capacity, p.topk, p.later_ties);
      visible[own] = query < count ? max(0, range.rows(piece) - (count - 1 - query)) : 0;
    }
    // Shared bars are for ranges of which not all is chosen. kSharedBars: a warp has one query.
    bool bars = false;
    if constexpr (Shape::kSharedBars) {
      bars = p.topk < piece.tiles * kPagedTileRows;
      device::bar_sync<kSinkWarps * 32>(1);  // nobody counts any more
      for (int i = threadIdx.x % 128; i < Plan::kBarBytes / 16; i += 128) {
        reinterpret_cast<uint4*>(all_bins)[i] = make_uint4(0, 0, 0, 0);
      }
      device::bar_sync<kSinkWarps * 32>(1);
    }
    for (int turn = 0; turn < walk.turns(); ++turn) {
      const int tile = walk.tile(turn);
      if (tile >= walk.tiles) continue;
      if (turn % Shape::kParts == part) {
        device::mbarrier_wait(shared.ready(ring.stage), ring.parity, "select", ring.stage);
        float scores[Shape::kOwn][4];
#pragma unroll
        for (int own = 0; own < Shape::kOwn; ++own) {
          read_scores<Shape>(shared, ring.stage, first_query + own * Shape::kTogether, scores[own]);
        }
        const PresentRows present = *Plan::present(shared, ring.stage);
        device::mbarrier_arrive_warp(shared.free(ring.stage));
        const int row = (piece.first + tile) * kPagedTileRows;
        const int begin = row + present.first;
#pragma unroll
        for (int own = 0; own < Shape::kOwn; ++own) {
          const int end = max(begin, min(visible[own], row + present.end));
          if constexpr (Shape::kSharedBars) {
            if (bars) bar.count(scores[own], row, begin, end, selection[own].bar());
            if (bars && turn / Shape::kParts % kTilesOfABar == kTilesOfABar - 1) {
              selection[own].raise_bar(bar.find(p.topk));
            }
          }
          selection[own].offer(scores[own], row, begin, end, bins);
        }
      }
      ring.advance();
    }
#pragma unroll
    for (int own = 0; own < Shape::kOwn; ++own) {
      if (threadIdx.x % 32 == 0) {
        p.part_count[buffer + own * Shape::kTogether] = selection[own].waiting();
      }
    }
  }
}

// ---- The block ---------------------------------------------------------------------------------

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    topk_paged_kernel(const __grid_constant__ PagedParams p) {
  using Plan = PagedPlan<Shape>;
  char* const shared_memory = reinterpret_cast<char*>(device::dynamic_shared<1024>());
  const Shared<Plan> shared{device::shared_address(shared_memory), shared_memory};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::kStages; ++i) {
      device::mbarrier_init(shared.full(i), 1);
      device::mbarrier_init(shared.empty(i), kPagedEmptyArrivals<Shape>);
    }
    for (int i = 0; i < Plan::kScoreStages; ++i) {
      device::mbarrier_init(shared.ready(i), kPagedReadyArrivals<Shape>);
      device::mbarrier_init(shared.free(i), Shape::kTogether * device::kWarpArrival);
    }
    for (int i = 0; i < 2; ++i) {
      device::mbarrier_init(shared.heads_full(i), kPagedHeadsFullArrivals);
      device::mbarrier_init(shared.heads_empty(i), kPagedEmptyArrivals<Shape>);
    }
    device::fence_mbarrier_init();
  }
  device::allow_next_kernel();  // its blocks come as multiprocessors get free
  device::wait_for_kernel_before();
  // Its barriers stand between the initialisation and the roles.
  const LineRange range(p.line, *reinterpret_cast<LineShared*>(shared_memory + Plan::kLine),
                        p.pieces);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32;
  if (warpgroup < Shape::kWarpgroups) {
    device::setmaxnreg_inc<Shape::kMultiplyRegisters>();
    multiply_pages<Shape>(shared, range, warpgroup);
  } else if (warpgroup == Shape::kWarpgroups) {
    device::setmaxnreg_dec<Shape::kSinkRegisters>();
    choose_rows<Shape>(p, shared, range, warp);
  } else {
    device::setmaxnreg_dec<Shape::kLoadRegisters>();
    if (warp == 0) PagedLoader<Shape, Plan>{p, shared}.run(range);
  }
}

// ---- The merge ---------------------------------------------------------------------------------

// Query n of the launch is number first_query + n of [b, s_q].
struct PagedMergeParams : MergeInput {
  std::int64_t first_query, first_group, s_q, groups_of_a_sequence;
  int queries_of_group, parts_of_piece;
  const GroupPieces* pieces;
  const std::int32_t* block_tables;  // [b, table]
  std::int64_t block_tables_stride;
  int num_pages, positions;
  std::int32_t* indices;  // [b, s_q, topk]
  std::int32_t* length;   // [b, s_q]
  float* scores;          // [b, s_q, topk], or null
  std::int64_t indices_stride0, indices_stride1, length_stride0, length_stride1;
  std::int64_t scores_stride0, scores_stride1;

  __device__ std::int64_t sequence(std::int64_t query) const { return (first_query + query) / s_q; }
  __device__ std::int64_t place(std::int64_t query) const { return (first_query + query) % s_q; }
  __device__ MergeParts parts_of(std::int64_t query) const {
    const std::int64_t j = place(query);
    const std::int64_t group =
        sequence(query) * groups_of_a_sequence + j / queries_of_group - first_group;
    const GroupPieces mine = pieces[group];
    const std::int64_t first = std::int64_t{mine.first} * parts_of_piece * queries_of_group;
    return {first + j % queries_of_group, queries_of_group, mine.count * parts_of_piece};
  }
  __device__ std::int32_t* indices_of(std::int64_t query) const {
    return indices + sequence(query) * indices_stride0 + place(query) * indices_stride1;
  }
  __device__ std::int32_t* length_of(std::int64_t query) const {
    return length + sequence(query) * length_stride0 + place(query) * length_stride1;
  }
  __device__ float* scores_of(std::int64_t query) const {
    if (scores == nullptr) return nullptr;
    return scores + sequence(query) * scores_stride0 + place(query) * scores_stride1;
  }
  // The slot of a row; -1 where another has taken the page out of the table since.
  struct Slots {
    const std::int32_t* table;  // null: positions are wanted
    int num_pages;
    __device__ std::int32_t operator()(std::int32_t row) const {
      if (table == nullptr) return row;
      const std::int32_t page = __ldg(table + row / kPagedPageRows);
      if (page < 0 || page >= num_pages) return -1;
      return page * kPagedPageRows + row % kPagedPageRows;
    }
  };
  __device__ Slots index_of(std::int64_t query) const {
    return {positions ? nullptr : block_tables + sequence(query) * block_tables_stride, num_pages};
  }
};

}  // namespace winnow::indexer::sm90_detail
