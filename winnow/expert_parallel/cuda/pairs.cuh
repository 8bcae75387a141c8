// How the lanes of a warp share the (token, k) pairs of tokens. Device code only.
#pragma once

namespace winnow::expert_parallel {

__device__ __forceinline__ unsigned lanes_below(int lane) { return (1u << lane) - 1; }

// A warp takes 32 / K tokens at a time, or fewer, and each lane one of their pairs.
struct PairLane {
  int lane, topk, tokens, slot, k;
  bool used;  // false in the last lanes, which have no pair
  __device__ PairLane(int topk, int lane, int at_most = 32)
      : lane(lane),
        topk(topk),
        tokens(min(32 / topk, at_most)),
        slot(lane / topk),
        k(lane % topk),
        used(slot < tokens) {}
  // The lanes of this lane's token.
  __device__ int begin() const { return lane - k; }
  __device__ unsigned token_lanes() const { return used ? (~0u >> (32 - topk)) << begin() : 0; }
};

}  // namespace winnow::expert_parallel
