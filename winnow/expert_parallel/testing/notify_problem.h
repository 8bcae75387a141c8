// The problems on which notify is tested, verified and timed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/notify/notify_oracle.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/expert_parallel/testing/rank_device.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/strided.h"

namespace winnow::expert_parallel {

struct NotifyShape {
  std::string name{};
  int nodes = 1, local_world_size = 1, experts_per_rank = 2;
  std::int64_t topk = 2;
  std::int64_t most_tokens = 40;  // each rank has its own number up to this
  bool even = false;              // every rank has most_tokens
  std::int64_t channels = 3, expert_alignment = 1;
  ExpertChoice choice = ExpertChoice::dropped;
  testing::Layout strides = testing::Layout::dense;

  int ranks() const { return nodes * local_world_size; }
  int experts() const { return ranks() * experts_per_rank; }
  NotifierConfig config() const {
    return {.experts = experts(), .local_world_size = local_world_size};
  }
};
std::string describe(const NotifyShape& shape);

// The experts of all ranks' tokens, [n, K] each. With three ranks or more one has no token.
std::vector<Tensor> make_indices(const NotifyShape& shape, testing::Random& random);

// What one rank gives to notify(), made by layout().
struct NotifyInputs {
  testing::StridedTensor is_token_in_rank;
  Tensor tokens_per_rank, tokens_per_node, tokens_per_expert;
  NotifyInputs(const NotifyShape& shape, const Tensor& indices);
};

// What one rank gets, not written yet.
struct NotifyOutputs {
  testing::StridedTensor node_channel_prefix_matrix, rank_channel_prefix_matrix;
  testing::StridedTensor recv_node_prefix_sum, recv_rank_prefix_sum;
  testing::StridedTensor num_recv_tokens, num_forward_tokens, recv_pairs_per_expert;
  explicit NotifyOutputs(const NotifyShape& shape);
  std::int64_t count_written() const;
};

NotifyArgs make_args(const NotifyShape& shape, const NotifyInputs& inputs,
                     const NotifyOutputs& outputs);

// What the outputs say, as the host would have learned it.
NotifyTotals totals_of(const NotifyOutputs& outputs);

// Copies at a place of what one rank gives and gets, whose addresses stay.
class NotifyCopies {
 public:
  NotifyCopies(const RankDevice& place, NotifyInputs& inputs, NotifyOutputs& outputs);
  // With views of the copies for those of the host's tensors, any other as it is; and the stream.
  NotifyArgs args(NotifyArgs args);
  void send_inputs();  // once more
  void come_back();

 private:
  struct Pair {
    Tensor* host;
    Tensor there;
  };
  template <class View>
  View there(const View& host);

  const RankDevice& place_;
  std::vector<Pair> inputs_, outputs_;
};

// notify() with copies at the place of the tensors that `args` shows, which are parts of `inputs`
// and `outputs`; what was written there comes back, also where it throws.
Backend notify_at(const RankDevice& place, Notifier& notifier, NotifyArgs args,
                  NotifyInputs& inputs, NotifyOutputs& outputs);

// The outputs and the host's totals of one rank against the oracle.
testing::CaseOutcome compare(const NotifyShape& shape, const std::vector<Tensor>& indices, int rank,
                             const NotifyOutputs& outputs, const NotifyTotals& totals);

}  // namespace winnow::expert_parallel
