// What expert_parallel::notify tells one rank, counted from the experts of all tokens of all ranks.
// It shares no code with the exchange.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "winnow/core/tensor.h"

namespace winnow::expert_parallel::oracle {

struct Notify {
  std::vector<double> node_channel_prefix_matrix, rank_channel_prefix_matrix;  // [NN, C], [W, C]
  std::vector<double> recv_node_prefix_sum, recv_rank_prefix_sum;              // [NN], [W]
  std::vector<double> num_recv_tokens, num_forward_tokens;                     // [1]
  std::vector<double> recv_pairs_per_expert;                                   // [E/W]
};

struct NotifyWorld {
  std::span<const Tensor> expert_indices;  // of every rank: [n, K]
  std::int64_t experts, local_world_size, channels, expert_alignment;

  std::int64_t ranks() const { return static_cast<std::int64_t>(expert_indices.size()); }
  std::int64_t nodes() const { return ranks() / local_world_size; }
  const Tensor& of(std::int64_t rank) const {
    return expert_indices[static_cast<std::size_t>(rank)];
  }

  // Pairs of a token for the experts [first, end).
  std::int64_t pairs(std::int64_t source, std::int64_t t, std::int64_t first,
                     std::int64_t end) const {
    std::int64_t count = 0;
    for (std::int64_t k = 0; k < of(source).size(1); ++k) {
      const std::int32_t expert = of(source).view().at<std::int32_t>(t, k);
      count += expert >= first && expert < end;
    }
    return count;
  }
  bool goes_to_rank(std::int64_t source, std::int64_t t, std::int64_t rank) const {
    const std::int64_t each = experts / ranks();
    return pairs(source, t, rank * each, (rank + 1) * each) > 0;
  }
  bool goes_to_node(std::int64_t source, std::int64_t t, std::int64_t node) const {
    const std::int64_t each = experts / nodes();
    return pairs(source, t, node * each, (node + 1) * each) > 0;
  }
};

inline Notify notify(const NotifyWorld& world, std::int64_t me) {
  Notify result;
  const std::int64_t own_tokens = world.of(me).size(0), own_node = me / world.local_world_size;
  // A token lies in a channel up to c if it comes before that channel's end.
  const std::int64_t per = (own_tokens + world.channels - 1) / world.channels;
  for (std::int64_t node = 0; node < world.nodes(); ++node) {
    for (std::int64_t c = 0; c < world.channels; ++c) {
      double count = 0;
      for (std::int64_t t = 0; t < own_tokens && t < per * (c + 1); ++t) {
        count += world.goes_to_node(me, t, node);
      }
      result.node_channel_prefix_matrix.push_back(count);
    }
  }
  for (std::int64_t rank = 0; rank < world.ranks(); ++rank) {
    for (std::int64_t c = 0; c < world.channels; ++c) {
      double count = 0;
      for (std::int64_t t = 0; t < own_tokens && t < per * (c + 1); ++t) {
        count += world.goes_to_rank(me, t, rank);
      }
      result.rank_channel_prefix_matrix.push_back(count);
    }
  }
  double forwarded = 0;
  for (std::int64_t node = 0; node < world.nodes(); ++node) {
    const std::int64_t source = node * world.local_world_size + me % world.local_world_size;
    for (std::int64_t t = 0; t < world.of(source).size(0); ++t) {
      forwarded += world.goes_to_node(source, t, own_node);
    }
    result.recv_node_prefix_sum.push_back(forwarded);
  }
  double received = 0;
  for (std::int64_t source = 0; source < world.ranks(); ++source) {
    for (std::int64_t t = 0; t < world.of(source).size(0); ++t) {
      received += world.goes_to_rank(source, t, me);
    }
    result.recv_rank_prefix_sum.push_back(received);
  }
  result.num_forward_tokens = {forwarded};
  result.num_recv_tokens = {received};
  const std::int64_t each = world.experts / world.ranks();
  for (std::int64_t expert = me * each; expert < (me + 1) * each; ++expert) {
    std::int64_t pairs = 0;
    for (std::int64_t source = 0; source < world.ranks(); ++source) {
      for (std::int64_t t = 0; t < world.of(source).size(0); ++t) {
        pairs += world.pairs(source, t, expert, expert + 1);
      }
    }
    while (pairs % world.expert_alignment != 0) ++pairs;
    result.recv_pairs_per_expert.push_back(static_cast<double>(pairs));
  }
  return result;
}

}  // namespace winnow::expert_parallel::oracle
