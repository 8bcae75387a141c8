#include "winnow/expert_parallel/descriptor.h"

#include <utility>

#include "winnow/expert_parallel/descriptor_state.h"

namespace winnow::expert_parallel {
namespace {

template <class T>
ConstTensorView view(const std::vector<T>& values, std::initializer_list<std::int64_t> shape) {
  return {values.data(), dtype_of<T>, shape};
}

std::int64_t count(const auto& values) { return static_cast<std::int64_t>(values.size()); }

}  // namespace

Descriptor::Descriptor(std::unique_ptr<State> state) : state_(std::move(state)) {}
Descriptor::~Descriptor() = default;

std::int64_t Descriptor::rows() const { return state_->rows(); }
std::int64_t Descriptor::wanted_rows() const {
  return state_->routing->wanted_rows[static_cast<std::size_t>(state_->rank)];
}
RowOrder Descriptor::order() const { return state_->routing->order; }
std::int64_t Descriptor::expert_alignment() const { return state_->routing->expert_alignment; }
std::int64_t Descriptor::worst_case_rows() const { return state_->routing->worst_case_rows; }
bool Descriptor::has_weights() const { return state_->has_weights; }
std::int64_t Descriptor::num_dispatch_token_cur_rank() const { return state_->routing->tokens; }

ConstTensorView Descriptor::num_input_tokens_per_rank() const {
  const auto& values = state_->routing->tokens_per_rank;
  return view(values, {count(values)});
}
ConstTensorView Descriptor::send_reqs_recv() const {
  const Routing& routing = *state_->routing;
  if (routing.nodes == 1) return {};
  return view(routing.send_reqs, {routing.nodes, 2, routing.max_tokens});
}
ConstTensorView Descriptor::topk_indices() const {
  const Routing& routing = *state_->routing;
  return view(routing.indices, {routing.nodes, routing.max_tokens, routing.topk});
}
ConstTensorView Descriptor::token_dst_scatter_idx() const {
  const Routing& routing = *state_->routing;
  return view(routing.rows, {routing.nodes, routing.max_tokens, routing.topk});
}
ConstTensorView Descriptor::skipped_token_mapping_indices() const {
  return view(state_->routing->first_copies, {rows()});
}
ConstTensorView Descriptor::skipped_token_topk_mapping_indices() const {
  return view(state_->routing->copies, {rows(), state_->routing->topk});
}
ConstTensorView Descriptor::expert_counts() const {
  const auto& values = state_->routing->expert_counts;
  return view(values, {count(values)});
}
ConstTensorView Descriptor::expert_offsets() const {
  const auto& values = state_->routing->expert_offsets;
  return view(values, {count(values)});
}

}  // namespace winnow::expert_parallel
