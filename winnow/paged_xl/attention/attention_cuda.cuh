// Decode attention over a paged cache, CUDA. Device code only.
//
// The step only reads K and V once, so all that counts is how many bytes are under way. The tiles
// of the step (see split.h) are dealt out evenly to as many blocks as the GPU holds. The warps of a
// block take turns at the tiles of a context; each keeps a softmax of its own, and holds the next
// tile of K and its tile of V in registers while it computes: 16-byte loads that pass L1 by, no
// shared memory and no barrier on the way. At the end of a context, or of the block's part of it,
// the warps merge. Parts of contexts go to a workspace, and merge_kernel puts them together.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/paged_xl/split_cuda.cuh"
#include "winnow/paged_xl/tile_cuda.cuh"

namespace winnow::paged_xl::attention_cuda_detail {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarpSize;
inline constexpr int kMergeWarps = 8;

struct KernelParams {
  int num_kv_heads, group, dim;  // group: query heads of a cached head
  int block_shift;               // log2(block size)
  std::int32_t num_blocks;
  float scale;
  Rows<const void*> query, key, value, pos_bias_u, pos_bias_v, matrix_bd, r;
  bool matrix_bd_f32;
  Rows<const std::int32_t*> block_tables;
  Lengths lengths;
  Rows<void*> out;
  Rows<float*> lse;
  float* partials;
  Machine machine;
  std::int64_t r_bytes_per_token;
};

// Where a block leaves its part of a context: that which it ends, or that which it begins.
// A part has, per query head, the maximum of its logits, the sum of its weights, and the weighted
// sum of the values.
struct PartialLayout {
  float* partials;
  int heads, dim, blocks;
  __host__ __device__ int floats() const { return heads * (dim + 2); }
  __device__ float* part(int phase, int pass, int passes, int block, bool begins) const {
    const std::int64_t slot =
        ((std::int64_t{phase} * passes + pass) * blocks + block) * 2 + (begins ? 1 : 0);
    return partials + slot * floats();
  }
  __device__ float* maxima(float* part) const { return part; }
  __device__ float* weights(float* part) const { return part + heads; }
  __device__ float* values(float* part, int head) const { return part + 2 * heads + head * dim; }
};

__device__ __forceinline__ float softmax_weight(float logit, float maximum) {
  // All logits -inf: shifting by 0 keeps their weights at 0 instead of NaN.
  const float shift = maximum == device::negative_infinity() ? 0.0f : maximum;
  return device::ex2((logit - shift) * device::kLog2e);
}

__device__ __forceinline__ void store_lse(const KernelParams& p, int s, int h, float maximum,
                                          float sum) {
  if (p.lse.data == nullptr) return;
  p.lse.data[s * p.lse.stride0 + h] =
      sum == 0.0f ? device::negative_infinity() : maximum + logf(sum);
}

// The work of one warp on part of one context.
template <class T, int kMaxDim, int kHeads, bool kFused, bool kAligned>
struct Warp {
  static constexpr int kUnits = kMaxDim / 16;
  static constexpr int kGroups = kWarpSize / kTile<T>;  // lanes that share a token of K
  static constexpr int kRowsAtOnce = 16;                // of V: two lanes each

  const KernelParams& p;
  const int lane, token, chunk;  // of K: the lane's token in a tile, and its first unit
  const int half, row;           // of V: the lane's half of a tile, and its first row
  int sequence, kv_head, first_head, heads, length;
  const float* query_u;  // [kHeads][kMaxDim] in shared memory: query + u
  typename RelativeTile<T, kMaxDim>::Query query_v[kFused ? kHeads : 1];
  float sums[kHeads][kUnits];  // of weighted values: rows row + 16 k
  float maxima[kHeads];        // of the logits so far, the same in all lanes
  float weights[kHeads];       // sum over the lane's token

  struct Keys {
    Unit units[kUnits];
    int block;  // the lane's token is in it; -1: there is no such token
    std::uint32_t bd[kHeads];
  };
  Keys keys;       // of the tile that comes next
  int next_block;  // of the tile after it
  RelativeTile<T, kMaxDim> relative;

  __device__ Warp(const KernelParams& params, int thread)
      : p(params),
        lane(thread % kWarpSize),
        token(lane % kTile<T>),
        chunk(lane / kTile<T>),
        half(lane % 2),
        row(lane / 2) {}

  __device__ int block_mask() const { return (1 << p.block_shift) - 1; }

  // The cache block of the lane's token, -1 if the context has none there.
  __device__ int find_block(int tile, int tile_end) const {
    const int j = tile * kTile<T> + token;
    if (tile >= tile_end || j >= length) return -1;
    const std::int32_t block =
        __ldg(p.block_tables.data + sequence * p.block_tables.stride0 + (j >> p.block_shift));
    return block >= 0 && block < p.num_blocks ? block : -1;
  }

  __device__ void load_keys(int tile, int block) {
    keys.block = block;
    const int j = tile * kTile<T> + token;
    const T* from = row_of<T>(p.key, block, kv_head) +
                    ((std::int64_t{chunk} << p.block_shift) + (j & block_mask())) * kX<T>;
    const std::int64_t step = (std::int64_t{kGroups} << p.block_shift) * kX<T>;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      keys.units[k] =
          block >= 0 && k * 16 < p.dim ? load_unit<T, kAligned>(from + k * step) : zero_unit();
    }
    if constexpr (!kFused) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (block < 0 || h >= heads) continue;
        if (p.matrix_bd_f32) {
          keys.bd[h] =
              __float_as_uint(__ldg(row_of<float>(p.matrix_bd, sequence, first_head + h) + j));
        } else {
          keys.bd[h] = __ldg(reinterpret_cast<const unsigned short*>(
                                 row_of<T>(p.matrix_bd, sequence, first_head + h)) +
                             j);
        }
      }
    }
  }

  __device__ float bd_of(std::uint32_t bits) const {
    if constexpr (sizeof(T) == 2) {
      if (!p.matrix_bd_f32) {
        const auto narrow = static_cast<unsigned short>(bits);
        return to_float(reinterpret_cast<const T&>(narrow));
      }
    }
    return __uint_as_float(bits);
  }

  __device__ void load_values(int tile, int key_block, Unit (&units)[kUnits]) const {
    const int block = __shfl_sync(device::kFullWarp, key_block, half * kX<T>);
    const int j = tile * kTile<T> + half * kX<T>;
    const int used = length - j;  // tokens of the lane's half, if not all of it
    const T* from = row_of<T>(p.value, block, kv_head) + (std::int64_t{row} << p.block_shift) +
                    (j & block_mask());
    const std::int64_t step = std::int64_t{kRowsAtOnce} << p.block_shift;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      units[k] =
          block >= 0 && k * 16 < p.dim ? load_unit<T, kAligned>(from + k * step) : zero_unit();
    }
    if (used < kX<T>) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) units[k] = keep_first<T>(units[k], used);
    }
  }

  // dots[h] = (query + u) of head h times the lane's token.
  __device__ void multiply_keys(float (&dots)[kHeads]) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) dots[h] = 0;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k * 16 >= p.dim) break;
      float key[kX<T>];
      widen_as<T>(keys.units[k], key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float* query = query_u + h * kMaxDim + (chunk + k * kGroups) * kX<T>;
#pragma unroll
        for (int i = 0; i < kX<T>; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(query + i);
          dots[h] = fmaf(four.x, key[i], dots[h]);
          dots[h] = fmaf(four.y, key[i + 1], dots[h]);
          dots[h] = fmaf(four.z, key[i + 2], dots[h]);
          dots[h] = fmaf(four.w, key[i + 3], dots[h]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int distance = kTile<T>; distance < kWarpSize; distance *= 2) {
        dots[h] += __shfl_xor_sync(device::kFullWarp, dots[h], distance);
      }
    }
  }

  // Returns the weight of the lane's token in the softmax of head h, and makes room for it.
  __device__ float add_logit(int h, float logit) {
    float largest = logit;
#pragma unroll
    for (int distance = 1; distance < kTile<T>; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(device::kFullWarp, largest, distance));
    }
    if (largest > maxima[h]) {
      const float shrink = softmax_weight(maxima[h], largest);
      maxima[h] = largest;
      weights[h] *= shrink;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) sums[h][k] *= shrink;
    }
    const float weight = softmax_weight(logit, maxima[h]);
    weights[h] += weight;
    return weight;
  }

  __device__ void add_values(const Unit (&units)[kUnits], const float (&weight)[kHeads]) {
    float of_half[kHeads][kX<T>];  // weights of the tokens of the lane's half
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kX<T>; ++i) {
        of_half[h][i] = __shfl_sync(device::kFullWarp, weight[h], half * kX<T> + i);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k * 16 >= p.dim) break;
      float value[kX<T>];
      widen_as<T>(units[k], value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kX<T>; ++i) sums[h][k] = fmaf(of_half[h][i], value[i], sums[h][k]);
      }
    }
  }

  __device__ void load_relative(int tile, int h) {
    relative.template load<kAligned>(row_of<T>(p.r, first_head + h), p.r.stride1,
                                     length - 1 - tile * kTile<T>, p.dim, lane);
  }

  // Begins to load what run() needs first.
  __device__ void start(int first, int end) {
    load_keys(first, find_block(first, end));
    next_block = find_block(first + kWarps, end);
    if constexpr (kFused) load_relative(first, 0);
  }

  // Tiles first, first + kWarps, ... of [0, end).
  __device__ void run(int first, int end) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      maxima[h] = device::negative_infinity();
      weights[h] = 0;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) sums[h][k] = 0;
    }
    for (int tile = first; tile < end; tile += kWarps) {
      Unit values[kUnits];
      load_values(tile, keys.block, values);
      float logits[kHeads];
      multiply_keys(logits);
      const bool present = keys.block >= 0;
      if constexpr (!kFused) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) logits[h] += bd_of(keys.bd[h]);
      }
      load_keys(tile + kWarps, next_block);
      next_block = find_block(tile + 2 * kWarps, end);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) break;
        if constexpr (kFused) {
          logits[h] += relative.dot(query_v[h], lane);
          if (h + 1 < heads) {
            load_relative(tile, h + 1);
          } else if (tile + kWarps < end) {
            load_relative(tile + kWarps, 0);
          }
        }
        const float logit = present ? p.scale * logits[h] : device::negative_infinity();
        logits[h] = add_logit(h, logit);
      }
      add_values(values, logits);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        sums[h][k] += __shfl_xor_sync(device::kFullWarp, sums[h][k], 1);
      }
#pragma unroll
      for (int distance = 1; distance < kTile<T>; distance *= 2) {
        weights[h] += __shfl_xor_sync(device::kFullWarp, weights[h], distance);
      }
    }
  }
};

template <int kMaxDim, int kHeads>
struct Shared {
  float query_u[kHeads][kMaxDim];
  float maxima[kWarps][kHeads], weights[kWarps][kHeads];
  float sums[kWarps][kHeads][kMaxDim];
};

// Contexts of no tokens: zeros, and lse -inf. The block's heads begin at `first`.
template <class T>
__device__ void store_empty(const KernelParams& p) {
  const int num_heads = p.num_kv_heads * p.group;
  for (int s = blockIdx.x; s < p.lengths.num_seqs; s += gridDim.x) {
    if (p.lengths[s] != 0 || blockIdx.y != 0) continue;
    for (int i = threadIdx.x; i < num_heads * p.dim; i += kThreads) {
      row_of<T>(p.out, s, i / p.dim)[i % p.dim] = from_float<T>(0);
    }
    for (int h = threadIdx.x; h < num_heads; h += kThreads) store_lse(p, s, h, 0, 0);
  }
}

// How many blocks an SM should hold: what the registers allow.
template <int kMaxDim, int kHeads, bool kFused>
constexpr int blocks_per_sm() {
  if (kMaxDim > 128) return 2;
  if (kHeads > 1) return kFused ? 2 : 3;
  return kFused ? 3 : 4;
}

// Grid: (Machine::blocks, passes over the query heads of a cached head).
template <class T, int kMaxDim, int kHeads, bool kFused, bool kAligned>
__global__ void __launch_bounds__(kThreads, blocks_per_sm<kMaxDim, kHeads, kFused>())
    attention_kernel(const __grid_constant__ KernelParams p) {
  device::allow_next_kernel();
  __shared__ Shared<kMaxDim, kHeads> shared;
  const int thread = threadIdx.x, warp_index = thread / kWarpSize;
  Warp<T, kMaxDim, kHeads, kFused, kAligned> warp(p, thread);
  warp.query_u = shared.query_u[0];
  const PartialLayout layout{p.partials, kHeads, p.dim, static_cast<int>(gridDim.x)};
  const int pass = blockIdx.y;
  warp.heads = min(kHeads, p.group - pass * kHeads);

  store_empty<T>(p);
  const Split split = plan_split(sum_up<T>(p.lengths, warp.lane), p.lengths.num_seqs,
                                 p.num_kv_heads, p.r_bytes_per_token, p.machine);
  const int block = blockIdx.x;
  if (block >= split.blocks) return;

  for (int phase = 0; phase < split.phases; ++phase) {
    const Stretches stretches = split.stretches(phase);
    std::int64_t at = stretches.begin(block);
    const std::int64_t stretch_end = stretches.begin(block + 1);
    if (at == stretch_end) continue;
    Walk<T> walk(p.lengths, split.heads(phase), at, warp.lane);
    while (at < stretch_end) {
      const Place place = walk.place(at);
      const int end =
          static_cast<int>(min(std::int64_t{place.tiles}, place.tile + (stretch_end - at)));
      at += end - place.tile;
      warp.sequence = place.sequence;
      warp.length = place.length;
      warp.kv_head = split.first_head(phase) + place.head;
      warp.first_head = warp.kv_head * p.group + pass * kHeads;
      warp.start(place.tile + warp_index, end);

      for (int i = thread; i < kHeads * kMaxDim; i += kThreads) {
        const int h = i / kMaxDim, d = i % kMaxDim;
        const bool exists = h < warp.heads && d < p.dim;
        shared.query_u[h][d] =
            exists ? to_float(row_of<T>(p.query, place.sequence, warp.first_head + h)[d]) +
                         to_float(row_of<T>(p.pos_bias_u, place.sequence, warp.first_head + h)[d])
                   : 0.0f;
      }
      if constexpr (kFused) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h >= warp.heads) break;
          warp.query_v[h].load(row_of<T>(p.query, place.sequence, warp.first_head + h),
                               row_of<T>(p.pos_bias_v, place.sequence, warp.first_head + h), p.dim,
                               warp.lane);
        }
      }
      __syncthreads();

      warp.run(place.tile + warp_index, end);

#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (warp.lane == 0) {
          shared.maxima[warp_index][h] = warp.maxima[h];
          shared.weights[warp_index][h] = warp.weights[h];
        }
        if (warp.half != 0) continue;
#pragma unroll
        for (int k = 0; k < kMaxDim / 16; ++k) {
          shared.sums[warp_index][h][warp.row + 16 * k] = warp.sums[h][k];
        }
      }
      __syncthreads();

      const bool begins = place.tile == 0, whole = begins && end == place.tiles;
      float* part = layout.part(phase, pass, gridDim.y, block, begins);
      for (int i = thread; i < warp.heads * p.dim; i += kThreads) {
        const int h = i / p.dim, d = i % p.dim;
        float maximum = shared.maxima[0][h];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) maximum = fmaxf(maximum, shared.maxima[w][h]);
        float weights = 0, sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float share = softmax_weight(shared.maxima[w][h], maximum);
          weights += share * shared.weights[w][h];
          sum += share * shared.sums[w][h][d];
        }
        if (whole) {
          row_of<T>(p.out, place.sequence, warp.first_head + h)[d] =
              from_float<T>(weights == 0.0f ? 0.0f : sum / weights);
          if (d == 0) store_lse(p, place.sequence, warp.first_head + h, maximum, weights);
        } else {
          layout.values(part, h)[d] = sum;
          if (d == 0) {
            layout.maxima(part)[h] = maximum;
            layout.weights(part)[h] = weights;
          }
        }
      }
      // The next segment writes the queries, which nobody reads here any more, before the barrier
      // that its sums come after.
    }
  }
}

// Puts together the parts of the context that goes on from one block to the next; the grid is that
// of attention_kernel. Lane l of a warp has the columns l, l + 32, ...
template <class T>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize)
    merge_kernel(const __grid_constant__ KernelParams p, int heads_per_pass) {
  constexpr int kColumns = 256 / kWarpSize;
  __shared__ float shared_sums[kMergeWarps][256], shared_weights[kMergeWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int block = blockIdx.x, pass = blockIdx.y;
  const PartialLayout layout{p.partials, heads_per_pass, p.dim, static_cast<int>(gridDim.x)};
  const Split split = plan_split(sum_up<T>(p.lengths, lane), p.lengths.num_seqs, p.num_kv_heads,
                                 p.r_bytes_per_token, p.machine);
  // Every block waits, so that the end of this kernel is also that of the one before.
  device::wait_for_kernel_before();
  if (block + 1 >= split.blocks) return;
  for (int phase = 0; phase < split.phases; ++phase) {
    const Stretches stretches = split.stretches(phase);
    const std::int64_t boundary = stretches.begin(block + 1);
    if (boundary == stretches.tiles()) continue;
    const Place place = Walk<T>(p.lengths, split.heads(phase), boundary, lane).place(boundary);
    const std::int64_t first = boundary - place.tile;
    // The first block of a context merges its parts.
    if (place.tile == 0 || stretches.owner(first) != block) continue;
    const int last_block = stretches.owner(first + place.tiles - 1);

    const int kv_head = split.first_head(phase) + place.head;
    const int heads = min(heads_per_pass, p.group - pass * heads_per_pass);
    for (int h = 0; h < heads; ++h) {
      const int head = kv_head * p.group + pass * heads_per_pass + h;
      const auto part_of = [&](int b) {
        return layout.part(phase, pass, gridDim.y, b, b == block);
      };
      float maximum = device::negative_infinity();
      for (int b = block + lane; b <= last_block; b += kWarpSize) {
        maximum = fmaxf(maximum, layout.maxima(part_of(b))[h]);
      }
#pragma unroll
      for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(device::kFullWarp, maximum, distance));
      }
      float weights = 0, sums[kColumns] = {};
#pragma unroll 4
      for (int b = block + warp; b <= last_block; b += kMergeWarps) {
        float* part = part_of(b);
        const float share = softmax_weight(layout.maxima(part)[h], maximum);
        weights += share * layout.weights(part)[h];
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          const int d = lane + k * kWarpSize;
          if (d < p.dim) sums[k] += share * layout.values(part, h)[d];
        }
      }
      __syncthreads();  // the head before has been stored
      if (lane == 0) shared_weights[warp] = weights;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) shared_sums[warp][lane + k * kWarpSize] = sums[k];
      __syncthreads();
      if (static_cast<int>(threadIdx.x) >= p.dim) continue;
      float weight = 0, sum = 0;
#pragma unroll
      for (int w = 0; w < kMergeWarps; ++w) {
        weight += shared_weights[w];
        sum += shared_sums[w][threadIdx.x];
      }
      row_of<T>(p.out, place.sequence, head)[threadIdx.x] =
          from_float<T>(weight == 0.0f ? 0.0f : sum / weight);
      if (threadIdx.x == 0) store_lse(p, place.sequence, head, maximum, weight);
    }
  }
}

}  // namespace winnow::paged_xl::attention_cuda_detail
