// Decode attention over a paged cache, CUDA. Device code only.
//
// The step only reads K and V once, so all that counts is how many bytes are under way. One block
// fills a multiprocessor, and its warps work on their own: each takes a part of some context (see
// split.h) and goes through its tiles with a softmax of its own, while the next tile of K, and of
// r, is on its way into registers, as is V of this one: 16-byte loads, no shared memory and no
// barrier. A part that is a whole context gives the output, others go to a workspace where
// merge_kernel puts them together. One sequence alone: one_sequence_cuda.cuh.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/paged_xl/split_cuda.cuh"
#include "winnow/paged_xl/tile_cuda.cuh"

namespace winnow::paged_xl::attention_cuda_detail {

inline constexpr int kMergeWarps = 16;

struct KernelParams {
  int num_kv_heads, group, dim;  // group: query heads of a cached head, taken in `passes`
  int passes;
  int block_shift;  // log2(block size)
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
};

// What is left of a part: for each query head of the pass the maximum of the logits, the sum of the
// weights, and the weighted sum of the values.
struct Record {
  float* data;
  int heads, dim;

  __host__ __device__ static int floats(int heads, int dim) { return heads * (dim + 2); }
  // `heads`: of a pass.
  __device__ Record(const KernelParams& p, int heads_per_pass, std::int64_t part, int kv_head,
                    int pass)
      : heads(heads_per_pass), dim(p.dim) {
    const std::int64_t index = (part * p.num_kv_heads + kv_head) * p.passes + pass;
    data = p.partials + index * floats(heads, dim);
  }
  __device__ float& maximum(int h) const { return data[h]; }
  __device__ float& weights(int h) const { return data[heads + h]; }
  __device__ float* values(int h) const { return data + 2 * heads + h * dim; }
};

__device__ __forceinline__ float softmax_weight(float logit, float maximum) {
  // All logits -inf: shifting by 0 keeps their weights at 0 instead of NaN.
  const float shift = maximum == device::negative_infinity() ? 0.0f : maximum;
  return device::ex2((logit - shift) * device::kLog2e);
}

__device__ __forceinline__ void store_lse(const KernelParams& p, int s, int h, float maximum,
                                          float sum) {
  if (!p.lse.present()) return;
  p.lse.data[s * p.lse.stride0 + h] =
      sum == 0.0f ? device::negative_infinity() : maximum + logf(sum);
}

// Up to 32 parts of one context that are put together: each lane has one, or none (-inf and 0). The
// whole warp must call.
struct Shares {
  float maximum, weights, share;  // of all parts; of the lane's part in each of its values

  __device__ __forceinline__ Shares(float part_maximum, float part_weights)
      : maximum(part_maximum) {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(device::kFullWarp, maximum, distance));
    }
    share = softmax_weight(part_maximum, maximum);
    weights = device::warp_sum(share * part_weights);
  }
  __device__ __forceinline__ float of(int part) const {
    return __shfl_sync(device::kFullWarp, share, part);
  }
  // Column d of the output of a query head from the sum of the parts' values.
  template <class T>
  __device__ __forceinline__ void store(const KernelParams& p, int s, int h, int d,
                                        float value) const {
    row_of<T>(p.out, s, h)[d] = from_float<T>(weights == 0.0f ? 0.0f : __fdividef(value, weights));
    if (d == 0) store_lse(p, s, h, maximum, weights);
  }
};

// The work of one warp on one part. kAlone: of the only sequence, whose table entries are asked for
// where the code says so, without a branch around what uses them.
template <class T, int kMaxDim, int kHeads, bool kFused, bool kAligned, bool kAlone = false>
struct Warp {
  static constexpr int kUnits = kMaxDim / 16;
  static constexpr int kGroups = kWarpSize / kTile<T>;  // lanes that share a token of K
  static constexpr int kRowsAtOnce = 16;                // of V: two lanes each
  // The registers hold a tile of each of K, V and r at the same time.
  static constexpr bool kRoom = !kFused || kMaxDim <= 128;

  const KernelParams& p;
  const int lane, token, chunk;  // of K: the lane's token in a tile, and its first unit
  const int half, row;           // of V: the lane's half of a tile, and its first row
  int sequence, kv_head, first_head, heads, length;
  float* query_u;  // [kHeads][kMaxDim] in shared memory, of this warp alone: query + u
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

  Unit values[kUnits];

  __device__ Warp(const KernelParams& params, float* queries)
      : p(params),
        lane(threadIdx.x % kWarpSize),
        token(lane % kTile<T>),
        chunk(lane / kTile<T>),
        half(lane % 2),
        row(lane / 2),
        query_u(queries) {}

  __device__ int block_mask() const { return (1 << p.block_shift) - 1; }

  // The cache block of the lane's token, -1 if the context has none there.
  __device__ int find_block(int tile, int tile_end) const {
    const int j = tile * kTile<T> + token;
    if constexpr (kAlone) {
      std::int32_t block = -1;
      if (tile < tile_end && j < length) block = device::load_now(table_entry(j));
      return block < p.num_blocks ? max(block, -1) : -1;
    } else {
      if (tile >= tile_end || j >= length) return -1;
      const std::int32_t block = __ldg(table_entry(j));
      return block >= 0 && block < p.num_blocks ? block : -1;
    }
  }
  __device__ const std::int32_t* table_entry(int j) const {
    return p.block_tables.data + sequence * p.block_tables.stride0 + (j >> p.block_shift);
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

  // `key_block`: of the lane's token.
  __device__ void load_values(int tile, int key_block) {
    const int block = __shfl_sync(device::kFullWarp, key_block, half * kX<T>);
    const int j = tile * kTile<T> + half * kX<T>;
    const int used = length - j;  // tokens of the lane's half, if not all of it
    const T* from = row_of<T>(p.value, block, kv_head) + (std::int64_t{row} << p.block_shift) +
                    (j & block_mask());
    const std::int64_t step = std::int64_t{kRowsAtOnce} << p.block_shift;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      values[k] =
          block >= 0 && k * 16 < p.dim ? load_unit<T, kAligned>(from + k * step) : zero_unit();
    }
    if (used < kX<T>) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) values[k] = keep_first<T>(values[k], used);
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

  __device__ void add_values(const float (&weight)[kHeads]) {
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
      widen_as<T>(values[k], value);
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

  // The lane's columns of query and bias u, on their way. Alone they are neighbours, four of them
  // in one load.
  static constexpr int kColumns = kMaxDim / kWarpSize, kAtOnce = kAlone ? 4 : 1;
  struct alignas(kAtOnce * sizeof(T)) Columns {
    T elements[kAtOnce];
  };
  struct Raw {
    Columns query[kHeads][kColumns / kAtOnce], bias[kHeads][kColumns / kAtOnce];
  };
  __device__ void load_queries(Raw& raw) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kColumns / kAtOnce; ++i) {
        if constexpr (kAlone) {  // without branches: what is not there is not used
          const int head = first_head + min(h, heads - 1);
          const int d = min(lane * kColumns + 4 * i, p.dim - 4);
          raw.query[h][i] =
              *reinterpret_cast<const Columns*>(row_of<T>(p.query, sequence, head) + d);
          raw.bias[h][i] =
              *reinterpret_cast<const Columns*>(row_of<T>(p.pos_bias_u, sequence, head) + d);
        } else {
          const int d = lane + i * kWarpSize;
          const bool exists = h < heads && d < p.dim;
          raw.query[h][i] = raw.bias[h][i] = {from_float<T>(0)};
          if (!exists) continue;
          raw.query[h][i] = {row_of<T>(p.query, sequence, first_head + h)[d]};
          raw.bias[h][i] = {row_of<T>(p.pos_bias_u, sequence, first_head + h)[d]};
        }
      }
    }
  }

  __device__ void store_queries(const Raw& raw) {
    __syncwarp();  // the part before is done with its queries
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int d = kAlone ? lane * kColumns + i : lane + i * kWarpSize;
        query_u[h * kMaxDim + d] = to_float(raw.query[h][i / kAtOnce].elements[i % kAtOnce]) +
                                   to_float(raw.bias[h][i / kAtOnce].elements[i % kAtOnce]);
      }
      if constexpr (kFused) {
        if (h >= heads) continue;
        query_v[h].load(row_of<T>(p.query, sequence, first_head + h),
                        row_of<T>(p.pos_bias_v, sequence, first_head + h), p.dim, lane);
      }
    }
    __syncwarp();
  }

  __device__ void choose(int s, int head, int pass) {
    sequence = s;
    kv_head = head;
    first_head = head * p.group + pass * kHeads;
    heads = min(kHeads, p.group - pass * kHeads);
  }

  // Begins to load the first of tiles first, first + step, ... < end.
  __device__ void start(int first, int end, int step) {
    load_keys(first, find_block(first, end));
    next_block = find_block(first + step, end);
    if constexpr (kFused && kRoom) load_relative(first, 0);
  }
  // Begins to load the queries and the first tile of a part.
  __device__ void start(const Part& part, int pass, Raw& raw) {
    length = part.length;
    choose(part.sequence, part.head, pass);
    const int block = find_block(part.first_tile, part.end_tile);
    load_queries(raw);
    load_keys(part.first_tile, block);
    next_block = find_block(part.first_tile + 1, part.end_tile);
    if constexpr (kFused && kRoom) load_relative(part.first_tile, 0);
  }

  // Tiles tile, tile + step, ... < end of the context.
  __device__ void run(int tile, int end, int step) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      maxima[h] = device::negative_infinity();
      weights[h] = 0;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) sums[h][k] = 0;
    }
    for (; tile < end; tile += step) {
      const int block = keys.block;
      if constexpr (kRoom) {
        load_values(tile, block);
      } else {
        load_relative(tile, 0);
      }
      float logits[kHeads];
      multiply_keys(logits);
      if constexpr (!kFused) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) logits[h] += bd_of(keys.bd[h]);
      }
      load_keys(tile + step, next_block);
      next_block = find_block(tile + 2 * step, end);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) break;
        if constexpr (kFused) {
          logits[h] += relative.dot(query_v[h], lane);
          if (h + 1 < heads) {
            load_relative(tile, h + 1);
          } else if (kRoom && tile + step < end) {
            load_relative(tile + step, 0);
          }
        }
        logits[h] = add_logit(h, block >= 0 ? p.scale * logits[h] : device::negative_infinity());
      }
      if constexpr (!kRoom) load_values(tile, block);
      add_values(logits);
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

  // The part is a whole context.
  __device__ void store_output() const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      T* out = row_of<T>(p.out, sequence, first_head + h);
      const float inverse = weights[h] == 0.0f ? 0.0f : 1.0f / weights[h];
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (half == 0 && k * 16 < p.dim) out[row + k * 16] = from_float<T>(sums[h][k] * inverse);
      }
      if (lane == 0) store_lse(p, sequence, first_head + h, maxima[h], weights[h]);
    }
  }

  __device__ void store_record(const Record& record) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (half == 0 && k * 16 < p.dim) record.values(h)[row + k * 16] = sums[h][k];
      }
      if (lane == 0) {
        record.maximum(h) = maxima[h];
        record.weights(h) = weights[h];
      }
    }
  }
};

// Warps of a block, which has a multiprocessor for itself: what the registers allow.
template <int kMaxDim, int kHeads, bool kFused>
__host__ __device__ constexpr int warps_of_block() {
  if (kMaxDim > 128 || kHeads > 1) return 8;
  return kFused ? 12 : 16;
}

template <class T, int kMaxDim, int kHeads, bool kFused, bool kAligned>
__global__ void __launch_bounds__(kWarpSize* warps_of_block<kMaxDim, kHeads, kFused>(), 1)
    attention_kernel(const __grid_constant__ KernelParams p) {
  device::allow_next_kernel();
  constexpr int kWarps = warps_of_block<kMaxDim, kHeads, kFused>();
  WINNOW_BLOCK_SHARED_ALIGNED(16, queries, float[kWarps][kHeads * kMaxDim]);
  WINNOW_BLOCK_SHARED(states, WalkState[kWarps]);
  WINNOW_BLOCK_SHARED(taken, int);  // parts of the block's stretch, times passes
  if (threadIdx.x == 0) taken = 0;
  __syncthreads();
  Warp<T, kMaxDim, kHeads, kFused, kAligned> warp(p, queries[threadIdx.x / kWarpSize]);
  const StepWork work = sum_up<T>(p.lengths, warp.lane);
  if (work.tiles == 0) return;
  WalkState& state = states[threadIdx.x / kWarpSize];
  Walk<T>(p.lengths, state, warp.lane)
      .begin(plan_split(work, p.lengths.num_seqs, p.num_kv_heads, p.passes, p.machine), work,
             blockIdx.x);
  while (true) {
    int index = 0;
    if (warp.lane == 0) index = atomicAdd(&taken, 1);
    index = __shfl_sync(device::kFullWarp, index, 0);
    Part part;
    if (!Walk<T>(p.lengths, state, warp.lane).find(index / p.passes, part)) return;
    const int pass = index % p.passes;
    typename decltype(warp)::Raw raw;
    warp.start(part, pass, raw);
    warp.store_queries(raw);
    warp.run(part.first_tile, part.end_tile, 1);
    if (part.whole) {
      warp.store_output();
    } else {
      const std::int64_t number =
          parts_before<T>(p.lengths, state.split, part.sequence, warp.lane) + part.number;
      warp.store_record(Record(p, kHeads, number, part.head, pass));
    }
  }
}

// Puts the parts of one context together for one query head, grid: (num_heads, num_seqs). Lane l of
// a warp has the columns l, l + 32, ...
template <class T, int kMaxDim>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize)
    merge_kernel(const __grid_constant__ KernelParams p, int heads_per_pass) {
  constexpr int kColumns = kMaxDim / kWarpSize;
  constexpr int kAtOnce = 32 / kColumns;  // records that a warp reads at a time
  WINNOW_BLOCK_SHARED(shared_sums, float[kMergeWarps][kMaxDim]);
  WINNOW_BLOCK_SHARED(shared_maxima, float[kMergeWarps]);
  WINNOW_BLOCK_SHARED(shared_weights, float[kMergeWarps]);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int h = blockIdx.x, s = blockIdx.y, thread = threadIdx.x;
  const Split split = plan_split(sum_up<T>(p.lengths, lane), p.lengths.num_seqs, p.num_kv_heads,
                                 p.passes, p.machine);
  const int parts = split.parts_of(tiles_of<T>(p.lengths[s]));
  const std::int64_t first = parts_before<T>(p.lengths, split, s, lane);
  // Every block waits, so that the end of this kernel is also that of the one before.
  device::wait_for_kernel_before();
  if (parts == 1) return;
  if (parts == 0) {
    if (thread < p.dim) row_of<T>(p.out, s, h)[thread] = from_float<T>(0);
    if (thread == 0) store_lse(p, s, h, 0, 0);
    return;
  }

  const int kv_head = h / p.group, in_group = h % p.group;
  const int pass = in_group / heads_per_pass, in_pass = in_group % heads_per_pass;
  float maximum = device::negative_infinity(), weights = 0, sums[kColumns] = {};
  for (int part = warp; part < parts; part += kMergeWarps * kAtOnce) {
    float maxima[kAtOnce], their_weights[kAtOnce], values[kAtOnce][kColumns];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = part + i * kMergeWarps < parts;
      const Record record(p, heads_per_pass, first + part + (exists ? i * kMergeWarps : 0), kv_head,
                          pass);
      maxima[i] = exists ? record.maximum(in_pass) : device::negative_infinity();
      their_weights[i] = exists ? record.weights(in_pass) : 0.0f;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        const int d = lane + k * kWarpSize;
        values[i][k] = exists && d < p.dim ? record.values(in_pass)[d] : 0.0f;
      }
    }
    float largest = maximum;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) largest = fmaxf(largest, maxima[i]);
    const float shrink = softmax_weight(maximum, largest);
    maximum = largest;
    weights *= shrink;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) sums[k] *= shrink;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float share = softmax_weight(maxima[i], maximum);
      weights += share * their_weights[i];
#pragma unroll
      for (int k = 0; k < kColumns; ++k) sums[k] += share * values[i][k];
    }
  }
  if (lane == 0) {
    shared_maxima[warp] = maximum;
    shared_weights[warp] = weights;
  }
#pragma unroll
  for (int k = 0; k < kColumns; ++k) shared_sums[warp][lane + k * kWarpSize] = sums[k];
  __syncthreads();
  if (thread >= kMaxDim) return;
  const bool has_part = lane < kMergeWarps;
  const Shares shares(has_part ? shared_maxima[lane] : device::negative_infinity(),
                      has_part ? shared_weights[lane] : 0.0f);
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) sum += shares.of(w) * shared_sums[w][thread];
  if (thread < p.dim) shares.store<T>(p, s, h, thread, sum);
}

}  // namespace winnow::paged_xl::attention_cuda_detail
