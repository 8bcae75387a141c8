#include "winnow/expert_parallel/memory/layouts.h"

namespace winnow::expert_parallel {

// Faster where the SMs are enough to fill the links and to sum at once (of two ranks a row comes
// over the link for each two that are added, so that the sums take more of them) and where what
// comes over the links takes long: rows that are pushed begin 5 us later.
bool pushes_rows(const ExpertMap& map, const Config& config, std::int64_t tokens) {
  constexpr std::int64_t kLeastComing = 24 << 20, kMostUnasked = 1 << 30;  // bytes
  const int locals = map.topology.local_world_size;
  if (locals == 1 || config.sm_count < (locals == 2 ? 24 : 20)) return false;
  if (config.enable_local_combine) return true;
  const std::int64_t coming = (locals - 1) * tokens * config.hidden * size_of(config.dtype);
  return coming >= kLeastComing && pushed_bytes(map, config) <= kMostUnasked;
}

std::int64_t pushed_bytes(const ExpertMap& map, const Config& config) {
  return map.topology.world_size * config.max_tokens * config.hidden * size_of(config.dtype);
}

ControlLayout control_layout(const ExpertMap& map, const Config& config, std::int64_t row_bytes) {
  constexpr std::int64_t kWord = sizeof(std::uint64_t), kIndex = sizeof(std::int32_t);
  const std::int64_t world = map.topology.world_size, locals = map.topology.local_world_size;
  const std::int64_t nodes = map.topology.nodes();
  ControlLayout layout;
  Parts parts;
  layout.received = parts.add(world * kWord);
  layout.rail = parts.add(nodes * kWord);
  layout.done = parts.add(locals * kWord);
  layout.slices = parts.add(locals * kWord);
  layout.sent = parts.add(locals * kWord);
  layout.sum_slices = parts.add(2 * locals * kWord);
  if (pushes_rows(map, config, config.max_tokens)) {
    layout.pushed_words = (config.max_tokens + kPushedTogether - 1) / kPushedTogether;
  }
  layout.pushed = parts.add(nodes * locals * layout.pushed_words * kWord);
  layout.arrived = parts.add(3 * world * kWord);
  layout.fault = parts.add(kWord);
  layout.notices = parts.add(world * std::int64_t(sizeof(FaultNotice)));
  layout.row_bytes = Parts::round_up(row_bytes);
  // Indices, their ordinals and the weights.
  const std::int64_t pair = 2 * kIndex + size_of(config.weight_dtype);
  layout.table_bytes = nodes > 1 ? Parts::round_up(config.max_tokens * config.topk * pair) : 0;
  layout.rows = parts.add(2 * world * layout.row_bytes);
  layout.rail_rows = parts.add(nodes > 1 ? 2 * nodes * (layout.row_bytes + layout.table_bytes) : 0);
  layout.bytes = parts.end();
  return layout;
}

ControlLayout exchange_layout(const Topology& topology, std::int64_t row_bytes) {
  constexpr std::int64_t kWord = sizeof(std::uint64_t);
  const std::int64_t world = topology.world_size, nodes = topology.nodes();
  ControlLayout layout;
  Parts parts;
  layout.received = parts.add(world * kWord);
  layout.rail = parts.add(nodes * kWord);
  layout.fault = parts.add(kWord);
  layout.notices = parts.add(world * std::int64_t(sizeof(FaultNotice)));
  layout.row_bytes = Parts::round_up(row_bytes);
  layout.rows = parts.add(2 * world * layout.row_bytes);
  layout.rail_rows = parts.add(nodes > 1 ? 2 * nodes * layout.row_bytes : 0);
  layout.bytes = parts.end();
  return layout;
}

RailLayout rail_layout(const ExpertMap& map, const Config& config) {
  const std::int64_t nodes = map.topology.nodes();
  RailLayout layout;
  if (nodes == 1) return layout;
  Parts parts;
  layout.max_tokens = config.max_tokens;
  layout.chunks = (config.max_tokens + kChunkTokens - 1) / kChunkTokens;
  layout.row_bytes = config.hidden * size_of(config.dtype);
  layout.scale_bytes = rail_scale_bytes(config);
  layout.signals = parts.add(nodes * layout.chunks * std::int64_t(sizeof(std::uint64_t)));
  layout.rows = parts.add(nodes * config.max_tokens * layout.row_bytes);
  layout.scales = parts.add(nodes * config.max_tokens * layout.scale_bytes);
  layout.staged = parts.add(nodes * config.max_tokens * layout.row_bytes);
  layout.staged_scales = parts.add(nodes * config.max_tokens * layout.scale_bytes);
  layout.bytes = parts.end();
  return layout;
}

}  // namespace winnow::expert_parallel
