// Top-k sparse MLA attention, forward, for GPUs of compute capability 8.0 and newer: the kernel. A
// block has one item, (query, 64 heads), and the tile loop of attend_cuda.cuh.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/lse.cuh"
#include "winnow/sparse_mla/two_sources_cuda.cuh"

namespace winnow::sparse_mla::forward_cuda_detail {

using namespace winnow::sparse_mla::attention_cuda;

struct KernelParams {
  TwoSources sources;
  const char* q;
  std::int64_t q_stride0, q_stride1;  // bytes
  char* out;
  std::int64_t out_stride0, out_stride1;  // bytes
  Rows<float*> max_logits, lse;           // may be absent
  Rows<const float*> attn_sink;           // may be absent
  float scale;                            // of logits in base 2
  float lse_of_nothing;                   // in the place of -inf
  int h_q;
  std::uint32_t head_blocks;
};

// What a block works on; blocks count the blocks of heads of a query first.
struct Item {
  std::int64_t query;
  int first, heads;  // the first head, and how many there are
};
__device__ __forceinline__ Item item_of(const KernelParams& params, std::uint32_t block) {
  const int first = static_cast<int>(block % params.head_blocks) * kHeads;
  return {block / params.head_blocks, first, min(params.h_q - first, kHeads)};
}

template <class P>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ KernelParams params) {
  const P shared{shared_address(dynamic_shared<128>())};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const Item item = item_of(params, blockIdx.x);
  if (warp == 0) find_bounds<kRows>(params.sources, item.query, lane, shared.bounds());
  __syncthreads();  // the bounds are there
  const CopiedTiles<kRows> entries(params.sources, shared.bounds());
  const int tiles = entries.tiles();
  const auto advance = [&](int tile, int warp, int lane) {
    ++tile;
    return start_copy(shared, entries, tile, tiles, slot_of<P>(tile), params.q, warp, lane);
  };
  bring_first_entries(shared, entries, warp, lane);
  copy_all(advance(-1, warp, lane));
  cp_async_commit();

  Queries<P> q;
  load_queries<P>(params.q + item.query * params.q_stride0 + item.first * params.q_stride1,
                  params.q_stride1, item.heads, warp, lane, q);
  Output<P> o = {};
  attend(shared, tiles, params.scale, thread, q, o, advance);

  // Computed anew: registers are scarce until here.
  const auto [query, first, heads] = item_of(params, forget(blockIdx.x));
  const int row = 8 * warp + lane / 4;
  RowState state = load_state(shared, thread);
  state.sum = quad_sum(state.sum);
  state.top = quad_max(state.top);
  if (lane % 4 == 0) {
    const std::int64_t head = first + row;
    float sink = negative_infinity();
    if (params.attn_sink.present() && row < heads) {
      sink = __ldg(params.attn_sink.data + params.attn_sink.offset(head)) * kLog2e;
    }
    shared.ends()[row].store(output_factor(state.sum, state.reference, sink));
    if (row < heads && params.lse.present()) {
      params.lse.data[params.lse.offset(query, head)] =
          lse_of(state.reference, state.sum, params.lse_of_nothing);
    }
    if (row < heads && params.max_logits.present()) {
      params.max_logits.data[params.max_logits.offset(query, head)] = state.top * kLn2;
    }
  }
  __syncthreads();  // store_output reads the factors
  store_output(shared, params.out + query * params.out_stride0 + first * params.out_stride1,
               params.out_stride1, heads, warp, lane, o);
}

}  // namespace winnow::sparse_mla::forward_cuda_detail
