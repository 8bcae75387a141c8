// The arguments of Notifier::notify() by name, for the log of calls. Internal.
#pragma once

#include "winnow/expert_parallel/notify/notify.h"

namespace winnow::expert_parallel {

template <class Visitor>
void each_argument(const NotifyArgs& args, Visitor&& visit) {
  visit("tokens_per_rank", args.tokens_per_rank);
  visit("tokens_per_node", args.tokens_per_node);
  visit("tokens_per_expert", args.tokens_per_expert);
  visit("is_token_in_rank", args.is_token_in_rank);
  visit("channels", args.channels);
  visit("expert_alignment", args.expert_alignment);
  visit("worst_case_rows", args.worst_case_rows);
  visit("node_channel_prefix_matrix", args.node_channel_prefix_matrix);
  visit("rank_channel_prefix_matrix", args.rank_channel_prefix_matrix);
  visit("recv_node_prefix_sum", args.recv_node_prefix_sum);
  visit("recv_rank_prefix_sum", args.recv_rank_prefix_sum);
  visit("num_recv_tokens", args.num_recv_tokens);
  visit("num_forward_tokens", args.num_forward_tokens);
  visit("recv_pairs_per_expert", args.recv_pairs_per_expert);
}

}  // namespace winnow::expert_parallel
