// dispatch() on a GPU: what is enqueued, in which order.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "winnow/expert_parallel/dispatch/dispatch_impl.h"
#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"
#include "winnow/expert_parallel/dispatch/dispatch_rows.h"
#include "winnow/expert_parallel/dispatch/dispatch_scatter_cuda.h"
#include "winnow/expert_parallel/exchange/rail_cuda.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"
#include "winnow/expert_parallel/layer/layer_kernels_cuda.h"
#include "winnow/expert_parallel/memory/layouts.h"

namespace winnow::expert_parallel {
namespace {

std::int64_t row_stride(const ConstTensorView& view) {
  return view.present() ? view.stride(0) * size_of(view.dtype()) : 0;
}

// Tables of a call or a descriptor, which add(tables) tells.
template <class Add>
std::shared_ptr<Region> keep_tables(DeviceLayer& layer, const Add& add) {
  Tables measured;
  add(measured);
  std::shared_ptr<Region> memory = layer.keep(measured.bytes());
  Tables tables(memory->data());
  add(tables);
  return memory;
}

// One rank's part of one dispatch, step by step as the protocol's page tells it.
class DeviceDispatch {
 public:
  DeviceDispatch(DeviceLayer& layer, const DispatchArgs& args)
      : layer_(layer), args_(args), config_(layer.config()) {}

  Dispatched run() {
    number_ = layer_.begin(kDispatch, args_.stream);
    post();
    if (request_.cached == nullptr) place();
    if (report_ == Report::headers) learn();
    if (!output_) reserve();
    if (request_.scatter) scatter();
    if (layer_.nodes() > 1) send();
    layer_.check(launch_move(move_, layer_.blocks(), layer_.stream()), "move");
    layer_.quiet();
    Dispatched dispatched = result();
    layer_.end();
    return dispatched;
  }

 private:
  void post();
  void start_routing();
  void take_weights();
  void place();
  void read_counts();
  void learn();
  void reserve();
  void make_tables();
  void scatter();
  void send();
  void copy_output(const std::byte* from, std::int64_t rows);
  Dispatched result();

  bool counted() const { return !request_.cached && request_.worst_case_rows == 0; }
  // For the sums that a rank forms of its rows, under enable_local_combine.
  bool needs_row_weights() const {
    return config_.enable_local_combine && request_.order == RowOrder::expert_major &&
           layer_.map().topology.local_world_size > 1;
  }
  std::int64_t all_pairs() const { return layer_.nodes() * config_.max_tokens * config_.topk; }
  std::int64_t buffer_bytes(std::int64_t rows) const {
    return Arena::round_up(std::max<std::int64_t>(rows, 1) * layer_.row_bytes());
  }
  std::vector<std::int64_t> region_bytes() const;
  // Where the tables of the ranks of this node are; null where there is no such table.
  NodePointers table_pointers(const NodePointers& regions, std::int64_t RegionLayout::* size,
                              std::int64_t RegionLayout::* offset) const;

  DeviceLayer& layer_;
  const DispatchArgs& args_;
  const Config& config_;
  std::uint64_t number_ = 0;
  Request request_;
  Report report_ = Report::none;
  std::shared_ptr<Routing> made_;           // while it is being filled
  std::shared_ptr<const Routing> routing_;  // made_, or the cached one
  std::vector<std::int64_t> table_rows_;    // [W] of the scatter tables
  std::vector<std::int64_t> bytes_;         // [W] of the regions, once the rows are known
  CountParams count_;
  const std::byte* table_ = nullptr;  // for the rail peers
  std::int64_t table_bytes_ = 0;
  std::vector<std::shared_ptr<Region>> scratch_;  // of this call
  std::shared_ptr<Region> output_, buffer_, weights_;
  NodePointers owners_;
  MoveParams move_;
};

// Says what this rank has and wants, or what is wrong with it, and hears the same from all.
void DeviceDispatch::post() {
  Header header;
  const auto attempt = [&](const auto& step) {
    header.refuse_what_throws(kDispatch, step);
    if (header.refusal == 0) return;
    layer_.offer_hole(header);
    layer_.exchange(kCountsPhase, header, nullptr, nullptr, 0, Report::headers);
    layer_.wait_report();
  };
  attempt([&] {
    request_ = check_request(config_, layer_.token(), args_);
    header = make_header(request_, args_);
    routing_ = request_.cached;
    if (routing_ == nullptr) start_routing();
    if (request_.weights && request_.cached) take_weights();
  });
  if (counted()) {
    if (layer_.capturing()) {
      throw Error(ErrorCode::invalid_argument, std::string(kDispatch), "worst_case_rows",
                  "1 or more while a graph is recorded, since the host cannot wait for counts",
                  "0");
    }
    report_ = Report::more;
  } else {
    bytes_ = region_bytes();
    if (!layer_.fits(bytes_)) layer_.learn_offered(bytes_);
    if (!layer_.fits(bytes_)) {
      report_ = Report::headers;
    } else {
      attempt([&] { reserve(); });
      // So that a call like this one need not wait next time either.
      if (!layer_.capturing() && !layer_.fits(bytes_)) report_ = Report::later;
    }
  }
  if (report_ != Report::none) layer_.offer_hole(header);
  if (request_.cached == nullptr)
    layer_.check(launch_count(count_, layer_.blocks(), layer_.stream()), "count");
  layer_.exchange(kCountsPhase, header, count_.counts, table_, table_bytes_, report_);
}

// What is known of a new routing before the exchange, and the memory for the rest.
void DeviceDispatch::start_routing() {
  const DeviceTopology& topology = layer_.view().topology;
  routing_ = made_ = make_routing(request_, config_, layer_.map(), number_);
  made_->gpu = layer_.device();
  RoutingTables& tables = made_->tables;
  made_->memory.push_back(keep_tables(layer_, [&](Tables& add) {
    add.add(tables.placed, 1);
    add.add(tables.wanted, topology.world);
    add.add(tables.tokens, topology.world);
    add.add(tables.expert_counts, topology.per_rank());
    add.add(tables.expert_offsets, topology.per_rank() + 1);
    add.add(tables.indices, all_pairs());
    add.add(tables.rows, all_pairs());
    if (layer_.nodes() > 1) add.add(tables.send_reqs, 2 * made_->nodes * made_->max_tokens);
    if (request_.order == RowOrder::expert_major) {
      add.add(tables.firsts, made_->world * made_->max_tokens);
    } else {
      add.add(tables.source_begins, topology.world + 1);
      add.add(tables.rail_begins, topology.nodes * topology.locals);
    }
  }));

  const std::int64_t pairs = request_.tokens * config_.topk;
  const bool weights_travel = request_.weights && layer_.nodes() > 1;
  count_.view = layer_.view();
  count_.token_major = request_.order == RowOrder::token_major;
  count_.tokens = request_.tokens;
  count_.indices = static_cast<const std::int32_t*>(args_.expert_indices.data());
  count_.index_stride = args_.expert_indices.stride(0);
  if (weights_travel) {
    count_.weights = static_cast<const std::byte*>(args_.weights.data());
    count_.weight_stride = row_stride(args_.weights);
    count_.weight_bytes = static_cast<int>(size_of(config_.weight_dtype));
  }
  count_.placed = tables.placed;
  table_bytes_ = PairTable::weights(pairs) + pairs * count_.weight_bytes;
  scratch_.push_back(keep_tables(layer_, [&](Tables& add) {
    const std::int64_t findings = sizeof(Findings) / sizeof(std::int32_t);
    add.add(count_.counts, topology.experts + topology.world + findings);
    add.add(count_.table, table_bytes_);
    // Place may use it when count is through with it.
    add.add(count_.scratch, std::max(count_scratch_bytes(topology, layer_.blocks()),
                                     place_scratch_bytes(topology, layer_.blocks())));
  }));
  table_ = count_.table;
}

// A repeated routing sends the rail peers weights only, back to back.
void DeviceDispatch::take_weights() {
  if (layer_.nodes() == 1 || request_.tokens == 0) return;
  const std::int64_t row = config_.topk * size_of(config_.weight_dtype);
  table_bytes_ = request_.tokens * row;
  table_ = static_cast<const std::byte*>(args_.weights.data());
  if (request_.tokens == 1 || row_stride(args_.weights) == row) return;
  const std::shared_ptr<Region> dense = layer_.keep(table_bytes_);
  layer_.check(copy_rows(dense->data(), row, table_, row_stride(args_.weights), row,
                         request_.tokens, layer_.stream()),
               "the copy of weights");
  table_ = dense->data();
  scratch_.push_back(dense);
}

// Everybody knows all counts now, so everybody finds the same rows.
void DeviceDispatch::place() {
  PlaceParams params;
  params.view = layer_.view();
  params.token_major = request_.order == RowOrder::token_major;
  params.reports = report_ == Report::more;
  params.expert_alignment = request_.expert_alignment;
  params.worst_case_rows = request_.worst_case_rows;
  params.max_tokens = config_.max_tokens;
  params.table = count_.table;
  params.tables = made_->tables;
  params.scratch = count_.scratch;
  layer_.check(launch_place(params, layer_.blocks(), layer_.stream()), "place");
  if (report_ == Report::more) read_counts();
}

void DeviceDispatch::read_counts() {
  learn();
  const int world = layer_.map().topology.world_size, per_rank = layer_.map().per_rank();
  const std::int32_t* words = layer_.report_words().data();
  const auto* wanted = reinterpret_cast<const std::int64_t*>(words);
  made_->wanted_rows.assign(wanted, wanted + world);
  const std::int32_t* counts = words + PlaceReport::counts(world);
  const std::int32_t* offsets = words + PlaceReport::offsets(world, per_rank);
  made_->expert_counts.assign(counts, counts + per_rank);
  made_->expert_offsets.assign(offsets, offsets + per_rank + 1);
  for (int rank = 0; rank < world; ++rank) {
    made_->tokens_per_rank.push_back(static_cast<std::int32_t>(layer_.heard_header(rank).tokens));
    table_rows_.push_back(layer_.heard_header(rank).scatter_rows);
  }
  check_row_counts(made_->wanted_rows, request_.order, config_.topk);
  check_room(made_->wanted_rows,
             [&](int rank) -> const Header& { return layer_.heard_header(rank); });
}

void DeviceDispatch::learn() {
  layer_.wait_report();
  layer_.learn_holes();
}

// What each rank needs: the output's region, combine_buffer().
std::vector<std::int64_t> DeviceDispatch::region_bytes() const {
  std::vector<std::int64_t> bytes;
  for (int rank = 0; rank < layer_.map().topology.world_size; ++rank) {
    const std::int64_t rows = routing_->rows_of(rank);
    bytes.push_back(RegionLayout(config_, request_, rows).bytes +
                    (request_.copy_out ? 0 : buffer_bytes(rows)));
  }
  return bytes;
}

NodePointers DeviceDispatch::table_pointers(const NodePointers& regions,
                                            std::int64_t RegionLayout::* size,
                                            std::int64_t RegionLayout::* offset) const {
  NodePointers pointers;
  const Topology& topology = layer_.map().topology;
  for (int local = 0; local < topology.local_world_size; ++local) {
    const std::int64_t rows = routing_->rows_of(topology.rank(layer_.node(), local));
    const RegionLayout layout(config_, request_, rows);
    if (layout.*size > 0) pointers.data[local] = regions.data[local] + layout.*offset;
  }
  return pointers;
}

// Takes the region of this rank and finds those of its node.
void DeviceDispatch::reserve() {
  if (bytes_.empty()) bytes_ = region_bytes();  // a counted dispatch: now the counts are there
  const std::vector<Extent> extents = layer_.reserve(bytes_);
  const Extent& mine = extents[static_cast<std::size_t>(layer_.rank())];
  const std::int64_t rows = routing_->rows_of(layer_.rank());
  std::int64_t end = mine.offset;
  const auto take = [&](std::int64_t bytes) {
    return layer_.arena().take(mine.segment, std::exchange(end, end + bytes), bytes);
  };
  output_ = take(RegionLayout(config_, request_, rows).bytes);
  buffer_ = request_.copy_out ? output_ : take(buffer_bytes(rows));

  const NodePointers regions = layer_.node_pointers(extents);
  move_.payload = regions;
  move_.row_weights = table_pointers(regions, &RegionLayout::weight_bytes, &RegionLayout::weights);
  move_.row_scales = table_pointers(regions, &RegionLayout::scale_bytes, &RegionLayout::scales);
  move_.ids = table_pointers(regions, &RegionLayout::id_bytes, &RegionLayout::ids);
  move_.row_sources = table_pointers(regions, &RegionLayout::source_bytes, &RegionLayout::sources);
  owners_ = table_pointers(regions, &RegionLayout::owner_bytes, &RegionLayout::owners);
  make_tables();
}

// The tables of the rows of this rank, and what the kernels that move rows know.
void DeviceDispatch::make_tables() {
  const std::int64_t rows = routing_->rows_of(layer_.rank());
  if (made_) {
    RoutingTables& tables = made_->tables;
    made_->memory.push_back(keep_tables(layer_, [&](Tables& add) {
      add.add(tables.first_copies, rows);
      add.add(tables.copies, rows * config_.topk);
    }));
  }
  if (request_.weights) {
    weights_ = keep_tables(layer_, [&](Tables& add) {
      add.add(move_.pair_weights, all_pairs());
      if (needs_row_weights()) add.add(move_.weights_of_rows, rows);
    });
  }
  move_.view = layer_.view();
  move_.token_major = request_.order == RowOrder::token_major;
  move_.fresh = made_ != nullptr;
  move_.pads = request_.expert_alignment > 1;
  move_.weights_travel = request_.weights;
  move_.max_tokens = config_.max_tokens;
  move_.rows = rows;
  move_.tables = routing_->tables;
  move_.tokens = request_.tokens;
  move_.input = static_cast<const std::byte*>(args_.input.data());
  move_.scales = static_cast<const std::byte*>(args_.scales.data());
  move_.weights = static_cast<const std::byte*>(args_.weights.data());
  move_.input_stride = row_stride(args_.input);
  move_.scale_stride = row_stride(args_.scales);
  move_.weight_stride = row_stride(args_.weights);
  move_.row_bytes = request_.row_bytes;
  move_.element_bytes = static_cast<int>(size_of(request_.input));
  move_.scale_words = static_cast<int>(request_.scale_bytes / std::int64_t(sizeof(float)));
  move_.weight_dtype = config_.weight_dtype;
}

// Rows that the caller chose take the place of those that place has found.
void DeviceDispatch::scatter() {
  ScatterParams params;
  params.view = layer_.view();
  params.max_tokens = config_.max_tokens;
  params.tokens = request_.tokens;
  params.tables = made_->tables;
  const std::shared_ptr<Region> rows =
      layer_.keep(request_.tokens * config_.topk * std::int64_t(sizeof(std::int32_t)));
  params.rows = reinterpret_cast<std::int32_t*>(rows->data());
  params.owners = owners_;
  scatter_rows(layer_, args_.scatter_indices, args_.stream, params, made_->wanted_rows,
               made_->tokens_per_rank, table_rows_);
}

// Each token once to every other node that wants it.
void DeviceDispatch::send() {
  RailSendParams params;
  params.view = layer_.view();
  params.placed = made_ ? nullptr : routing_->tables.placed;
  params.indices =
      routing_->tables.indices + layer_.node() * config_.max_tokens * std::int64_t(config_.topk);
  params.tokens = request_.tokens;
  params.rows = move_.input;
  params.row_stride = move_.input_stride;
  params.row_bytes = request_.row_bytes;
  params.scales = request_.scale_bytes > 0 ? move_.scales : nullptr;
  params.scale_stride = move_.scale_stride;
  params.scale_bytes = request_.scale_bytes;
  layer_.check(layer_.wire().rail_send(params, layer_.blocks(), layer_.stream()), "rail_send");
}

// To the caller's tensor.
void DeviceDispatch::copy_output(const std::byte* from, std::int64_t rows) {
  layer_.check(copy_rows(static_cast<std::byte*>(args_.out.data()), row_stride(args_.out), from,
                         request_.row_bytes, request_.row_bytes, rows, layer_.stream()),
               "out");
}

Dispatched DeviceDispatch::result() {
  const std::int64_t rows = routing_->rows_of(layer_.rank());
  const auto here = [&](const NodePointers& table) { return table.data[layer_.local()]; };
  const auto tensor = [&](void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    if (data == nullptr) return Tensor();
    if (!request_.copy_out) return Tensor::borrow(output_, data, dtype, shape, layer_.device());
    std::int64_t bytes = size_of(dtype);
    for (const std::int64_t size : shape) bytes *= size;
    const std::shared_ptr<Region> own = layer_.keep(bytes);
    layer_.check(cudaMemcpyAsync(own->data(), data, static_cast<std::size_t>(bytes),
                                 cudaMemcpyDeviceToDevice, layer_.stream()),
                 "copy_out");
    return Tensor::borrow(own, own->data(), dtype, shape, layer_.device());
  };
  if (args_.out.present()) copy_output(here(move_.payload), rows);
  Dispatched result = make_dispatched(
      Backend::sm90, request_, config_, rows,
      {here(move_.payload), here(move_.row_weights), here(move_.row_scales), here(move_.ids)},
      args_.out.present(), tensor);

  auto state = make_state(layer_.token(), layer_.rank(), number_, request_, routing_, buffer_);
  state->device_weights = {move_.pair_weights, move_.weights_of_rows};
  state->memory = {weights_};
  if (layer_.capturing()) {  // the graph uses it again
    state->memory.insert(state->memory.end(), scratch_.begin(), scratch_.end());
    state->memory.push_back(output_);
  }
  result.descriptor = std::make_shared<const Descriptor>(std::move(state));
  return result;
}

}  // namespace

Dispatched dispatch(DeviceLayer& layer, const DispatchArgs& args) {
  return DeviceDispatch(layer, args).run();
}

namespace {

int load() {
  for (const auto load_one : {load_count, load_place, load_move, load_scatter}) {
    if (const int status = load_one(); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

constexpr PhaseText kTexts[] = {{kCountsPhase, kDispatch, "the counts"},
                                {kTokensPhase, kDispatch, "the tokens"},
                                {kRowsPhase, kDispatch, "the rows"},
                                {Phase::blocks, kDispatch, "the blocks of its kernel"},
                                {Phase::memory, kDispatch, "memory"}};

}  // namespace

CudaOperation cuda_dispatch() { return {load, kTexts}; }

}  // namespace winnow::expert_parallel
