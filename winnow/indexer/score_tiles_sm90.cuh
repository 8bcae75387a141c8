// Scores of the lightning indexer, sm90: tiles of scores are formed by tensor cores and handed to a
// sink (the choice of rows, or a store of dense scores), so that both work on the very same bits.
// topk_paged has roles of its own and takes the products and the weighted sum from here, with its
// own Shape.
//
// A persistent block takes items: the queries of a group, whose heads make 256 columns, and a range
// of key rows. The heads stay in shared memory; tiles of 128 key rows pass by.
//
//   load      one warp         the heads and weights of an item, and tiles of keys into a ring;
//                              with f8 another one: the scales of their rows
//   multiply  warpgroups 0, 1  128 columns each: products of 64 rows with them, then the weighted
//                              sums over the heads of every query, while the next product runs;
//                              at the beginning of an item, their linear terms
//   sink      four warps       take tiles of finished scores
//
//   keys --load--> ring (full, empty) --multiply--> scores (ready, free) --sink--> out
//   heads --load--> (heads_full, heads_empty) --multiply
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/named_barrier.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/pipeline.cuh"
#include "winnow/device/sm90/places.cuh"
#include "winnow/device/sm90/tensor_copy.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/indexer/linear_part_sm90.cuh"
#include "winnow/indexer/seen_rows.cuh"

namespace winnow::indexer::sm90_detail {

using namespace gpu;

// ---- Tiles -------------------------------------------------------------------------------------

inline constexpr int kTileRows = 128;       // key rows of a tile, two products of 64
inline constexpr int kUnitRows = 64;        // M of the matrix instruction
inline constexpr int kColumns = 256;        // heads of all queries of an item
inline constexpr int kSideColumns = 128;    // of one multiplying warpgroup: N
inline constexpr int kPanelRowBytes = 128;  // a panel holds 128 bytes of every row, swizzled
inline constexpr int kPanelBytes = kTileRows * kPanelRowBytes;
static_assert(kTileRows == kSideColumns);  // a panel of keys is as large as one of heads

// Registers per thread; the four warpgroups share the file of 512 x 128.
inline constexpr int kMultiplyWarpgroups = 2;
inline constexpr int kThreads = (kMultiplyWarpgroups + 2) * 128;
inline constexpr int kMultiplyRegisters = 200;  // 128 of them hold products, 32 weights
inline constexpr int kSinkRegisters = 88;
inline constexpr int kLoadRegisters = 24;
static_assert(2 * kMultiplyRegisters + kSinkRegisters + kLoadRegisters == 512);
inline constexpr int kSinkWarps = 4;

enum class Element { bf16, f8 };

// kHeadsPadded: 16, 32, 64 or 128; kMasked: sums leave out the padding; kPanels: 128-byte panels a
// row.
template <Element kElementType, int kHeadsPadded, bool kMaskedHeads, int kRowPanels>
struct Shape {
  static constexpr Element kElement = kElementType;
  static constexpr int kHeads = kHeadsPadded;
  static constexpr bool kMasked = kMaskedHeads;
  static constexpr int kPanels = kRowPanels;
  static constexpr int kPanelElements = kPanelRowBytes / (kElement == Element::bf16 ? 2 : 1);
  static constexpr int kQueries = kColumns / kHeads;          // of an item
  static constexpr int kSideQueries = kSideColumns / kHeads;  // of one warpgroup
  // Whether weighted sums are split as linear_part_sm90.cuh says, and the columns of a product.
  static constexpr bool kSplit = kElement == Element::f8 && kHeads >= 64;
  static constexpr int kProductColumns = kSideColumns + (kSplit ? kLinearColumns : 0);
  static constexpr bool kFromStart = false;  // as visible_rows() takes it
};

// ---- Shared memory -----------------------------------------------------------------------------

// Scores of one tile have a row for each query, padded so that a warp's stores meet no bank twice.
inline constexpr int kScoreStride = kTileRows + 16;

// The columns of a side: heads, and behind them, if sums are split, their linear terms.
template <int kChunks, bool kSplit>
struct Columns {
  device::Chunk heads[kChunks];
};
template <int kChunks>
struct Columns<kChunks, true> {
  device::Chunk heads[kChunks];
  std::byte terms[kLinearColumns * kPanelRowBytes];
};

template <class Shape, class Sink>
struct Layout {
  static constexpr int kStages = Shape::kPanels == 2 ? 3 : 6;
  using Panels = device::Chunk[Shape::kPanels][kTileRows / kUnitRows];
  using Heads = Columns<sizeof(Panels) / sizeof(device::Chunk), Shape::kSplit>;
  // Of a tile: its scores, and with f8 the scales of its rows.
  static constexpr int kScales = Shape::kQueries * kScoreStride;
  static constexpr int kScoreFloats = kScales + (Shape::kElement == Element::f8 ? kTileRows : 0);
  static constexpr int kSinkBytes =
      std::is_empty_v<typename Sink::Memory> ? 0 : sizeof(typename Sink::Memory);
  static constexpr int kSpace = 232448 - 640 - kColumns * 4 - 2 * int(sizeof(Heads)) -
                                kStages * int(sizeof(Panels)) - kSinkBytes;
  static constexpr int kScoreStages = std::min(kSpace / (4 * kScoreFloats), 24);
  static_assert(kScoreStages >= 2 && kScoreFloats % 4 == 0);

  Heads heads[2];  // [sides]
  Panels keys[kStages];
  alignas(16) float scores[kScoreStages][kScoreFloats];
  [[no_unique_address]] typename Sink::Memory sink;
  float4 weights[2][kSideColumns / 4];  // [sides]
  device::Barrier full[kStages], empty[kStages];
  device::Barrier ready[kScoreStages], free[kScoreStages];
  device::Barrier heads_full[2], heads_empty[2];  // [sides]
};

// The barriers and their arrivals:
//   full         the loading thread, with the bytes of a tile
//   empty        one lane of each multiplying warp, after its product of the tile
//   ready        one lane of each multiplying warp, after its scores of the tile are stored, and of
//                the warp of scales
//   free         one lane of each warp of the sink
//   heads_full   for each side, a half of the columns: the loading thread, with their bytes, after
//                its warp has stored their weights
//   heads_empty  for each side: one lane of each warp that multiplies with it
inline constexpr int kEmptyArrivals = 4 * kMultiplyWarpgroups * device::kWarpArrival;
template <class Shape>
inline constexpr int kReadyArrivals =
    kEmptyArrivals + (Shape::kElement == Element::f8 ? device::kWarpArrival : 0);
inline constexpr int kFreeArrivals = kSinkWarps * device::kWarpArrival;
inline constexpr int kHeadsEmptyArrivals = kEmptyArrivals / 2;

template <class Shape, class Sink>
struct SharedPlan : device::Shared<Layout<Shape, Sink>> {
  using Memory = Layout<Shape, Sink>;
  static constexpr int kStages = Memory::kStages;
  static constexpr int kScoreStages = Memory::kScoreStages;
  static constexpr int kTileBytes = sizeof(typename Memory::Panels);
  static_assert(sizeof(Memory) <= 232448);

  WINNOW_PLACE(heads)
  WINNOW_PLACE(keys)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(ready)
  WINNOW_PLACE(free)
  WINNOW_PLACE(heads_full)
  WINNOW_PLACE(heads_empty)
  Memory* memory;  // by which scores, weights and what a sink has are read and written
  __device__ float* scales(int slot) const { return memory->scores[slot] + Memory::kScales; }
};

// ---- Work --------------------------------------------------------------------------------------

struct ScoreParams : SeenRows {
  CUtensorMap q, k;
  const void* weights;   // [s_q, h], f32 or bf16
  const float* k_scale;  // [s_k], or null
  std::int64_t weights_stride, k_scale_stride;
  int weights_are_bf16;
  int h;
  int groups;  // of queries
  int splits;  // ranges into which the rows of a group are cut
};

// Tiles of kTileRows rows that begin at `begin`, a multiple of 4, so that scores can be stored 16
// bytes at a time; the last may reach beyond what anybody sees.
struct Item {
  int first_query, split;
  int begin, tiles;
};

// The items of this block, the same sequence for every role; all lanes of a warp call it. Later
// queries, which see the most, come first, and every second round goes through the blocks
// backwards, so that no block always has the largest item.
template <class Shape>
class Schedule {
 public:
  __device__ explicit Schedule(const ScoreParams& p)
      : p_(p), number_(blockIdx.x), step_(2 * (gridDim.x - blockIdx.x) - 1) {}

  __device__ bool next(Item& item) {
    if (number_ >= p_.groups * p_.splits) return false;
    const int group = p_.groups - 1 - number_ / p_.splits;
    item.split = number_ % p_.splits;
    item.first_query = group * Shape::kQueries;
    const SeenRange rows =
        scored_rows<Shape::kFromStart>(p_, item.first_query, Shape::kQueries, kTileRows);
    const int tiles = static_cast<int>((rows.end - rows.begin) / kTileRows);
    const int first = static_cast<int>(std::int64_t{tiles} * item.split / p_.splits);
    item.tiles = static_cast<int>(std::int64_t{tiles} * (item.split + 1) / p_.splits) - first;
    item.begin = item.tiles == 0 ? 0 : static_cast<int>(rows.begin) + first * kTileRows;
    number_ += step_;
    step_ = 2 * static_cast<int>(gridDim.x) - step_;
    return true;
  }

 private:
  const ScoreParams& p_;
  int number_, step_;
};

// ---- Load --------------------------------------------------------------------------------------

// A half where a sum takes twice a ReLU: of columns that are split, and of every second one with
// f8. Products of f8_e4m3 are finite, and x + |x| is twice the maximum, exactly. A maximum runs at
// half the rate of an addition, so both kinds of units share the work.
template <class Shape>
__device__ constexpr float weight_factor(int column) {
  return Shape::kSplit || (Shape::kElement == Element::f8 && column % 2 != 0) ? 0.5f : 1.0f;
}

// The weights of four columns of a side as WeightedSum uses them, in its order: lane 4 n + c gets
// those of columns 16 n + 2 c + {0, 1, 8, 9}, which one thread holds of a product.
template <class Shape>
__device__ __forceinline__ float4 load_weights(const ScoreParams& p, int first_query) {
  float weight[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int lane = threadIdx.x % 32;
    const int column = lane / 4 * 16 + lane % 4 * 2 + i % 2 + i / 2 * 8;
    const int query = first_query + column / Shape::kHeads, head = column % Shape::kHeads;
    weight[i] = 0.0f;
    if (query < p.s_q && head < p.h) {
      const std::int64_t at = query * p.weights_stride + head;
      weight[i] = p.weights_are_bf16
                      ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[at])
                      : static_cast<const float*>(p.weights)[at];
      weight[i] *= weight_factor<Shape>(i);
    }
  }
  return make_float4(weight[0], weight[1], weight[2], weight[3]);
}

template <class Shape, class Plan>
__device__ __forceinline__ void load(const ScoreParams& p, Plan shared) {
  const std::uint64_t heads_policy = device::policy_evict_first();
  const std::uint64_t keys_policy = device::policy_evict_last();
  const bool elected = threadIdx.x % 32 == 0;
  device::PipelineState<Plan::kStages> ring;
  std::uint32_t parity = 0;
  Schedule<Shape> schedule(p);
  Item item;
  while (schedule.next(item)) {
    for (int tile = 0; tile < item.tiles; ++tile) {
      shared.empty()[ring.stage].wait(ring.parity ^ 1, "keys", ring.stage);
      if (elected) {
        shared.full()[ring.stage].arrive_expect(Plan::kTileBytes);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel) {
          device::tensor_load(shared.keys()[ring.stage][panel].address, &p.k,
                              shared.full()[ring.stage].address, panel * Shape::kPanelElements,
                              item.begin + tile * kTileRows, keys_policy);
        }
      }
      ring.advance();
      if (tile > 0) continue;
      // The heads come after the first keys of an item: those of the item before are in use until
      // it ends.
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int first_query = item.first_query + side * Shape::kSideQueries;
        const float4 weights = load_weights<Shape>(p, first_query);
        shared.heads_empty()[side].wait(parity ^ 1, "heads", side);
        shared.memory->weights[side][threadIdx.x % 32] = weights;
        __syncwarp();
        if (elected) {
          shared.heads_full()[side].arrive_expect(Plan::kTileBytes);
#pragma unroll
          for (int panel = 0; panel < Shape::kPanels; ++panel) {
            device::tensor_load(shared.heads()[side].address + panel * kPanelBytes, &p.q,
                                shared.heads_full()[side].address, panel * Shape::kPanelElements, 0,
                                first_query, heads_policy);
          }
        }
      }
      parity ^= 1;
    }
  }
}

// ---- Scales of keys ----------------------------------------------------------------------------

// A warp puts the scales of a tile's rows behind its scores; with f8 only.
template <class Shape, class Plan>
__device__ __forceinline__ void load_scales(const ScoreParams& p, Plan shared) {
  device::PipelineState<Plan::kScoreStages> slot;
  Schedule<Shape> schedule(p);
  Item item;
  while (schedule.next(item)) {
    for (int tile = 0; tile < item.tiles; ++tile) {
      float scale[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = item.begin + tile * kTileRows + 32 * e + static_cast<int>(threadIdx.x % 32);
        scale[e] = row < p.s_k ? __ldg(p.k_scale + row * p.k_scale_stride) : 1.0f;
      }
      shared.free()[slot.stage].wait(slot.parity ^ 1, "scales", slot.stage);
#pragma unroll
      for (int e = 0; e < 4; ++e) shared.scales(slot.stage)[32 * e + threadIdx.x % 32] = scale[e];
      shared.ready()[slot.stage].arrive_warp();
      slot.advance();
    }
  }
}

// The scores of one query and rows 4 lane + {0, 1, 2, 3} of a tile, for a sink; never -0.
template <class Shape, class Plan>
__device__ __forceinline__ void read_scores(Plan shared, int stage, int query, float (&scores)[4]) {
  const int lane = threadIdx.x % 32;
  const float4 four =
      reinterpret_cast<const float4*>(shared.memory->scores[stage] + query * kScoreStride)[lane];
  scores[0] = four.x, scores[1] = four.y, scores[2] = four.z, scores[3] = four.w;
  if constexpr (Shape::kElement == Element::f8) {
    const float4 scale = reinterpret_cast<const float4*>(shared.scales(stage))[lane];
    scores[0] = fmaf(scores[0], scale.x, 0.0f), scores[1] = fmaf(scores[1], scale.y, 0.0f);
    scores[2] = fmaf(scores[2], scale.z, 0.0f), scores[3] = fmaf(scores[3], scale.w, 0.0f);
  } else {
#pragma unroll
    for (float& score : scores) score += 0.0f;
  }
}
// Those of rows lane + {0, 32, 64, 96}.
template <class Shape, class Plan>
__device__ __forceinline__ void read_scores_apart(Plan shared, int stage, int query,
                                                  float (&scores)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float score = shared.memory->scores[stage][query * kScoreStride + 32 * e + lane];
    if constexpr (Shape::kElement == Element::f8) {
      scores[e] = fmaf(score, shared.scales(stage)[32 * e + lane], 0.0f);
    } else {
      scores[e] = score + 0.0f;
    }
  }
}

// ---- Multiply ----------------------------------------------------------------------------------

// Begins the product of 64 key rows with this warpgroup's columns; both are descriptors.
template <class Shape>
__device__ __forceinline__ void begin_product(std::uint64_t keys, std::uint64_t heads,
                                              float (&product)[Shape::kProductColumns / 2]) {
  device::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4 * Shape::kPanels; ++step) {
    const std::uint32_t offset = step / 4 * kPanelBytes + step % 4 * 32;
    const std::uint64_t a = device::descriptor_offset(keys, offset);
    const std::uint64_t b = device::descriptor_offset(heads, offset);
    if constexpr (Shape::kElement == Element::bf16) {
      device::wgmma_m64n128k16<device::Major::K, device::Major::K>(product, a, b, step > 0);
    } else if constexpr (Shape::kSplit) {
      device::wgmma_f8_negated(product, a, b, step > 0);
    } else if constexpr (Shape::kProductColumns == 64) {
      device::wgmma_m64n64k32_f8(product, a, b, step > 0);
    } else {
      device::wgmma_m64n128k32_f8(product, a, b, step > 0);
    }
  }
  device::wgmma_commit();
}

// The weighted sums over the heads of 64 rows, for the queries of one side. The sum over the heads
// has the same order for every row and query: along a lane's columns, then lanes 2 apart, then
// neighbours.
template <class Shape>
struct WeightedSum {
  static constexpr int kHeld = Shape::kSideQueries * Shape::kHeads / 4;  // columns of a lane
  float weight[kHeld];  // of these columns, times weight_factor()

  __device__ __forceinline__ void load(const float4* weights) {
#pragma unroll
    for (int n = 0; n < kHeld / 4; ++n) {
      const float4 four = weights[4 * n + threadIdx.x % 4];
      weight[4 * n] = four.x;
      weight[4 * n + 1] = four.y;
      weight[4 * n + 2] = four.z;
      weight[4 * n + 3] = four.w;
    }
  }

  static constexpr int kSums = 2 * Shape::kSideQueries;  // of queries, and rows 8 apart

  // Along this lane's columns. With `kWhole` the sums of the queries in `whole` are not split; they
  // have no linear part.
  template <bool kWhole>
  __device__ __forceinline__ void sums(int heads, unsigned whole,
                                       const float (&product)[Shape::kProductColumns / 2],
                                       float (&sum)[kSums]) const {
    constexpr int kColumnsOfQuery = Shape::kHeads / 4;  // that a lane holds
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < kSums; ++s) sum[s] = 0.0f;
#pragma unroll
    for (int n = 0; n < kColumnsOfQuery; ++n) {
      // A padded head counts nothing, also where a key holds infinities.
      const bool counts = !Shape::kMasked || n / 2 * 8 + lane % 4 * 2 + n % 2 < heads;
#pragma unroll
      for (int query = 0; query < Shape::kSideQueries; ++query) {
        const int i = query * kColumnsOfQuery + n;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float dot = product[i / 2 * 4 + 2 * r + i % 2];
          float positive;
          if constexpr (Shape::kSplit) {
            positive = fabsf(dot);
            if (kWhole && whole >> query & 1) positive -= dot;  // the product is negated
          } else {
            positive =
                weight_factor<Shape>(i) == 1.0f ? device::relu(dot) : __fadd_rn(dot, fabsf(dot));
          }
          const float next = fmaf(weight[i], positive, sum[2 * query + r]);
          if (counts) sum[2 * query + r] = next;
        }
      }
    }
  }

  // This lane's row r of a product, 0 or 1.
  __device__ static int row(int r) {
    return static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + 8 * r;
  }

  // The sums of lanes two apart, of which each keeps half: its own sums, and what it gets.
  struct Halves {
    float kept[kSums / 2], got[kSums / 2];
    // Where sums are split: what LinearPart says of them.
    float linear[kSums / 2];
    std::uint32_t found;
  };

  // Of a product of 64 rows. The product is free after settle(), while the last shuffle is under
  // way; between them is room for waits: ptxas asks a barrier before the sums, but not before a
  // branch.
  template <bool kWhole, class Linear>
  __device__ __forceinline__ void weigh(int heads, const Linear& linear,
                                        const float (&product)[Shape::kProductColumns / 2],
                                        Halves& halves) const {
    if constexpr (Shape::kSplit) halves.found = Linear::look(product);
    float sum[kSums];
    sums<kWhole>(heads, linear.whole, product, sum);
    const bool upper = threadIdx.x % 32 & 2;
#pragma unroll
    for (int s = 0; s < kSums / 2; ++s) {
      const float give = upper ? sum[s] : sum[s + kSums / 2];
      halves.kept[s] = upper ? sum[s + kSums / 2] : sum[s];
      halves.got[s] = __shfl_xor_sync(device::kFullWarp, give, 2);
    }
    if constexpr (Shape::kSplit) {
      linear.parts(product, halves.linear);
      if (kWhole && !linear.splits_kept()) {
#pragma unroll
        for (float& part : halves.linear) part = 0.0f;
      }
    }
  }
  __device__ __forceinline__ static void settle(const float (&product)[Shape::kProductColumns / 2],
                                                Halves& halves) {
    if constexpr (Shape::kSplit) {
      LinearPart<Shape>::clear_zeros(halves.found, product, halves);
    }
  }

  // Adds up the halves, then what neighbours have of them, and calls take(query, r, total) for this
  // lane's share of the totals, those of row(r).
  template <class Take>
  __device__ __forceinline__ static void total(const Halves& halves, const Take& take) {
    const int lane = threadIdx.x % 32;
    const bool upper = lane & 2, odd = lane & 1;
    float half[kSums / 2];
#pragma unroll
    for (int s = 0; s < kSums / 2; ++s) {
      half[s] = halves.kept[s] + halves.got[s];
      if constexpr (Shape::kSplit) half[s] += halves.linear[s];
    }
    if constexpr (kSums == 2) {
      const float both = half[0] + __shfl_xor_sync(device::kFullWarp, half[0], 1);
      if (!odd) take(0, upper ? 1 : 0, both);
    } else {
#pragma unroll
      for (int s = 0; s < kSums / 4; ++s) {
        const float give = odd ? half[s] : half[s + kSums / 4];
        const float keep = odd ? half[s + kSums / 4] : half[s];
        // The index of this lane's total: `upper` is its highest digit, then `odd`, then s.
        const int held = (upper ? kSums / 2 : 0) + (odd ? kSums / 4 : 0) + s;
        const int r = kSums == 4 ? (odd ? 1 : 0) : s % 2;
        take(held / 2, r, keep + __shfl_xor_sync(device::kFullWarp, give, 1));
      }
    }
  }
};

template <class Shape>
using LinearOf = typename std::conditional<Shape::kSplit, LinearPart<Shape>, NoLinearPart>::type;

// What a multiplying warpgroup carries from tile to tile.
template <class Shape, class Plan>
struct Multiplier {
  const ScoreParams& p;
  Plan shared;
  int side;
  std::uint64_t keys, heads;  // descriptors of the first stage and of this side's columns
  device::PipelineState<Plan::kStages> ring{};
  device::PipelineState<Plan::kScoreStages> out{};
  float product[2][Shape::kProductColumns / 2];  // of the upper and the lower half of a tile
  WeightedSum<Shape> weighted_sum;
  LinearOf<Shape> linear;

  __device__ __forceinline__ void begin_half(int half) {
    // The offset counts from the first stage of keys: one from the beginning of shared memory costs
    // up to 3 % more code.
    const std::uint32_t at =
        shared.offset(shared.keys()[ring.stage][0][half]) - shared.offset(shared.keys());
    begin_product<Shape>(device::descriptor_offset(keys, at), heads, product[half]);
  }

  using Halves = typename WeightedSum<Shape>::Halves;

  // The sums of a half of a tile whose product is finished.
  template <bool kWhole>
  __device__ __forceinline__ void weigh(float (&finished)[Shape::kProductColumns / 2],
                                        Halves& halves) {
    device::wgmma_pin(finished);
    weighted_sum.template weigh<kWhole>(p.h, linear, finished, halves);
  }

  // Stores the scores of a half of a tile.
  __device__ __forceinline__ void store(const Halves& halves, int slot, int half) {
    float* const scores =
        shared.memory->scores[slot] + side * Shape::kSideQueries * kScoreStride + half * kUnitRows;
    WeightedSum<Shape>::total(halves, [&](int query, int r, float total) {
      scores[query * kScoreStride + WeightedSum<Shape>::row(r)] = total;
    });
  }

  // Scores of kTiles tiles: a half is weighed while the next one is multiplied. ptxas wants the
  // sequence written out: nothing may be in flight where a loop closes. A product begins before the
  // shuffles behind it end, and barriers are asked before it begins: behind it they answer late.
  template <int kTiles, bool kWhole = false>
  __device__ __forceinline__ void score_tiles() {
    shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
    begin_half(0);
    Halves halves;
    int slot = 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const bool next = tile + 1 < kTiles;
      const int stage = ring.stage;
      shared.free()[out.stage].wait(out.parity ^ 1, "scores", out.stage);
      if (tile > 0) WeightedSum<Shape>::settle(product[1], halves);
      begin_half(1);
      if (tile > 0) finish_tile(halves, slot);
      slot = out.stage;
      out.advance();
      ring.advance();
      device::wgmma_wait<1>();
      weigh<kWhole>(product[0], halves);
      if (next) {
        shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
      }
      WeightedSum<Shape>::settle(product[0], halves);
      if (next) begin_half(0);
      store(halves, slot, 0);
      if (next) {
        device::wgmma_wait<1>();
      } else {
        device::wgmma_wait<0>();
      }
      shared.empty()[stage].arrive_warp();
      weigh<kWhole>(product[1], halves);
    }
    WeightedSum<Shape>::settle(product[1], halves);
    finish_tile(halves, slot);
  }

  __device__ __forceinline__ void finish_tile(const Halves& halves, int slot) {
    store(halves, slot, 1);
    shared.ready()[slot].arrive_warp();
  }
};

template <class Shape, class Plan>
__device__ __forceinline__ void multiply(const ScoreParams& p, Plan shared, int side) {
  constexpr int kBatch = 4;  // tiles
  Multiplier<Shape, Plan> multiplier{p, shared, side,
                                     device::descriptor_k_major(shared.keys().address),
                                     device::descriptor_k_major(shared.heads()[side].address)};
  std::uint32_t parity = 0;
  Schedule<Shape> schedule(p);
  Item item;
  while (schedule.next(item)) {
    if (item.tiles == 0) continue;
    shared.heads_full()[side].wait(parity, "heads", side);
    parity ^= 1;
    multiplier.weighted_sum.load(shared.memory->weights[side]);
    int tile = 0;
    if constexpr (Shape::kSplit) {
      const std::uint32_t heads = shared.heads()[side].address;
      multiplier.linear.form(shared.memory->weights[side], heads, heads + kPanelBytes,
                             threadIdx.x % 128 / 32, 4);
      device::bar_sync<128>(1 + side);
      if (multiplier.linear.whole != 0) {
        for (; tile < item.tiles; ++tile) multiplier.template score_tiles<1, true>();
      }
    }
    for (; tile + kBatch <= item.tiles; tile += kBatch) {
      multiplier.template score_tiles<kBatch>();
    }
    for (; tile < item.tiles; ++tile) multiplier.template score_tiles<1>();
    shared.heads_empty()[side].arrive_warp();
  }
}

// ---- The block ---------------------------------------------------------------------------------

// Runs the roles of a block; `Sink` has Memory, what it wants of shared memory, and run(params,
// shared, warp) for each of its four warps.
template <class Sink, class Shape>
__device__ __forceinline__ void run_roles(const ScoreParams& p, const typename Sink::Params& sink) {
  using Plan = SharedPlan<Shape, Sink>;
  auto* const memory = reinterpret_cast<typename Plan::Memory*>(device::dynamic_shared<1024>());
  const Plan shared{{device::shared_address(memory)}, memory};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::kStages; ++i) {
      shared.full()[i].init(1);
      shared.empty()[i].init(kEmptyArrivals);
    }
    for (int i = 0; i < Plan::kScoreStages; ++i) {
      shared.ready()[i].init(kReadyArrivals<Shape>);
      shared.free()[i].init(kFreeArrivals);
    }
    for (int side = 0; side < 2; ++side) {
      shared.heads_full()[side].init(1);
      shared.heads_empty()[side].init(kHeadsEmptyArrivals);
    }
    device::fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(device::kFullWarp, threadIdx.x / 128, 0);
  const int warp = threadIdx.x % 128 / 32;
  if (warpgroup < kMultiplyWarpgroups) {
    device::setmaxnreg_inc<kMultiplyRegisters>();
    multiply<Shape>(p, shared, warpgroup);
  } else if (warpgroup == kMultiplyWarpgroups) {
    device::setmaxnreg_dec<kSinkRegisters>();
    Sink::template run<Shape>(p, sink, shared, warp);
  } else {
    device::setmaxnreg_dec<kLoadRegisters>();
    if (warp == 0) load<Shape>(p, shared);
    if constexpr (Shape::kElement == Element::f8) {
      if (warp == 1) load_scales<Shape>(p, shared);
    }
  }
}

}  // namespace winnow::indexer::sm90_detail
