// The scores of rows of a paged cache of f8_e4m3 keys, sm90, from which choose_paged_sm90.cuh
// chooses. A persistent block scores its range of the line of pages (page_line_sm90.cuh), and
// stores the key of every query and row.
//
//   load      one warp         the heads and weights of a piece, and tiles of two pages into a
//                              ring, with their scales
//   multiply  warpgroups 0, 1  64 rows by up to 128 columns at a time, the heads of queries of the
//                              group, then the weighted sums over the heads: with up to 128 columns
//                              a page each, with 256 half of the columns and both pages
//   store     four warps       keys of finished scores
//
//   pages --load--> keys (full, empty) --multiply--> scores (ready, free) --store--> stored
//         --load--> scales, behind the scores (ready)
//   heads --load--> (heads_full, heads_empty) --multiply
#pragma once

#include <cstdint>

#include "winnow/device/common/registers.cuh"
#include "winnow/indexer/score_tiles_sm90.cuh"
#include "winnow/indexer/topk/choose_sm90.cuh"
#include "winnow/indexer/topk_paged/page_line_sm90.cuh"

namespace winnow::indexer::sm90_detail {

static_assert(kThreads == kMostGroups && kPagedTileRows == kTileRows);

// kHeadsPadded: 16, 32, 64 or 128; kGroupColumns: the heads of a group's queries, 64, 128 or 256.
// The names that score_tiles_sm90.cuh knows, and what is stored by whom.
template <int kHeadsPadded, int kGroupColumns>
struct PagedShape {
  static constexpr Element kElement = Element::f8;
  static constexpr int kHeads = kHeadsPadded;
  static constexpr bool kMasked = false;  // a weight of 0 hides the padding
  static constexpr int kPanels = 1;
  // With 256 columns each multiplying warpgroup has a side of them.
  static constexpr int kSides = kGroupColumns > kSideColumns ? 2 : 1;
  static constexpr int kColumnsOfSide = kGroupColumns / kSides;
  static constexpr int kQueries = kGroupColumns / kHeads;
  static constexpr int kSideQueries = kQueries / kSides;
  static constexpr bool kSplit = false;
  static constexpr int kProductColumns = kColumnsOfSide;
  // Warps that store of the same tile; so many tiles are stored at the same time.
  static constexpr int kTogether = kQueries < kSinkWarps ? kQueries : kSinkWarps;
  static constexpr int kParts = kSinkWarps / kTogether;
  static constexpr int kOwn = kQueries / kTogether;  // queries of a warp
  // Registers per thread; the four warpgroups share the file of 512 x 128.
  static constexpr int kMultiplyRegisters = kSides == 2 ? 192 : 160;
  static constexpr int kOtherRegisters = 256 - kMultiplyRegisters;
};

// Rows [first, end) of a tile are there: 0, 64 or 128.
struct alignas(8) PresentRows {
  int first, end;
};

// Shared memory, by the names that Shared wants; two places for the heads of each side and their
// weights, those of a group side by side.
template <class Shape>
struct PagedPlan {
  static constexpr int kPageBytes = kPagedPageRows * kPanelRowBytes;
  static constexpr int kTileBytes = 2 * kPageBytes;
  static constexpr int kSideBytes = Shape::kProductColumns * kPanelRowBytes;
  static constexpr int kPlaces = 2 * Shape::kSides;
  // Of few columns memory is the limit, and gives less if more is asked for at once.
  static constexpr int kStages = Shape::kProductColumns == 64 ? 4 : 6;
  static constexpr int kScoreStride = kTileRows + 16;
  static constexpr int kScaleBytes = kTileRows * 4;
  static constexpr int kPresentBytes = 16;
  static constexpr int kScoreBytes =
      Shape::kQueries * kScoreStride * 4 + kPresentBytes + kScaleBytes;
  static constexpr int kWeightBytes = kPlaces * kSideColumns * 4;
  static constexpr int kLineBytes = sizeof(LineShared);
  static constexpr int kSpace =
      232448 - 640 - kLineBytes - kWeightBytes - kPlaces * kSideBytes - kStages * kTileBytes;
  static constexpr int kScoreStages = kSpace / kScoreBytes < 16 ? kSpace / kScoreBytes : 16;

  // Offsets in bytes.
  static constexpr int kHeads = 0;
  static constexpr int kKeys = kHeads + kPlaces * kSideBytes;
  static constexpr int kScores = kKeys + kStages * kTileBytes;
  static constexpr int kWeights = kScores + kScoreStages * kScoreBytes;
  static constexpr int kLine = kWeights + kWeightBytes;
  static constexpr int kFull = kLine + kLineBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kReady = kEmpty + 8 * kStages;
  static constexpr int kFree = kReady + 8 * kScoreStages;
  static constexpr int kHeadsFull = kFree + 8 * kScoreStages;
  static constexpr int kHeadsEmpty = kHeadsFull + 16;
  static constexpr int kBytes = kHeadsEmpty + 16;
  static_assert(kScoreStages >= 3 && kBytes <= 232448 && kFull % 8 == 0);
  static_assert(kSideBytes % 1024 == 0 && kScoreBytes % 16 == 0);
  static_assert(kWeights % 16 == 0);

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
//   free         one lane of each warp that stores of the tile
//   heads_full   the copies of each lane of the loading warp, and one lane for all, after their
//                weights are stored
//   heads_empty  one lane of each multiplying warp
inline constexpr int kPagedReadyArrivals = kEmptyArrivals + 1;
inline constexpr int kPagedHeadsFullArrivals = 32 + device::kWarpArrival;

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
  // [group of the launch][stored_queries][stored_stride]: what is absent is marked so.
  std::uint32_t* stored;
  std::int64_t stored_stride;  // a multiple of kTileRows
  int stored_queries;          // of a group at most
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
#pragma unroll 1
    for (int side = 0; side < Shape::kSides; ++side) {
      const int place = heads.stage * Shape::kSides + side;
      const std::int64_t first = group.first + side * Shape::kSideQueries;
      const int count = group.count - side * Shape::kSideQueries;  // of this side; or less than 1
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // in the order of load_weights()
        const int column = lane() / 4 * 16 + lane() % 4 * 2 + i % 2 + i / 2 * 8;
        const int query = column / Shape::kHeads, head = column % Shape::kHeads;
        weight[i] = 0.0f;
        if (query < min(count, Shape::kSideQueries) && head < p.h) {
          const std::int64_t at =
              group.sequence * p.weights_stride0 + (first + query) * p.weights_stride1 + head;
          weight[i] = p.weights_are_bf16
                          ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[at])
                          : static_cast<const float*>(p.weights)[at];
        }
      }
      shared.weights(place)[lane()] = make_float4(weight[0], weight[1], weight[2], weight[3]);
      const std::uint8_t* const q = p.q + group.sequence * p.q_stride0 + first * p.q_stride1;
      // In a register: of an address that is the same for all lanes ptxas 13.0 makes copies that no
      // GPU executes (cmake/check_descriptors.cmake).
      const std::uint32_t into = device::keep_in_register(shared.heads(place));
      // Four rows at once, eight lanes for the 128 bytes of a row.
      const int column16 = lane() % 8;
#pragma unroll 4
      for (int row = lane() / 8; row < Shape::kColumnsOfSide; row += 4) {
        const int query = row / Shape::kHeads, head = row % Shape::kHeads;
        const bool there = query < count && head < p.h && 16 * column16 < p.d;
        const std::int64_t at = query * p.q_stride1 + head * p.q_head_stride + 16 * column16;
        device::cp_async_zfill(into + device::chunk_offset(row, column16), there ? q + at : p.q,
                               there, policy);
      }
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
      // Entries behind the context are not read.
      const int end =
          min(2 * (piece.first + piece.tiles), device::ceil_div(range.rows(piece), kPagedPageRows));
      const auto look_up = [&](int tile) {
        const int place = 2 * (piece.first + tile) + lane();
        if (place >= end) return -1;
        const int page = __ldg(table + place);
        return page < 0 || page >= p.num_pages ? -1 : page;
      };
      int next = look_up(0);
      for (int from = 0; from < piece.tiles; from += kBatch) {
        const int pages = next;
        next = look_up(from + kBatch);
        for (int n = 0; n < min(kBatch, piece.tiles - from); ++n) {
          load_tile(__shfl_sync(device::kFullWarp, pages, 2 * n),
                    __shfl_sync(device::kFullWarp, pages, 2 * n + 1), pages_policy);
          if (from + n == 0) load_heads(group, once);  // the first keys are on their way
        }
      }
    }
  }
};

// ---- Multiply ----------------------------------------------------------------------------------

// Warpgroup `page` of up to 128 columns has that page of each tile, of more that side of the
// columns.
template <class Shape, class Plan>
__device__ __forceinline__ void multiply_pages(const Shared<Plan>& shared, LineRange range,
                                               int warpgroup) {
  constexpr int kProducts = Shape::kSides;  // of 64 rows each
  const int side = Shape::kSides == 2 ? warpgroup : 0;
  const int first_row = Shape::kSides == 2 ? 0 : warpgroup * kPagedPageRows;
  const std::uint64_t keys =
      device::descriptor_k_major(shared.keys(0) + first_row * kPanelRowBytes);
  const std::uint64_t all_heads = device::descriptor_k_major(shared.heads(0));
  device::PipelineState<Plan::kStages> ring;
  device::PipelineState<Plan::kScoreStages> out;
  device::PipelineState<2> heads;
  WeightedSum<Shape, Plan> weighted_sum;
  const LinearPart<Shape> not_split{};
  Piece piece;
  while (range.next(piece)) {
    device::mbarrier_wait(shared.heads_full(heads.stage), heads.parity, "heads", heads.stage);
    const int place = heads.stage * Shape::kSides + side;
    weighted_sum.load(shared.weights(place), false);
    const std::uint64_t columns = device::descriptor_offset(all_heads, place * Plan::kSideBytes);
    for (int tile = 0; tile < piece.tiles; ++tile) {
      float product[kProducts][Shape::kProductColumns / 2];
      device::mbarrier_wait(shared.full(ring.stage), ring.parity, "multiply", ring.stage);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        begin_product<Shape>(
            device::descriptor_offset(keys, ring.stage * Plan::kTileBytes + i * Plan::kPageBytes),
            columns, product[i]);
      }
      device::mbarrier_wait(shared.free(out.stage), out.parity ^ 1, "scores", out.stage);
      float* const scores =
          shared.scores(out.stage) + side * Shape::kSideQueries * Plan::kScoreStride + first_row;
      if constexpr (kProducts == 2) {
        device::wgmma_wait<1>();
        device::wgmma_pin(product[0]);
        weighted_sum.template store<false>(Shape::kHeads, product[0], not_split, scores);
      }
      device::wgmma_wait<0>();
      device::wgmma_pin(product[kProducts - 1]);
      device::mbarrier_arrive_warp(shared.empty(ring.stage));
      weighted_sum.template store<false>(Shape::kHeads, product[kProducts - 1], not_split,
                                         scores + (kProducts - 1) * kPagedPageRows);
      device::mbarrier_arrive_warp(shared.ready(out.stage));
      ring.advance();
      out.advance();
    }
    device::mbarrier_arrive_warp(shared.heads_empty(heads.stage));
    heads.advance();
  }
}

// ---- Store -------------------------------------------------------------------------------------

template <class Shape, class Plan>
__device__ __forceinline__ void store_keys(const PagedParams& p, const Shared<Plan>& shared,
                                           LineRange range, int warp) {
  const int part = warp / Shape::kTogether, first_query = warp % Shape::kTogether;
  device::PipelineState<Plan::kScoreStages> ring;
  Piece piece;
  while (range.next(piece)) {
    const int count = query_group(p.line, piece.group).count;
    for (int tile = 0; tile < piece.tiles; ++tile, ring.advance()) {
      if (tile % Shape::kParts != part) continue;
      device::mbarrier_wait(shared.ready(ring.stage), ring.parity, "store", ring.stage);
      float scores[Shape::kOwn][4];
#pragma unroll
      for (int own = 0; own < Shape::kOwn; ++own) {
        read_scores<Shape>(shared, ring.stage, first_query + own * Shape::kTogether, scores[own]);
      }
      const PresentRows present = *Plan::present(shared, ring.stage);
      device::mbarrier_arrive_warp(shared.free(ring.stage));
      const int in_tile = 4 * static_cast<int>(threadIdx.x % 32);
      const int row = (piece.first + tile) * kPagedTileRows + in_tile;
      const bool there = in_tile >= present.first && in_tile < present.end;
#pragma unroll
      for (int own = 0; own < Shape::kOwn; ++own) {
        const int query = first_query + own * Shape::kTogether;
        if (query >= count) continue;
        const int visible = range.rows(piece) - (count - 1 - query);
        std::uint32_t key[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = scores[own][e];
          key[e] = !there || row + e >= visible ? kAbsentKey
                   : score != score             ? kNanKey
                                                : key_of(score);
        }
        const std::int64_t place = std::int64_t{piece.group} * p.stored_queries + query;
        *reinterpret_cast<uint4*>(p.stored + place * p.stored_stride + row) =
            make_uint4(key[0], key[1], key[2], key[3]);
      }
    }
  }
}

// ---- The block ---------------------------------------------------------------------------------

template <class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    paged_scores_kernel(const __grid_constant__ PagedParams p) {
  using Plan = PagedPlan<Shape>;
  char* const shared_memory = reinterpret_cast<char*>(device::dynamic_shared<1024>());
  const Shared<Plan> shared{device::shared_address(shared_memory), shared_memory};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::kStages; ++i) {
      device::mbarrier_init(shared.full(i), 1);
      device::mbarrier_init(shared.empty(i), kEmptyArrivals);
    }
    for (int i = 0; i < Plan::kScoreStages; ++i) {
      device::mbarrier_init(shared.ready(i), kPagedReadyArrivals);
      device::mbarrier_init(shared.free(i), Shape::kTogether * device::kWarpArrival);
    }
    for (int i = 0; i < 2; ++i) {
      device::mbarrier_init(shared.heads_full(i), kPagedHeadsFullArrivals);
      device::mbarrier_init(shared.heads_empty(i), kEmptyArrivals);
    }
    device::fence_mbarrier_init();
  }
  device::allow_next_kernel();  // its blocks come as multiprocessors get free
  device::wait_for_kernel_before();
  // Its barriers stand between the initialisation and the roles.
  const LineRange range(p.line, *reinterpret_cast<LineShared*>(shared_memory + Plan::kLine));
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32;
  if (warpgroup < kMultiplyWarpgroups) {
    device::setmaxnreg_inc<Shape::kMultiplyRegisters>();
    multiply_pages<Shape>(shared, range, warpgroup);
  } else {
    device::setmaxnreg_dec<Shape::kOtherRegisters>();
    if (warpgroup == kMultiplyWarpgroups) {
      store_keys<Shape>(p, shared, range, warp);
    } else if (warp == 0) {
      PagedLoader<Shape, Plan>{p, shared}.run(range);
    }
  }
}

}  // namespace winnow::indexer::sm90_detail
