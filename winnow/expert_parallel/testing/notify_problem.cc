#include "winnow/expert_parallel/testing/notify_problem.h"

#include <cstring>

#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/testing/compare.h"

namespace winnow::expert_parallel {
namespace {

using testing::StridedTensor;

constexpr testing::Gaps kGaps{.dense = 1, .length = 1};
constexpr testing::Tolerance kExact{0, testing::RelativeTo::nothing};

std::int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * size_of(tensor.dtype()); }

StridedTensor make_counts(std::int64_t size) {
  return testing::make_output(DType::i32, {size}, testing::Layout::dense);
}

}  // namespace

std::string describe(const NotifyShape& shape) {
  return "nodes " + std::to_string(shape.nodes) + ", L " + std::to_string(shape.local_world_size) +
         ", E " + std::to_string(shape.experts()) + ", K " + std::to_string(shape.topk) +
         (shape.even ? ", n " : ", n up to ") + std::to_string(shape.most_tokens) + ", C " +
         std::to_string(shape.channels) + ", alignment " + std::to_string(shape.expert_alignment);
}

std::vector<Tensor> make_indices(const NotifyShape& shape, testing::Random& random) {
  std::vector<Tensor> indices;
  const std::int64_t idle = shape.ranks() < 3 ? -1 : random.below(shape.ranks());
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    std::int64_t n = shape.most_tokens;
    if (!shape.even) n = rank == idle ? 0 : random.below(shape.most_tokens + 1);
    indices.emplace_back(DType::i32, std::initializer_list<std::int64_t>{n, shape.topk});
    choose_experts(indices.back(), random, shape.experts(), shape.choice);
  }
  return indices;
}

NotifyInputs::NotifyInputs(const NotifyShape& shape, const Tensor& indices)
    : is_token_in_rank(
          testing::make_output(DType::u8, {indices.size(0), shape.ranks()}, shape.strides, kGaps)),
      tokens_per_rank(DType::i32, {shape.ranks()}),
      tokens_per_node(DType::i32, {shape.nodes}),
      tokens_per_expert(DType::i32, {shape.experts()}) {
  layout({.expert_indices = indices,
          .experts = shape.experts(),
          .world_size = shape.ranks(),
          .local_world_size = shape.local_world_size,
          .tokens_per_rank = tokens_per_rank,
          .tokens_per_node = tokens_per_node,
          .tokens_per_expert = tokens_per_expert,
          .is_token_in_rank = is_token_in_rank.view});
}

NotifyOutputs::NotifyOutputs(const NotifyShape& shape)
    : node_channel_prefix_matrix(
          testing::make_output(DType::i32, {shape.nodes, shape.channels}, shape.strides, kGaps)),
      rank_channel_prefix_matrix(
          testing::make_output(DType::i32, {shape.ranks(), shape.channels}, shape.strides, kGaps)),
      recv_node_prefix_sum(make_counts(shape.nodes)),
      recv_rank_prefix_sum(make_counts(shape.ranks())),
      num_recv_tokens(make_counts(1)),
      num_forward_tokens(make_counts(1)),
      recv_pairs_per_expert(make_counts(shape.experts_per_rank)) {}

std::int64_t NotifyOutputs::count_written() const {
  std::int64_t written = 0;
  for (const StridedTensor* tensor :
       {&node_channel_prefix_matrix, &rank_channel_prefix_matrix, &recv_node_prefix_sum,
        &recv_rank_prefix_sum, &num_recv_tokens, &num_forward_tokens, &recv_pairs_per_expert}) {
    written += tensor->storage.numel() - testing::count_unwritten(tensor->storage.view());
  }
  return written;
}

NotifyArgs make_args(const NotifyShape& shape, const NotifyInputs& inputs,
                     const NotifyOutputs& outputs) {
  NotifyArgs args;
  args.tokens_per_rank = inputs.tokens_per_rank;
  args.tokens_per_node = inputs.tokens_per_node;
  args.tokens_per_expert = inputs.tokens_per_expert;
  args.is_token_in_rank = inputs.is_token_in_rank.view;
  args.channels = shape.channels;
  args.expert_alignment = shape.expert_alignment;
  args.node_channel_prefix_matrix = outputs.node_channel_prefix_matrix.view;
  args.rank_channel_prefix_matrix = outputs.rank_channel_prefix_matrix.view;
  args.recv_node_prefix_sum = outputs.recv_node_prefix_sum.view;
  args.recv_rank_prefix_sum = outputs.recv_rank_prefix_sum.view;
  args.num_recv_tokens = outputs.num_recv_tokens.view;
  args.num_forward_tokens = outputs.num_forward_tokens.view;
  args.recv_pairs_per_expert = outputs.recv_pairs_per_expert.view;
  return args;
}

NotifyTotals totals_of(const NotifyOutputs& outputs) {
  const std::vector<double> pairs = testing::read(outputs.recv_pairs_per_expert.view);
  return {outputs.num_recv_tokens.view.at<std::int32_t>(0),
          outputs.num_forward_tokens.view.at<std::int32_t>(0),
          {pairs.begin(), pairs.end()}};
}

NotifyCopies::NotifyCopies(const RankDevice& place, NotifyInputs& inputs, NotifyOutputs& outputs)
    : place_(place) {
  for (Tensor* tensor : {&inputs.is_token_in_rank.storage, &inputs.tokens_per_rank,
                         &inputs.tokens_per_node, &inputs.tokens_per_expert}) {
    inputs_.push_back({tensor, place.copy(*tensor)});
  }
  for (StridedTensor* tensor :
       {&outputs.node_channel_prefix_matrix, &outputs.rank_channel_prefix_matrix,
        &outputs.recv_node_prefix_sum, &outputs.recv_rank_prefix_sum, &outputs.num_recv_tokens,
        &outputs.num_forward_tokens, &outputs.recv_pairs_per_expert}) {
    outputs_.push_back({&tensor->storage, place.copy(tensor->storage)});
  }
}

template <class View>
View NotifyCopies::there(const View& host) {
  if (!host.present()) return host;
  std::byte* data = nullptr;
  for (std::vector<Pair>* pairs : {&inputs_, &outputs_}) {
    for (Pair& pair : *pairs) {
      const auto offset = reinterpret_cast<std::intptr_t>(host.data()) -
                          reinterpret_cast<std::intptr_t>(pair.host->data());
      if (offset < 0 || offset >= bytes_of(*pair.host)) continue;
      data = static_cast<std::byte*>(pair.there.data()) + offset;
    }
  }
  if (data == nullptr && host.numel() > 0) return host;
  return View(data, host.dtype(), host.shape(), host.strides(), place_.device());
}

NotifyArgs NotifyCopies::args(NotifyArgs args) {
  for (ConstTensorView NotifyArgs::* input :
       {&NotifyArgs::tokens_per_rank, &NotifyArgs::tokens_per_node, &NotifyArgs::tokens_per_expert,
        &NotifyArgs::is_token_in_rank}) {
    args.*input = there(args.*input);
  }
  for (TensorView NotifyArgs::* output :
       {&NotifyArgs::node_channel_prefix_matrix, &NotifyArgs::rank_channel_prefix_matrix,
        &NotifyArgs::recv_node_prefix_sum, &NotifyArgs::recv_rank_prefix_sum,
        &NotifyArgs::num_recv_tokens, &NotifyArgs::num_forward_tokens,
        &NotifyArgs::recv_pairs_per_expert}) {
    args.*output = there(args.*output);
  }
  args.stream = place_.stream();
  return args;
}

void NotifyCopies::send_inputs() {
  for (Pair& pair : inputs_) place_.write(pair.there, *pair.host);
  place_.wait();
}

void NotifyCopies::come_back() {
  for (const std::vector<Pair>* pairs : {&inputs_, &outputs_}) {
    for (const Pair& pair : *pairs) {
      const Tensor back = place_.to_host(pair.there);
      if (bytes_of(back) == 0) continue;
      std::memcpy(pair.host->data(), back.data(), static_cast<std::size_t>(bytes_of(back)));
    }
  }
}

Backend notify_at(const RankDevice& place, Notifier& notifier, NotifyArgs args,
                  NotifyInputs& inputs, NotifyOutputs& outputs) {
  NotifyCopies copies(place, inputs, outputs);
  args = copies.args(args);
  Backend ran;
  try {
    ran = notifier.notify(args);
  } catch (...) {
    copies.come_back();
    throw;
  }
  copies.come_back();
  return ran;
}

testing::CaseOutcome compare(const NotifyShape& shape, const std::vector<Tensor>& indices, int rank,
                             const NotifyOutputs& outputs, const NotifyTotals& totals) {
  const oracle::Notify expected = oracle::notify({.expert_indices = indices,
                                                  .experts = shape.experts(),
                                                  .local_world_size = shape.local_world_size,
                                                  .channels = shape.channels,
                                                  .expert_alignment = shape.expert_alignment},
                                                 rank);
  testing::CaseOutcome outcome;
  const auto add = [&](std::string_view what, const StridedTensor& tensor,
                       const std::vector<double>& values) {
    testing::compare_output(outcome, what, tensor, values, kExact);
  };
  add("node_channel_prefix_matrix", outputs.node_channel_prefix_matrix,
      expected.node_channel_prefix_matrix);
  add("rank_channel_prefix_matrix", outputs.rank_channel_prefix_matrix,
      expected.rank_channel_prefix_matrix);
  add("recv_node_prefix_sum", outputs.recv_node_prefix_sum, expected.recv_node_prefix_sum);
  add("recv_rank_prefix_sum", outputs.recv_rank_prefix_sum, expected.recv_rank_prefix_sum);
  add("num_recv_tokens", outputs.num_recv_tokens, expected.num_recv_tokens);
  add("num_forward_tokens", outputs.num_forward_tokens, expected.num_forward_tokens);
  add("recv_pairs_per_expert", outputs.recv_pairs_per_expert, expected.recv_pairs_per_expert);

  std::vector<double> host(totals.recv_pairs_per_expert.begin(),
                           totals.recv_pairs_per_expert.end());
  host.push_back(totals.recv_tokens);
  host.push_back(totals.forward_tokens);
  std::vector<double> wanted = expected.recv_pairs_per_expert;
  wanted.push_back(expected.num_recv_tokens[0]);
  wanted.push_back(expected.num_forward_tokens[0]);
  const std::int64_t size[] = {static_cast<std::int64_t>(wanted.size())};
  outcome.comparisons.push_back(testing::compare("host totals", host, wanted, size, kExact));
  return outcome;
}

}  // namespace winnow::expert_parallel
