// Decode, sm90: logits, and the consumers of blocks that make nothing else.
//
// Those leave the logits of each tile to the weights (decode_chain_sm90.cuh) as the registers of a
// consumer have them. The products of a logit come in the order that the tile's slot gives, which
// is therefore that of the tile in its query, wherever the block's segment begins.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/decode/decode_pieces_sm90.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

// multiply_scores() of the consumer's tile once its rows are there, and the queries where it is the
// piece's first one of the consumer.
template <int kConsumer, int kGroup, CacheFormat kFormat, class P>
__device__ __forceinline__ void multiply_scores_of(P shared, int consumer, std::uint32_t parity,
                                                   bool first, std::uint32_t q_parity,
                                                   float (&s)[32]) {
  shared.full()[consumer][kGroup].wait(parity, "consumer", 10 * consumer + kGroup);
  // Here and not by the threads that stored: it waits for all that a thread has under way, and
  // theirs are the loads of the rows to come.
  if constexpr (kFormat != CacheFormat::bf16) fence_proxy_async_shared();
  // The queries come behind the piece's first tile, in groups of the same chunks as those of slot
  // 0; the groups of slot 1 hold other chunks, so consumer 1 waits for all of them.
  if (first && (consumer == 0 || kGroup == 0)) {
#pragma unroll
    for (int group = kGroup; group < (consumer == 0 ? kGroup + 1 : kGroups); ++group) {
      shared.q_full()[group].wait(q_parity, "consumer", 10 * consumer + group);
    }
  }
  multiply_scores<kGroup>(shared, consumer, s);
}

// What the kernels of a chain leave to each other for a tile of an item. First its logits in f32,
// hidden ones -inf: float4 k of thread t of a consumer at [k][t].
inline constexpr int kChainTileBytes = kHeads * kTileRows * 4;

// The tiles of the block's piece, those of a slot by the consumer of that slot.
template <CacheFormat kFormat, class Params, class P>
__device__ __forceinline__ void logits_role(const Params& params, const Pieces& pieces, P shared) {
  const int consumer = number_of<kEither>();
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const Piece piece = pieces[0];
  const int first = piece.partial, tiles = pieces.tiles(0);
  const std::uint32_t item =
      (piece.i * params.s_q + piece.s) * params.head_blocks + piece.first_head / kHeads;
  const int first_own = (first ^ consumer) & 1;
  std::uint32_t uses = 0;
  for (int tile = first_own; tile < tiles; tile += 2) {
    float s[32];
    const auto scores = [&]<int kGroup>() {
      multiply_scores_of<kEither, kGroup, kFormat>(shared, consumer, uses & 1, tile == first_own, 0,
                                                   s);
    };
    scores.template operator()<0>();
    scores.template operator()<1>();
    scores.template operator()<2>();
    scores.template operator()<3>();
    const auto mask = shared.mask()[consumer].load();
    // Not before the last rows are there: the scales of all groups come with group 0.
    wgmma_wait<3>();
    release_group<0>(shared, consumer);
    wgmma_wait<2>();
    release_group<1>(shared, consumer);
    wgmma_wait<1>();
    release_group<2>(shared, consumer);
    wgmma_wait<0>();
    wgmma_pin(s);
    release_group<3>(shared, consumer);
    ++uses;

    hide_logits(logit_scale_of<kFormat>(params), mask, lane, s);
    const std::int64_t at = params.at(item, first + tile);
    auto* const logits = reinterpret_cast<float4*>(params.chain + at * kChainTileBytes);
    float* const maxima = params.maxima + at * kHeads + 16 * warp + lane / 4;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      logits[128 * k + thread] = make_float4(s[4 * k], s[4 * k + 1], s[4 * k + 2], s[4 * k + 3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // As in softmax_reference().
      const float top = quad_max(thread_maximum(s, r)) * params.scale.factor;
      if ((lane & 3) == 0) maxima[8 * r] = top;
    }
  }
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
