#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "winnow/core/interrupt.h"
#include "winnow/core/read_once.h"
#include "winnow/expert_parallel/dispatch/dispatch_impl.h"
#include "winnow/expert_parallel/dispatch/dispatch_rows.h"
#include "winnow/expert_parallel/dispatch/dispatch_scatter.h"
#include "winnow/expert_parallel/layer/rail_weights.h"
#include "winnow/expert_parallel/routing/rail_sources.h"

namespace winnow::expert_parallel {
namespace {

// One rank's part of one dispatch, step by step as the protocol's page tells it.
class Dispatch {
 public:
  Dispatch(Layer& layer, const DispatchArgs& args) : layer_(layer), args_(args) {}

  Dispatched run() {
    post();
    request_.cached ? repeat_routing() : place();
    take_weights();
    reserve();
    if (request_.scatter) scatter_rows(layer_, args_.scatter_indices, *writer_, *made_);
    for (std::int64_t chunk = 0; chunk < sources().chunks(layer_.node()); ++chunk) {
      send(chunk);
      write_own(chunk);
    }
    for (std::int64_t chunk = 0; chunk < sources().most_chunks(); ++chunk) forward(chunk);
    writer_->write_padding(*routing_, layer_.communicator.local());
    layer_.rail.finish("the rows");
    if (!request_.cached) find_copies();
    return result();
  }

 private:
  void post();
  void take_scales();
  void count(Header& header, PairCounts& counts) const;
  void defer_faults();
  void place();
  void fill_tables(const Placement& placement);
  void check_indices(int node) const;
  void repeat_routing();
  void take_weights();
  void reserve();
  void send(std::int64_t chunk);
  void write_own(std::int64_t chunk);
  void forward(std::int64_t chunk);
  void find_copies();
  void copy_output(const std::byte* from, std::int64_t rows) const;
  Dispatched result();

  RailSources sources() const { return {layer_.map, *routing_, layer_.communicator.local()}; }
  TokenRecord record(int node, std::int64_t token) const;
  static const std::byte* row_at(const ConstTensorView& view, std::int64_t row) {
    return static_cast<const std::byte*>(view.data()) +
           row * view.stride(0) * size_of(view.dtype());
  }

  Layer& layer_;
  const DispatchArgs& args_;
  Request request_;
  std::shared_ptr<Routing> made_;           // while it is being filled
  std::shared_ptr<const Routing> routing_;  // made_, or the cached one
  ConstTensorView scales_;                  // with dense rows: the caller's, or dense_scales_
  Tensor dense_scales_;
  std::vector<std::byte> weights_;  // [NN, T, K] of the rail sources, as they were given
  std::shared_ptr<Region> output_, buffer_;
  std::unique_ptr<RowWriter> writer_;
  Interrupts interrupts_;
};

// Says what this rank has and wants, or what is wrong with it, and receives the same from all.
void Dispatch::post() {
  Header header;
  PairCounts counts;
  header.refuse_what_throws(kDispatch, [&] {
    request_ = check_request(layer_.config, layer_.identity, args_);
    request_.table = make_table(request_, args_);
    take_scales();
    header = make_header(request_, args_);
    if (request_.cached == nullptr) count(header, counts);
  });
  header.rows = layer_.arena.largest_free();
  header.releasable = layer_.arena.releasable(header.rows);
  const bool counted = !counts.pairs.empty();
  layer_.meet(kDispatch, "the counts", header, counted ? &counts : nullptr, request_.table);
  layer_.exchange.throw_refusals(kDispatch);
}

void Dispatch::take_scales() {
  scales_ = args_.scales;
  if (!scales_.present() || scales_.size(1) <= 1 || scales_.stride(1) == 1) return;
  dense_scales_ = Tensor(scales_.dtype(), {scales_.size(0), scales_.size(1)});
  const std::int64_t size = size_of(scales_.dtype());
  auto* to = static_cast<std::byte*>(dense_scales_.data());
  for (std::int64_t row = 0; row < scales_.size(0); ++row) {
    const std::byte* from = row_at(scales_, row);
    for (std::int64_t column = 0; column < scales_.size(1); ++column, to += size) {
      std::memcpy(to, from + column * scales_.stride(1) * size, static_cast<std::size_t>(size));
    }
  }
  scales_ = dense_scales_;
}

// An index out of range is refused; in the worst-case mode its pair is dropped and it is told
// later.
void Dispatch::count(Header& header, PairCounts& counts) const {
  const std::span indices(request_.indices(), std::size_t(request_.tokens * layer_.map.topk));
  counts = count_pairs(layer_.map, indices);
  const std::optional<BadIndex> bad = find_bad_index(layout_params(layer_.map, indices));
  if (!bad) return;
  const ConstTensorView& given = args_.expert_indices;  // in 64 bits it may be another number
  const std::int64_t value = given.dtype() == DType::i64
                                 ? read_once(&given.at<std::int64_t>(bad->token, bad->k))
                                 : bad->value;
  header.refuse(Error(ErrorCode::invalid_argument, std::string(kDispatch), "expert_indices",
                      "-1 to " + std::to_string(layer_.map.experts),
                      std::to_string(value) + " for token " + std::to_string(bad->token)));
  header.deferred = request_.worst_case_rows > 0;
}

// Everybody knows all counts now, so everybody finds the same rows, and the same faults.
void Dispatch::place() {
  const Exchange& received = layer_.exchange;
  const ExpertMap& map = layer_.map;
  const Placement placement =
      place_blocks(map, received.counts(), request_.order, request_.expert_alignment, layer_.rank);
  check_row_counts(placement.rank_rows, request_.order, map.topk);
  if (request_.worst_case_rows == 0) {
    check_room(placement.rank_rows,
               [&](int rank) -> const Header& { return received.header(rank); });
  }
  routing_ = made_ = make_routing(request_, layer_.config, map, layer_.epoch);
  made_->wanted_rows = placement.rank_rows;
  made_->expert_counts = placement.expert_counts;
  // Beyond what the table can say lies only a worst case that has overflowed by far.
  for (const std::int64_t offset : placement.expert_offsets) {
    made_->expert_offsets.push_back(
        static_cast<std::int32_t>(std::min<std::int64_t>(offset, INT32_MAX)));
  }
  const std::int64_t limit = made_->worst_case_rows > 0 ? made_->worst_case_rows : kMostRows;
  for (const std::int64_t begin : placement.source_begins) {
    made_->source_begins.push_back(static_cast<std::int32_t>(std::min(begin, limit)));
  }
  for (int rank = 0; rank < map.topology.world_size; ++rank) {
    made_->tokens_per_rank.push_back(static_cast<std::int32_t>(received.header(rank).tokens));
  }
  defer_faults();
  fill_tables(placement);
}

// The indices, rows and runs of every rail source.
void Dispatch::fill_tables(const Placement& placement) {
  const ExpertMap& map = layer_.map;
  made_->indices.assign(made_->table_offset(layer_.nodes()), -1);
  made_->rows.assign(made_->indices.size(), -1);
  if (layer_.nodes() > 1) {
    made_->send_reqs.assign(static_cast<std::size_t>(2 * made_->nodes * made_->max_tokens), -1);
  }
  const std::int64_t limit = made_->worst_case_rows > 0 ? made_->worst_case_rows : kMostRows;
  for (int node = 0; node < layer_.nodes(); ++node) {
    const std::span<const std::int32_t> indices = sources().indices(node);
    std::int32_t* const to = made_->indices.data() + made_->table_offset(node);
    if (node != layer_.node()) {
      layer_.exchange.copy_table(node, 0, to, indices.size_bytes());
      check_indices(node);
    } else if (!indices.empty()) {
      std::memcpy(to, request_.table.data(), indices.size_bytes());
    }
    place_pairs(map, placement, node, layer_.node(), limit, indices,
                {made_->rows.data() + made_->table_offset(node), indices.size()});
    if (layer_.nodes() == 1) continue;
    const auto slots = static_cast<std::size_t>(made_->max_tokens);
    std::int32_t* runs = made_->send_reqs.data() + 2 * static_cast<std::size_t>(node) * slots;
    list_runs(map, indices, layer_.node(), {runs, slots}, {runs + slots, slots});
  }
}

// The counts of a rail source decide how many rows there are, its indices where rows are written.
void Dispatch::check_indices(int node) const {
  const ExpertMap& map = layer_.map;
  const int source = sources().rank(node);
  const PairCounts counted = count_pairs(map, sources().indices(node));
  const WorldCounts received = layer_.exchange.counts();
  const auto check = [&](const std::vector<std::int32_t>& indices, const std::int32_t* counts,
                         std::string_view what) {
    for (std::size_t i = 0; i < indices.size(); ++i) {
      check_bounds(indices[i], layer_.exchange.sender(source), what, counts[i], counts[i]);
    }
  };
  check(counted.pairs, received.pairs[static_cast<std::size_t>(source)], "indices of an expert");
  check(counted.tokens, received.tokens[static_cast<std::size_t>(source)], "indices of a rank");
}

// Dropped pairs and rows do not stop this call; every rank remembers the same fault for the next.
void Dispatch::defer_faults() {
  for (int rank = 0; rank < layer_.map.topology.world_size && !layer_.deferred; ++rank) {
    const Header& message = layer_.exchange.header(rank);
    if (message.refusal == 0) continue;
    layer_.deferred = DeferredFault{ErrorCode::invalid_argument, message.message(rank)};
  }
  for (std::size_t rank = 0; rank < routing_->wanted_rows.size() && !layer_.deferred; ++rank) {
    const std::int64_t wanted = routing_->wanted_rows[rank], most = routing_->worst_case_rows;
    if (most == 0 || wanted <= most) continue;
    layer_.deferred =
        DeferredFault{ErrorCode::invalid_argument,
                      "rank " + std::to_string(rank) + ": worst_case_rows: want " +
                          std::to_string(wanted) + " or more, got " + std::to_string(most)};
  }
}

void Dispatch::repeat_routing() {
  routing_ = request_.cached;
  defer_faults();
}

void Dispatch::take_weights() {
  if (!request_.weights) return;
  weights_ = rail_weights(
      layer_, *routing_, sources(), request_.table.data(),
      [&](std::int64_t tokens) { return request_.indices_bytes(tokens, routing_->topk); });
}

// Takes the region of this rank and finds those of its node.
void Dispatch::reserve() {
  const Topology& topology = layer_.map.topology;
  std::vector<Extent> free_extents;
  std::vector<std::int64_t> bytes;
  std::uint64_t releasable = ~std::uint64_t{0};
  for (int rank = 0; rank < topology.world_size; ++rank) {
    const std::int64_t rows = routing_->rows_of(rank);
    free_extents.push_back(layer_.exchange.header(rank).rows);
    bytes.push_back(RegionLayout(layer_.config, request_, rows).bytes +
                    CombineRoom(layer_.config, request_, rows).bytes);
    releasable &= layer_.exchange.header(rank).releasable;
  }
  const std::vector<Extent> extents = layer_.reserve(std::move(free_extents), bytes, releasable);

  const Extent& mine = extents[static_cast<std::size_t>(layer_.rank)];
  const std::int64_t rows = routing_->rows_of(layer_.rank);
  const RegionLayout layout(layer_.config, request_, rows);
  output_ = layer_.arena.take(mine.segment, mine.offset, layout.bytes);
  buffer_ = request_.copy_out ? output_
                              : layer_.arena.take(mine.segment, mine.offset + layout.bytes,
                                                  CombineRoom(layer_.config, request_, rows).bytes);
  std::vector<RegionTables> tables;
  for (int local = 0; local < topology.local_world_size; ++local) {
    const int rank = topology.rank(layer_.node(), local);
    const Extent& extent = extents[static_cast<std::size_t>(rank)];
    std::byte* memory =
        layer_.communicator.node_pointer(layer_.arena.memory(extent.segment), local);
    tables.emplace_back(memory + extent.offset,
                        RegionLayout(layer_.config, request_, routing_->rows_of(rank)));
  }
  writer_ = std::make_unique<RowWriter>(layer_, request_, layout, std::move(tables));
}

TokenRecord Dispatch::record(int node, std::int64_t token) const {
  const bool own = node == layer_.node();
  const std::size_t pair = sources().pair(node, token);
  TokenRecord record;
  record.source = sources().rank(node);
  record.token = token;
  record.payload =
      own ? row_at(args_.input, token) : layer_.rail.row(node, token, request_.row_bytes);
  if (request_.scale_bytes > 0) {
    record.scales =
        own ? row_at(scales_, token) : layer_.rail.scale(node, token, request_.scale_bytes);
  }
  if (request_.weights) {
    record.weights =
        weights_.data() + pair * static_cast<std::size_t>(size_of(layer_.config.weight_dtype));
  }
  record.experts = routing_->indices.data() + pair;
  record.rows = routing_->rows.data() + pair;
  return record;
}

// Sends the chunk's tokens to the rail peers of the nodes that want them, each token once per node.
void Dispatch::send(std::int64_t chunk) {
  const auto put = [&](const ConstTensorView& view, const Run& run, std::int64_t bytes,
                       const auto& put_run) {
    const bool dense = view.stride(0) * size_of(view.dtype()) == bytes;
    const std::int64_t step = dense ? run.last - run.first : 1;
    for (std::int64_t token = run.first; token < run.last; token += step) {
      put_run(token, row_at(view, token), step, bytes);
    }
  };
  Rail& rail = layer_.rail;
  for (int step = 1; step < layer_.nodes(); ++step) {
    const int to = (layer_.node() + step) % layer_.nodes();
    bool any = false;
    sources().for_each_run_of(layer_.node(), chunk, to, [&](const Run& run) {
      any = true;
      put(args_.input, run, request_.row_bytes, [&](auto... what) { rail.put_rows(to, what...); });
      if (request_.scale_bytes == 0) return;
      put(scales_, run, request_.scale_bytes, [&](auto... what) { rail.put_scales(to, what...); });
    });
    if (any) rail.send_chunk(to, chunk);
  }
}

// This rank's tokens for its own node go straight to their rows.
void Dispatch::write_own(std::int64_t chunk) {
  sources().for_each_run_of(layer_.node(), chunk, layer_.node(), [&](const Run& run) {
    for (std::int64_t token = run.first; token < run.last; ++token) {
      interrupts_.look();
      writer_->write(record(layer_.node(), token));
    }
  });
}

// The other nodes' tokens as their chunks arrive, while later ones are under way.
void Dispatch::forward(std::int64_t chunk) {
  for (int step = layer_.nodes() - 1; step > 0; --step) {
    const int from = (layer_.node() + step) % layer_.nodes();
    bool arrived = false;
    sources().for_each_run_of(from, chunk, layer_.node(), [&](const Run& run) {
      if (!arrived) layer_.rail.wait_chunk(from, chunk, "the tokens");
      arrived = true;
      for (std::int64_t token = run.first; token < run.last; ++token) {
        interrupts_.look();
        writer_->write(record(from, token));
      }
    });
  }
}

// What was written beside the rows tells which of them hold the same token.
void Dispatch::find_copies() {
  const std::int64_t rows = routing_->rows_of(layer_.rank), topk = routing_->topk;
  const RegionTables& tables = writer_->rank(layer_.communicator.local());
  const Sender by = layer_.exchange.sender(layer_.rank);  // of its node one has written them
  made_->first_copies.assign(static_cast<std::size_t>(rows), -1);
  made_->copies.assign(static_cast<std::size_t>(rows * topk), -1);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t& first = made_->first_copies[static_cast<std::size_t>(row)];
    if (tables.ids == nullptr) {
      const RowSource source =
          tables.sources[row].read(by, layer_.map.topology.world_size, rows, topk);
      if (source.rank < 0) continue;
      first = source.first;
      made_->copies[static_cast<std::size_t>(first * topk + source.k)] = row;
      continue;
    }
    for (std::int64_t k = 0; k < topk; ++k) {
      const std::int32_t id = tables.ids[row * topk + k].read(
          by, "an expert id", -1, std::int64_t{layer_.map.per_rank() - 1});
      if (id < 0) continue;
      first = made_->copies[static_cast<std::size_t>(row * topk + k)] = row;
    }
  }
}

// To the caller's tensor.
void Dispatch::copy_output(const std::byte* from, std::int64_t rows) const {
  auto* to = static_cast<std::byte*>(args_.out.data());
  const std::int64_t bytes = request_.row_bytes,
                     step = args_.out.stride(0) * size_of(request_.input);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * step, from + row * bytes, static_cast<std::size_t>(bytes));
  }
}

Dispatched Dispatch::result() {
  const std::int64_t rows = routing_->rows_of(layer_.rank);
  const RegionTables& tables = writer_->rank(layer_.communicator.local());
  const auto tensor = [&](void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    if (data == nullptr) return Tensor();
    Tensor borrowed = Tensor::borrow(output_, data, dtype, shape);
    if (!request_.copy_out) return borrowed;
    try {
      if (!args_.allocate) return borrowed.clone();
      Tensor own = args_.allocate(dtype, borrowed.view().shape());
      std::memcpy(own.data(), data, static_cast<std::size_t>(own.numel() * size_of(dtype)));
      return own;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::resource) throw std::bad_alloc();  // on this rank alone
      throw;
    }
  };
  if (args_.out.present()) copy_output(tables.payload, rows);
  Dispatched result = make_dispatched(Backend::cpu, request_, layer_.config, rows,
                                      {tables.payload, tables.weights, tables.scales, tables.ids},
                                      args_.out.present(), tensor);

  auto state = make_state(layer_.identity, layer_.rank, layer_.epoch, request_, routing_, buffer_,
                          CombineRoom(layer_.config, request_, rows).values);
  state->weights = to_floats(layer_.config.weight_dtype, weights_);
  result.descriptor = std::make_shared<const Descriptor>(std::move(state));
  return result;
}

}  // namespace

Dispatched dispatch(Layer& layer, const DispatchArgs& args) {
  return layer.call(kDispatch, [&] { return Dispatch(layer, args).run(); });
}

}  // namespace winnow::expert_parallel
