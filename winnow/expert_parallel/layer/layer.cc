#include "winnow/expert_parallel/layer/layer.h"

#include <string>

#include "winnow/expert_parallel/memory/layouts.h"

namespace winnow::expert_parallel {
namespace {

// Expert indices and weights, or scatter rows, of every pair.
std::int64_t table_bytes(const Config& config) {
  const std::int64_t pairs = config.max_tokens * config.topk;
  return pairs * (std::int64_t(sizeof(std::int32_t)) + size_of(config.weight_dtype));
}

}  // namespace

ExpertMap map_of(const Config& config, const Transport& transport) {
  return {Topology(transport.world_size(), config.local_world_size), config.experts, config.topk};
}

void check_sm_count(const Check& check, const Config& config, int sm_count) {
  check.that(sm_count >= 0 && sm_count <= config.sm_count, "sm_count",
             "0 to " + std::to_string(config.sm_count) + ", the layer's", std::to_string(sm_count));
}

std::int64_t first_segment_bytes(const Config& config) {
  constexpr std::int64_t kTables = 8, kSmallEntries = 32;
  constexpr std::int64_t kPayloads = 2;  // dispatched, and from the experts
  const std::int64_t row = kPayloads * config.hidden * size_of(config.dtype) +
                           most_scale_bytes(config.hidden) +
                           config.topk * std::int64_t(3 * sizeof(std::int32_t)) + kSmallEntries;
  return Arena::round_up(config.arena_rows * row) + kTables * Arena::kAlignment;
}

Layer::Layer(std::shared_ptr<Transport> transport, const Config& given)
    : Place{given, map_of(given, *transport), transport->rank()},
      communicator(transport, map.topology, Deadline(given.timeout)),
      exchange(communicator, map, given.max_tokens, table_bytes(given), Deadline(given.timeout)),
      rail(communicator, given.max_tokens, row_bytes(), rail_scale_bytes(given), given.timeout) {
  arena.add(communicator.allocate(static_cast<std::size_t>(first_segment_bytes(config)),
                                  Deadline(given.timeout), "the arena"));
}

void Layer::meet(std::string_view operation, std::string_view phase, const Header& header,
                 const PairCounts* counts, std::span<const std::byte> table) {
  ++epoch;
  rail.begin(epoch, operation);
  exchange.run(epoch, operation, phase, header, counts, table);
}

void Layer::check_extent(int sender, const Extent& extent, std::string_view what) const {
  const std::int64_t room = arena.room(extent.segment);
  const Sender by = exchange.sender(sender);
  check_bounds(extent.offset, by, what, 0, room);
  check_bounds(extent.bytes, by, what, 0, room - extent.offset);
}

std::vector<Extent> Layer::reserve(std::vector<Extent> free_extents,
                                   std::span<const std::int64_t> bytes, std::uint64_t releasable) {
  arena.release(releasable);
  for (int sender = 0; sender < world(); ++sender) {
    const Extent& free_extent = free_extents[static_cast<std::size_t>(sender)];
    if (free_extent.segment >= 0) check_extent(sender, free_extent, "what is free");
  }
  return take_regions(free_extents, bytes, [&](std::int64_t missing) {
    const std::int64_t grown = arena.grown_for(missing);
    const std::int64_t segment = arena.add(communicator.allocate(
        static_cast<std::size_t>(grown), Deadline(config.timeout), "a larger arena"));
    return Extent{segment, 0, grown};
  });
}

}  // namespace winnow::expert_parallel
