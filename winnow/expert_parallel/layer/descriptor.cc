#include "winnow/expert_parallel/layer/descriptor.h"

#include <utility>

#include "winnow/expert_parallel/layer/descriptor_state.h"

namespace winnow::expert_parallel {
namespace {

// A table of the routing where it lives: in `values`, or on a GPU at `table`.
template <class T>
ConstTensorView view(const Routing& routing, const std::vector<T>& values, const T* table,
                     std::initializer_list<std::int64_t> shape) {
  const bool on_gpu = routing.device.type == DeviceType::cuda;
  return {on_gpu ? table : values.data(), dtype_of<T>, shape, routing.device};
}

// The same on the host; absent where it does not know it.
ConstTensorView host_view(const std::vector<std::int32_t>& values) {
  if (values.empty()) return {};
  return {values.data(), DType::i32, {static_cast<std::int64_t>(values.size())}};
}

}  // namespace

Descriptor::Descriptor() : state_(std::make_unique<State>()) {
  auto routing = std::make_shared<Routing>();
  routing->wanted_rows = {0};
  routing->tokens_per_rank = {0};
  routing->expert_offsets = {0};
  state_->routing = std::move(routing);
}
Descriptor::Descriptor(std::unique_ptr<State> state) : state_(std::move(state)) {}
Descriptor::~Descriptor() = default;

std::int64_t Descriptor::rows() const { return state_->rows(); }
std::int64_t Descriptor::wanted_rows() const {
  const auto& wanted = state_->routing->wanted_rows;
  return wanted.empty() ? -1 : wanted[static_cast<std::size_t>(state_->rank)];
}
ConstTensorView Descriptor::wanted_rows_per_rank() const {
  const Routing& routing = *state_->routing;
  return view(routing, routing.wanted_rows, routing.tables.wanted, {routing.world});
}
RowOrder Descriptor::order() const { return state_->routing->order; }
std::int64_t Descriptor::expert_alignment() const { return state_->routing->expert_alignment; }
std::int64_t Descriptor::worst_case_rows() const { return state_->routing->worst_case_rows; }
bool Descriptor::has_weights() const { return state_->has_weights; }
std::int64_t Descriptor::num_dispatch_token_cur_rank() const { return state_->routing->tokens; }

ConstTensorView Descriptor::num_input_tokens_per_rank() const {
  const Routing& routing = *state_->routing;
  return view(routing, routing.tokens_per_rank, routing.tables.tokens, {routing.world});
}
ConstTensorView Descriptor::source_begins() const {
  const Routing& routing = *state_->routing;
  if (routing.order == RowOrder::expert_major) return {};
  return view(routing, routing.source_begins, routing.tables.source_begins, {routing.world + 1});
}
ConstTensorView Descriptor::send_reqs_recv() const {
  const Routing& routing = *state_->routing;
  if (routing.nodes == 1) return {};
  return view(routing, routing.send_reqs, routing.tables.send_reqs,
              {routing.nodes, 2, routing.max_tokens});
}
ConstTensorView Descriptor::topk_indices() const {
  const Routing& routing = *state_->routing;
  return view(routing, routing.indices, routing.tables.indices,
              {routing.nodes, routing.max_tokens, routing.topk});
}
ConstTensorView Descriptor::token_dst_scatter_idx() const {
  const Routing& routing = *state_->routing;
  return view(routing, routing.rows, routing.tables.rows,
              {routing.nodes, routing.max_tokens, routing.topk});
}
ConstTensorView Descriptor::skipped_token_mapping_indices() const {
  const Routing& routing = *state_->routing;
  return view(routing, routing.first_copies, routing.tables.first_copies, {rows()});
}
ConstTensorView Descriptor::skipped_token_topk_mapping_indices() const {
  const Routing& routing = *state_->routing;
  return view(routing, routing.copies, routing.tables.copies, {rows(), routing.topk});
}
ConstTensorView Descriptor::expert_counts() const {
  const Routing& routing = *state_->routing;
  return view(routing, routing.expert_counts, routing.tables.expert_counts,
              {routing.experts_per_rank});
}
ConstTensorView Descriptor::expert_offsets() const {
  const Routing& routing = *state_->routing;
  return view(routing, routing.expert_offsets, routing.tables.expert_offsets,
              {routing.experts_per_rank + 1});
}
ConstTensorView Descriptor::host_expert_counts() const {
  return host_view(state_->routing->expert_counts);
}
ConstTensorView Descriptor::host_expert_offsets() const {
  return host_view(state_->routing->expert_offsets);
}

}  // namespace winnow::expert_parallel
