// The scores of rows of a paged cache of f8_e4m3 keys, sm90. A persistent block scores its range of
// the line of pages (page_line.cuh), and stores for every query and row the key of the score,
// from which choose_paged_sm90.cuh chooses, or, for scores_paged, the score.
//
//   pages     warps 12 and 13  tiles of two pages into a ring, a page each
//   heads     warp 14          the heads and weights of a piece
//   multiply  warpgroups 0-2   tiles in turn: 64 rows by up to 128 columns at a time, the heads of
//                              queries of the group, the weighted sums over the heads, and the
//                              keys of the scores, while the other warpgroups multiply
//   rest      warp 15          for scores_paged: -inf behind the tiles
//
//   pages --pages--> keys, scales (full, empty) --multiply--> stored
//   heads --heads--> heads, weights (heads_full, heads_empty) --multiply
#pragma once

#include <cstdint>
#include <type_traits>

#include "winnow/device/common/registers.cuh"
#include "winnow/indexer/score_tiles_sm90.cuh"
#include "winnow/indexer/topk/choose_sm90.cuh"
#include "winnow/indexer/topk_paged/page_line.cuh"

namespace winnow::indexer::sm90_detail {

inline constexpr int kPagedMultiplyWarpgroups = 3;
inline constexpr int kPagedThreads = (kPagedMultiplyWarpgroups + 1) * 128;
static_assert(kPagedThreads == kMostGroups && kPagedTileRows == kTileRows);

// Registers per thread; the four warpgroups share the file of 512 x 128.
inline constexpr int kPagedMultiplyRegisters = 152;  // 64 of them hold a product, 32 weights
inline constexpr int kPagedLoadRegisters = 56;
static_assert(kPagedMultiplyWarpgroups * kPagedMultiplyRegisters + kPagedLoadRegisters == 512);

// kHeadsPadded: 16, 32, 64 or 128; kGroupColumns: the heads of a group's queries, 64, 128 or 256.
// The names that score_tiles_sm90.cuh knows.
template <int kHeadsPadded, int kGroupColumns>
struct PagedShape {
  static constexpr Element kElement = Element::f8;
  static constexpr int kHeads = kHeadsPadded;
  static constexpr bool kMasked = false;  // a weight of 0 hides the padding
  static constexpr int kPanels = 1;
  // 256 columns are two products.
  static constexpr int kSides = kGroupColumns > kSideColumns ? 2 : 1;
  static constexpr int kColumnsOfSide = kGroupColumns / kSides;
  static constexpr int kQueries = kGroupColumns / kHeads;
  static constexpr int kSideQueries = kQueries / kSides;
  static constexpr bool kSplit = kHeads >= 64;
  static constexpr int kProductColumns = kColumnsOfSide + (kSplit ? kLinearColumns : 0);
};

// What scores_paged keeps beside the heads of a piece: the rows that each of its queries sees.
struct NoPagedSeen {};
template <class Shape>
struct PagedSeen {
  std::int32_t rows[2][Shape::kQueries];
};

template <class Shape, bool kDense>
struct PagedLayout {
  static constexpr int kStages = 6;
  // A stage is the same warpgroup's in every lap of the ring. Otherwise one that is ahead could
  // wait for a lap while the lap before is still missing, which a parity does not tell apart.
  static_assert(kStages % kPagedMultiplyWarpgroups == 0);
  // Two for the heads of each side and their weights, those of a group side by side.
  static constexpr int kPlaces = 2 * Shape::kSides;
  // Rows of d bytes with 128 bytes for each; the scales are two such rows for d 128, four for d 64.
  struct Page {
    device::Chunk keys;
    float scales[256];
  };

  Columns<Shape::kColumnsOfSide / device::kChunkRows, Shape::kSplit> heads[kPlaces];
  Page pages[kStages][2];
  alignas(16) float4 weights[kPlaces][kSideColumns / 4];
  LineShared line;
  std::uint32_t present[kStages][2];  // whether the page is there
  [[no_unique_address]] std::conditional_t<kDense, PagedSeen<Shape>, NoPagedSeen> seen;
  device::Barrier full[kStages], empty[kStages];
  device::Barrier heads_full[2], heads_empty[2];
};

template <class Shape, bool kDense>
struct PagedPlan : device::Shared<PagedLayout<Shape, kDense>> {
  using Memory = PagedLayout<Shape, kDense>;
  static constexpr int kStages = Memory::kStages;
  static_assert(sizeof(Memory) <= 232448);

  WINNOW_PLACE(heads)
  WINNOW_PLACE(pages)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(heads_full)
  WINNOW_PLACE(heads_empty)
  WINNOW_PLACE(present)
  struct Page : device::Shared<typename Memory::Page> {
    using Memory = typename PagedLayout<Shape, kDense>::Page;
    WINNOW_PLACE(scales)
  };
  __device__ Page page(int stage, int which) const { return {pages()[stage][which].address}; }
  // By references the rest, found by 32-bit offsets: ptxas spills more both of the members of
  // *memory and of places.
  Memory* memory;
  template <class T>
  __device__ T& at(device::Place<T> place) const {
    return *reinterpret_cast<T*>(reinterpret_cast<std::byte*>(memory) + this->offset(place));
  }
  __device__ float4* weights(int place) const {
    return memory->weights[0] + place * (kSideColumns / 4);
  }
};

// Barriers and their arrivals:
//   full         one lane of each warp that loads pages, with the bytes of its page
//   empty        one lane of each warp of the warpgroup that has the tile, after its last product
//   heads_full   the copies of each lane of the warp of heads, and one lane for all, after their
//                weights are stored
//   heads_empty  one lane of each multiplying warp
inline constexpr int kPagedFullArrivals = 2;
inline constexpr int kPagedEmptyArrivals = 4 * device::kWarpArrival;
inline constexpr int kPagedHeadsEmptyArrivals = kPagedMultiplyWarpgroups * kPagedEmptyArrivals;
inline constexpr int kPagedHeadsFullArrivals = 32 + device::kWarpArrival;

// What a launch stores of the scores: PagedKeys, or PagedScores of scores_paged_sm90.cuh.
template <class Stored>
struct PagedParams {
  static constexpr bool kDense = Stored::kDense;

  CUtensorMap pages;  // [pages, 64 + 256 / d, d]: the rows of keys, and the scales as such rows
  int loaded_bytes;   // of a page, in shared memory
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
  device::FastDivmod blocks{1};  // of the grid
  Stored stored;
};

// [group of the launch][queries][stride]: what is absent is marked so, and what no query of the
// group sees.
struct PagedKeys {
  static constexpr bool kDense = false;
  std::uint32_t* keys;
  std::uint32_t stride;  // a multiple of kTileRows
  int queries;           // of a group at most

  __device__ std::uint32_t* of_group(const PageLine&, int group) const {
    return keys + std::int64_t{group} * queries * stride;
  }
  __device__ void store(std::uint32_t* of_group, int query, int row, bool visible,
                        float score) const {
    const std::uint64_t behind = std::uint64_t{stride} * static_cast<unsigned>(query);
    of_group[behind + row] = stored_key(visible, score);
  }
};

// ---- Load --------------------------------------------------------------------------------------

// Page `which`, 0 or 1, of each tile, by a warp.
template <class Params, class Plan>
__device__ __forceinline__ void load_pages(const Params& p, Plan shared, LineRange range,
                                           int which) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint64_t policy =
      p.line.groups_of_a_sequence == 1 ? device::policy_evict_first() : device::policy_evict_last();
  device::PipelineState<Plan::kStages> ring;
  Piece piece;
  while (range.next(piece)) {
    const std::int32_t* const table =
        p.block_tables + query_group(p.line, piece.group).sequence * p.block_tables_stride;
    // Entries behind the context are not read.
    const int end =
        min(2 * (piece.first + piece.tiles), device::ceil_div(range.rows(piece), kPagedPageRows));
    // The entry for tile from + lane. It is looked at when its page is loaded: the first page does
    // not wait for the second look-up.
    const auto look_up = [&](int from) {
      const int place = 2 * (piece.first + from + lane) + which;
      return place < end ? __ldg(table + place) : -1;
    };
    int next = look_up(0);
    for (int from = 0; from < piece.tiles; from += 32) {
      const int pages = next;
      if (from + 32 < piece.tiles) next = look_up(from + 32);
      for (int n = 0; n < min(32, piece.tiles - from); ++n) {
        const int page = __shfl_sync(device::kFullWarp, pages, n);
        const bool present = page >= 0 && page < p.num_pages;
        shared.empty()[ring.stage].wait(ring.parity ^ 1, "pages", ring.stage);
        if (lane == 0) {
          // Where there is none, another page is read, and never looked at.
          shared.at(shared.present()[ring.stage][which]) = present;
          shared.full()[ring.stage].arrive_expect(p.loaded_bytes);
          device::tensor_load(shared.pages()[ring.stage][which].address, &p.pages,
                              shared.full()[ring.stage].address, 0, 0,
                              p.map_first + p.map_step * (present ? page : 0), policy);
        }
        ring.advance();
      }
    }
  }
}

// The weights of four of this lane's columns, f32 or bf16, as they lie in memory: of a lane the
// columns belong to one query.
template <class Shape, class Params>
__device__ __forceinline__ void load_weights(const Params& p, const QueryGroup& group, int side,
                                             std::uint32_t (&weight)[4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // In the order of the other load_weights(), as WeightedSum uses them.
  const int first = lane / 4 * 16 + lane % 4 * 2;
  const int query_of_side = first / Shape::kHeads, head = first % Shape::kHeads;
  const int query = side * Shape::kSideQueries + query_of_side;
  const bool there = query_of_side < Shape::kSideQueries && query < group.count;
  const std::int64_t at =
      group.sequence * p.weights_stride0 + (group.first + query) * p.weights_stride1 + head;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = i % 2 + i / 2 * 8;
    weight[i] = 0;
    if (!there || head + column >= p.h) continue;
    weight[i] = p.weights_are_bf16 ? static_cast<const std::uint16_t*>(p.weights)[at + column]
                                   : static_cast<const std::uint32_t*>(p.weights)[at + column];
  }
}

// The heads of each piece and their weights, by a warp. What it loads into registers is under way
// while it begins the copies, as a call of few tiles waits for the first heads.
template <class Shape, class Params, class Plan>
__device__ __forceinline__ void load_heads(const Params& p, Plan shared, LineRange range) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint64_t once = device::policy_evict_first();
  device::PipelineState<2> heads;
  Piece piece;
  while (range.next(piece)) {
    const QueryGroup group = query_group(p.line, piece.group);
#pragma unroll 1
    for (int side = 0; side < Shape::kSides; ++side) {
      const int place = heads.stage * Shape::kSides + side;
      std::uint32_t weight[4];
      load_weights<Shape>(p, group, side, weight);
      if (side == 0) {
        shared.heads_empty()[heads.stage].wait(heads.parity ^ 1, "heads", heads.stage);
      }
      // In a register: of an address that is the same for all lanes ptxas 13.0 makes copies that no
      // GPU executes (cmake/check_descriptors.cmake).
      const std::uint32_t into = device::keep_in_register(shared.heads()[place].address);
      // Four rows at once, eight lanes for the 128 bytes of a row.
      const int first_row = lane / 8, column16 = lane % 8;
      const int heads_of_lane = 16 * column16 < p.d ? p.h - first_row : 0;
      const int queries_of_side = group.count - side * Shape::kSideQueries;
      const std::uint8_t* const q = p.q + group.sequence * p.q_stride0 +
                                    (group.first + side * Shape::kSideQueries) * p.q_stride1 +
                                    first_row * p.q_head_stride + 16 * column16;
      const std::uint8_t* const some = queries_of_side > 0 && heads_of_lane > 0 ? q : p.q;
      constexpr int kRows = 16;  // of one query
#pragma unroll 4
      for (int row = 0; row < Shape::kColumnsOfSide; row += kRows) {
        const int query = row / Shape::kHeads, head = row % Shape::kHeads;
        const std::uint8_t* from = q + query * p.q_stride1 + head * p.q_head_stride;
#pragma unroll
        for (int n = 0; n < kRows; n += 4) {
          const bool there = query < queries_of_side && head + n < heads_of_lane;
          device::cp_async_zfill(into + device::chunk_offset(row + n + first_row, column16),
                                 there ? from : some, there, once);
          from += 4 * p.q_head_stride;
        }
      }
      float4 used;  // in the form in which WeightedSum uses them
      float* const of_column = &used.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float whole = __uint_as_float(weight[i] << (p.weights_are_bf16 ? 16 : 0));
        of_column[i] = whole * weight_factor<Shape>(i);
      }
      shared.weights(place)[lane] = used;
    }
    if constexpr (Params::kDense) {
      const int behind = group.count - 1 - lane;  // queries of the group behind this lane's
      if (behind >= 0) {
        shared.memory->seen.rows[heads.stage][lane] =
            p.line.of_queries ? rows_of_query(p.line, group.sequence, group.first + lane)
                              : max(range.rows(piece) - behind, 0);
      }
    }
    shared.heads_full()[heads.stage].arrive_cp_async();
    shared.heads_full()[heads.stage].arrive_warp();
    heads.advance();
  }
}

// ---- Multiply ----------------------------------------------------------------------------------

// Warpgroup w takes tiles w, w + 3 and so on of the block's range.
template <class Shape, class Params, class Plan>
__device__ __forceinline__ void multiply_tiles(const Params& p, Plan shared, LineRange range,
                                               int warpgroup) {
  const std::uint64_t pages = device::descriptor_k_major(shared.pages().address);
  const std::uint64_t all_heads = device::descriptor_k_major(shared.heads().address);
  // Of a page: this lane's two rows, and where their scales are.
  int row[2], scale_place[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = WeightedSum<Shape>::row(r);
    const int byte = 4 * row[r];
    const std::uint32_t at = device::chunk_offset(byte / p.d, byte % p.d / 16) + byte % 16;
    scale_place[r] = static_cast<int>(at / sizeof(float));
  }
  device::PipelineState<Plan::kStages> ring;
  ring.advance(warpgroup);
  device::PipelineState<2> heads;
  WeightedSum<Shape> weighted_sum;
  LinearOf<Shape> linear[Shape::kSides];
  float product[Shape::kProductColumns / 2];
  int tile = warpgroup;  // of the piece
  Piece piece;
  while (range.next(piece)) {
    const int count = query_group(p.line, piece.group).count, rows = range.rows(piece);
    auto* const stored = p.stored.of_group(p.line, piece.group);
    shared.heads_full()[heads.stage].wait(heads.parity, "heads", heads.stage);
    const int place = heads.stage * Shape::kSides;
    const std::uint64_t columns =
        device::descriptor_offset(all_heads, shared.offset(shared.heads()[place]));
    if constexpr (Shape::kSides == 1) weighted_sum.load(shared.weights(place));
    if constexpr (Shape::kSplit) {
      const int warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
      for (int side = 0; side < Shape::kSides; ++side) {
        const std::uint32_t of_side = shared.heads()[place + side].address;
        linear[side].form(shared.weights(place + side), of_side,
                          of_side + Shape::kColumnsOfSide * kPanelRowBytes, warp,
                          4 * kPagedMultiplyWarpgroups);
      }
      device::bar_sync<128 * kPagedMultiplyWarpgroups>(1);
    }
    for (; tile < piece.tiles; tile += kPagedMultiplyWarpgroups) {
      const auto begin = [&](int side, int page) {
        const std::uint32_t keys =
            shared.offset(shared.pages()[ring.stage][page]) - shared.offset(shared.pages());
        begin_product<Shape>(
            device::descriptor_offset(pages, keys),
            device::descriptor_offset(columns, side * sizeof(shared.memory->heads[0])), product);
      };
      shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
      begin(0, 0);
#pragma unroll
      for (int side = 0; side < Shape::kSides; ++side) {
        if constexpr (Shape::kSides > 1) weighted_sum.load(shared.weights(place + side));
#pragma unroll
        for (int page = 0; page < 2; ++page) {
          device::wgmma_wait<0>();
          device::wgmma_pin(product);
          const bool present = shared.at(shared.present()[ring.stage][page]) != 0;
          float scale[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            scale[r] = shared.at(shared.page(ring.stage, page).scales()[scale_place[r]]);
          }
          typename WeightedSum<Shape>::Halves halves;
          if (linear[side].whole == 0) {
            weighted_sum.template weigh<false>(Shape::kHeads, linear[side], product, halves);
          } else if constexpr (Shape::kSplit) {
            weighted_sum.template weigh<true>(Shape::kHeads, linear[side], product, halves);
          }
          weighted_sum.settle(product, halves);
          // The next product runs while these sums are added up and stored.
          if (page == 0) {
            begin(side, 1);
          } else if (side + 1 < Shape::kSides) {
            begin(side + 1, 0);
          } else {
            shared.empty()[ring.stage].arrive_warp();
          }
          weighted_sum.total(halves, [&](int query_of_side, int r, float total) {
            const int query = side * Shape::kSideQueries + query_of_side;
            if (query >= count) return;
            const int at = (piece.first + tile) * kPagedTileRows + page * kPagedPageRows +
                           (r == 0 ? row[0] : row[1]);
            const bool visible = present && at < rows;
            const float score = total * (r == 0 ? scale[0] : scale[1]);
            if constexpr (Params::kDense) {
              const int seen = shared.memory->seen.rows[heads.stage][query];
              p.stored.store(stored, query, at, visible, score, seen);
            } else {
              p.stored.store(stored, query, at, visible, score);
            }
          });
        }
      }
      ring.advance(kPagedMultiplyWarpgroups);
    }
    tile -= piece.tiles;
    shared.heads_empty()[heads.stage].arrive_warp();
    heads.advance();
  }
}

// ---- The block ---------------------------------------------------------------------------------

template <class Shape, class Params>
__global__ void __launch_bounds__(kPagedThreads, 1)
    paged_scores_kernel(const __grid_constant__ Params p) {
  using Plan = PagedPlan<Shape, Params::kDense>;
  auto* const memory = reinterpret_cast<typename Plan::Memory*>(device::dynamic_shared<1024>());
  const Plan shared{{device::shared_address(memory)}, memory};
  // By a warp that measures no groups unless there are very many.
  if (threadIdx.x == kPagedThreads - 32) {
    for (int i = 0; i < Plan::kStages; ++i) {
      shared.full()[i].init(kPagedFullArrivals);
      shared.empty()[i].init(kPagedEmptyArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      shared.heads_full()[i].init(kPagedHeadsFullArrivals);
      shared.heads_empty()[i].init(kPagedHeadsEmptyArrivals);
    }
    device::fence_mbarrier_init();
  }
  if (threadIdx.x == kPagedMultiplyWarpgroups * 128 && p.num_pages > 0) {
    device::prefetch_tensor_map(&p.pages);
  }
  device::allow_next_kernel();  // its blocks come as multiprocessors get free
  // Its barrier stands between the initialisation and the roles.
  const LineRange range(p.line, p.blocks, memory->line);
  const int warpgroup = __shfl_sync(device::kFullWarp, threadIdx.x / 128, 0);
  const int warp = threadIdx.x % 128 / 32;
  if (warpgroup < kPagedMultiplyWarpgroups) {
    device::setmaxnreg_inc<kPagedMultiplyRegisters>();
    multiply_tiles<Shape>(p, shared, range, warpgroup);
  } else {
    device::setmaxnreg_dec<kPagedLoadRegisters>();
    if (warp < 2) load_pages(p, shared, range, warp);
    if (warp == 2) load_heads<Shape>(p, shared, range);
    if constexpr (Params::kDense) {
      if (warp == 3) p.stored.store_rest(p.line, memory->line.rows);
    }
  }
}

}  // namespace winnow::indexer::sm90_detail
