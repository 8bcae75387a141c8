// Decode attention of one sequence alone, CUDA. Device code only.
//
// Here the time goes into what follows one after the other before the first byte of K is asked for
// and after the last one of V has come; where L2 is cold, even the instructions on that way count.
// So nobody plans: each head has the same number of blocks (blocks_of_head()), and each of their
// warps takes every so-manieth tile, whatever the length is. A block puts together what its warps
// have, and a second kernel what the blocks of a head have.
#pragma once

#include "winnow/paged_xl/attention/attention_cuda.cuh"

namespace winnow::paged_xl::attention_cuda_detail {

// What a block leaves for a query head. Those of a head are neighbours, and there is room for a
// multiple of kAtOnce of them.
template <int kMaxDim>
struct BlockRecord {
  static constexpr int kAtOnce = 8;
  float2 maximum_and_weights;
  float values[kMaxDim];

  __host__ __device__ static int room(int blocks) {
    return (blocks + kAtOnce - 1) / kAtOnce * kAtOnce;
  }
  // Of block 0. `h`: in the pass.
  __device__ static BlockRecord* of_head(const KernelParams& p, int heads_per_pass, int blocks,
                                         int kv_head, int pass, int h) {
    const int head = (kv_head * p.passes + pass) * heads_per_pass + h;
    return reinterpret_cast<BlockRecord*>(p.partials) + head * room(blocks);
  }
};

// Grid: (blocks of a head, num_kv_heads, passes).
template <class T, int kMaxDim, int kHeads, bool kFused>
__global__ void __launch_bounds__(kWarpSize* warps_of_block<kMaxDim, kHeads, kFused>(), 1)
    one_sequence_kernel(const __grid_constant__ KernelParams p) {
  device::allow_next_kernel();
  constexpr int kWarps = warps_of_block<kMaxDim, kHeads, kFused>();
  WINNOW_BLOCK_SHARED_ALIGNED(16, sums, float[kWarps][kHeads * kMaxDim]);  // query + u before
  WINNOW_BLOCK_SHARED(maxima, float[kWarps][kHeads]);
  WINNOW_BLOCK_SHARED(weights, float[kWarps][kHeads]);
  const int w = threadIdx.x / kWarpSize, kv_head = blockIdx.y, pass = blockIdx.z;
  Warp<T, kMaxDim, kHeads, kFused, true, true> warp(p, sums[w]);
  warp.choose(0, kv_head, pass);
  // Neighbouring tiles in different blocks: the last ones do not make one block later than others.
  const int first = w * gridDim.x + blockIdx.x, step = kWarps * gridDim.x;
  warp.length = p.lengths[0];
  typename decltype(warp)::Raw raw;
  warp.load_queries(raw);
  __syncthreads();  // keeps all of this before what waits for the length
  warp.start(first, INT32_MAX, step);
  warp.store_queries(raw);
  warp.run(first, tiles_of<T>(warp.length), step);

  __syncwarp();
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int k = 0; k < kMaxDim / 16; ++k) {
      if (warp.half == 0) sums[w][h * kMaxDim + warp.row + 16 * k] = warp.sums[h][k];
    }
    if (warp.lane == 0) {
      maxima[w][h] = warp.maxima[h];
      weights[w][h] = warp.weights[h];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kHeads * kMaxDim; i += kWarps * kWarpSize) {
    const int h = i / kMaxDim, d = i % kMaxDim;
    const bool has_part = warp.lane < kWarps;
    const Shares shares(has_part ? maxima[warp.lane][h] : device::negative_infinity(),
                        has_part ? weights[warp.lane][h] : 0.0f);
    float value = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) value += shares.of(other) * sums[other][i];
    BlockRecord<kMaxDim>& record =
        BlockRecord<kMaxDim>::of_head(p, kHeads, gridDim.x, kv_head, pass, h)[blockIdx.x];
    record.values[d] = value;
    if (d == 0) record.maximum_and_weights = {shares.maximum, shares.weights};
  }
}

// Puts together what the blocks of a query head left. Grid: (group, num_kv_heads); a thread has a
// column.
template <class T, int kMaxDim, int kHeads>
__global__ void __launch_bounds__(kMaxDim)
    merge_blocks_kernel(const __grid_constant__ KernelParams p, int blocks) {
  using Record = BlockRecord<kMaxDim>;
  constexpr int kAtOnce = Record::kAtOnce;
  const int in_group = blockIdx.x, kv_head = blockIdx.y, d = threadIdx.x;
  const Record* records =
      Record::of_head(p, kHeads, blocks, kv_head, in_group / kHeads, in_group % kHeads);
  // Every block waits, so that the end of this kernel is also that of the one before.
  device::wait_for_kernel_before();
  const int lane = d % kWarpSize;
  static_assert(kMostOfHead <= kWarpSize);
  float2 part = {device::negative_infinity(), 0};
  if (lane < blocks) part = device::load_now(&records[lane].maximum_and_weights);
  float values[kAtOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) values[i] = device::load_now(&records[first + i].values[d]);
  };
  load(0);
  __syncthreads();  // keeps the loads before what waits for the first of them
  const Shares shares(part.x, part.y);
  float sum = 0;
#pragma unroll 1
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float share = shares.of(first + i);
      sum += first + i < blocks ? share * values[i] : 0.0f;
    }
    first += kAtOnce;
    if (first >= blocks) break;
    load(first);
  }
  if (d < p.dim) shares.store<T>(p, 0, kv_head * p.group + in_group, d, sum);
}

}  // namespace winnow::paged_xl::attention_cuda_detail
