#include "winnow/expert_parallel/dispatch/dispatch_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace winnow::expert_parallel {
namespace {

void copy(void* to, const void* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

// Of the values of a row's pairs.
std::int64_t value_row_bytes(const Config& config, const Request& request) {
  const std::int64_t pairs = request.order == RowOrder::token_major ? config.topk : 1;
  return pairs * size_of(config.weight_dtype);
}

}  // namespace

CombineRoom::CombineRoom(const Config& config, const Request& request, std::int64_t rows) {
  if (request.copy_out) {
    values = RegionLayout(config, request, rows).values;
    return;
  }
  rows = std::max<std::int64_t>(rows, 1);
  values = Arena::round_up(rows * config.hidden * size_of(config.dtype));
  bytes = values + Arena::round_up(rows * value_row_bytes(config, request));
}

RegionLayout::RegionLayout(const Config& config, const Request& request, std::int64_t rows) {
  const bool token_major = request.order == RowOrder::token_major;
  const std::int64_t topk = config.topk;
  payload_bytes = request.row_bytes;
  if (request.weights) weight_bytes = size_of(config.weight_dtype) * (token_major ? topk : 1);
  scale_bytes = request.scale_bytes;
  if (token_major) id_bytes = topk * std::int64_t(sizeof(std::int32_t));
  if (!token_major && request.cached == nullptr) source_bytes = sizeof(RowSource);
  if (request.scatter) owner_bytes = sizeof(std::uint64_t);
  if (request.copy_out) value_bytes = value_row_bytes(config, request);

  const auto append = [&](std::int64_t& offset, std::int64_t size) {
    offset = bytes;
    bytes += Arena::round_up(rows * size);
  };
  std::int64_t payload = 0;
  const std::int64_t buffer_bytes = config.hidden * size_of(config.dtype);
  append(payload, request.copy_out ? std::max(payload_bytes, buffer_bytes) : payload_bytes);
  append(weights, weight_bytes);
  append(scales, scale_bytes);
  append(ids, id_bytes);
  append(sources, source_bytes);
  append(owners, owner_bytes);
  append(values, value_bytes);
  bytes = std::max(bytes, Arena::kAlignment);  // no rows: a region all the same
}

RegionTables::RegionTables(std::byte* data, const RegionLayout& layout)
    : payload(data),
      weights(layout.weight_bytes > 0 ? data + layout.weights : nullptr),
      scales(layout.scale_bytes > 0 ? data + layout.scales : nullptr),
      ids(layout.id_bytes > 0 ? untrusted_at<std::int32_t>(data, layout.ids) : nullptr),
      sources(layout.source_bytes > 0 ? untrusted_at<RowSource>(data, layout.sources) : nullptr),
      owners(layout.owner_bytes > 0 ? reinterpret_cast<std::uint64_t*>(data + layout.owners)
                                    : nullptr) {}

void check_bounds(const RowSource& source, const Sender& by, std::int64_t world, std::int64_t rows,
                  std::int64_t topk) {
  check_bounds(source.rank, by, "the source of a row", -1, world - 1);
  if (source.rank < 0) return;
  check_bounds(source.k, by, "the source of a row", 0, topk - 1);
  check_bounds(source.first, by, "the source of a row", 0, rows - 1);
}

RowWriter::RowWriter(const Layer& layer, const Request& request, const RegionLayout& sizes,
                     std::vector<RegionTables> ranks)
    : map_(layer.map),
      first_rank_(layer.map.topology.rank(layer.node(), 0)),
      order_(request.order),
      sizes_(sizes),
      ranks_(std::move(ranks)) {}

void RowWriter::write(const TokenRecord& token) const {
  int locals[kMaxTopk];  // of the ranks that get a row
  for (int k = 0; k < map_.topk; ++k) {
    locals[k] = token.rows[k] < 0 ? -1 : map_.rank_of(token.experts[k]) - first_rank_;
  }
  order_ == RowOrder::expert_major ? write_pairs(token, locals) : write_token(token, locals);
}

void RowWriter::write_pairs(const TokenRecord& token, const int* locals) const {
  const std::int64_t weight_bytes = sizes_.weight_bytes;
  for (int k = 0; k < map_.topk; ++k) {
    if (locals[k] < 0) continue;
    const RegionTables& to = rank(locals[k]);
    const std::int64_t row = token.rows[k];
    write_payload(token, to, row);
    if (to.weights) {
      copy(to.weights + row * weight_bytes, token.weights + k * weight_bytes, weight_bytes);
    }
    if (to.sources) {
      const auto first = std::find(locals, locals + k, locals[k]) - locals;
      to.sources[row].write(
          {token.source, static_cast<std::int32_t>(token.token), k, token.rows[first]});
    }
  }
}

void RowWriter::write_token(const TokenRecord& token, const int* locals) const {
  const std::int64_t weight_bytes = sizes_.weight_bytes / map_.topk;
  for (int first = 0; first < map_.topk; ++first) {
    const int local = locals[first];
    if (local < 0 || std::find(locals, locals + first, local) != locals + first) continue;
    const RegionTables& to = rank(local);
    const std::int64_t row = token.rows[first];
    write_payload(token, to, row);
    Untrusted<std::int32_t>* ids = to.ids + row * map_.topk;
    std::byte* weights = to.weights ? to.weights + row * sizes_.weight_bytes : nullptr;
    for (int k = 0; k < map_.topk; ++k) {
      const bool here = locals[k] == local;
      ids[k].write(here ? token.experts[k] % map_.per_rank() : -1);
      if (weights == nullptr) continue;
      std::byte* weight = weights + k * weight_bytes;
      here ? copy(weight, token.weights + k * weight_bytes, weight_bytes)
           : void(std::memset(weight, 0, static_cast<std::size_t>(weight_bytes)));
    }
  }
}

void RowWriter::write_payload(const TokenRecord& token, const RegionTables& to,
                              std::int64_t row) const {
  copy(to.payload + row * sizes_.payload_bytes, token.payload, sizes_.payload_bytes);
  if (to.scales) copy(to.scales + row * sizes_.scale_bytes, token.scales, sizes_.scale_bytes);
}

void RowWriter::clear_row(const RegionTables& to, std::int64_t row) const {
  if (to.weights) {
    std::memset(to.weights + row * sizes_.weight_bytes, 0,
                static_cast<std::size_t>(sizes_.weight_bytes));
  }
  for (int k = 0; to.ids && k < map_.topk; ++k) to.ids[row * map_.topk + k].write(-1);
  if (to.sources) to.sources[row].write({});
}

void RowWriter::write_padding(const Routing& routing, int local) const {
  const RegionTables& to = rank(local);
  const std::int64_t rows = routing.rows_of(first_rank_ + local);
  const std::int64_t wanted = routing.wanted_rows[static_cast<std::size_t>(first_rank_ + local)];
  for (std::size_t x = 0; order_ == RowOrder::expert_major && x < routing.expert_counts.size();
       ++x) {
    const std::int64_t end = std::min<std::int64_t>(routing.expert_offsets[x + 1], rows);
    for (std::int64_t row = routing.expert_offsets[x] + routing.expert_counts[x]; row < end;
         ++row) {
      clear_row(to, row);
      std::memset(to.payload + row * sizes_.payload_bytes, 0,
                  static_cast<std::size_t>(sizes_.payload_bytes));
      if (to.scales) {
        std::memset(to.scales + row * sizes_.scale_bytes, 0,
                    static_cast<std::size_t>(sizes_.scale_bytes));
      }
    }
  }
  for (std::int64_t row = wanted; row < rows; ++row) clear_row(to, row);
}

}  // namespace winnow::expert_parallel
