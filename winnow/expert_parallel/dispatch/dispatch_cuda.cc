// dispatch() on a GPU: what is enqueued, in which order.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "winnow/expert_parallel/dispatch/dispatch_dense_cuda.h"
#include "winnow/expert_parallel/dispatch/dispatch_impl.h"
#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"
#include "winnow/expert_parallel/dispatch/dispatch_routing_cuda.h"
#include "winnow/expert_parallel/dispatch/dispatch_rows.h"
#include "winnow/expert_parallel/dispatch/dispatch_scatter_cuda.h"
#include "winnow/expert_parallel/exchange/rail_cuda.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"
#include "winnow/expert_parallel/layer/layer_kernels_cuda.h"
#include "winnow/expert_parallel/memory/layouts.h"

namespace winnow::expert_parallel {
namespace {

// One rank's part of one dispatch, step by step as the protocol's page tells it.
class CudaDispatch {
 public:
  CudaDispatch(CudaLayer& layer, const DispatchArgs& args)
      : layer_(layer),
        place_(layer.place()),
        config_(place_.config),
        regions_(layer.regions()),
        handshake_(layer.handshake()),
        calls_(layer.calls()),
        args_(args) {}

  Dispatched run() {
    number_ = layer_.begin(kDispatch, args_.stream, args_.sm_count);
    post();
    if (new_routing_) new_routing_->place(report_ == Report::more);
    if (goes_ahead_) move();
    if (report_ == Report::headers || report_ == Report::more) learn();
    if (report_ == Report::more) new_routing_->read_counts();
    if (!output_) reserve();
    if (!goes_ahead_) {
      choose_out();
      move();
    }
    Dispatched dispatched = result();
    layer_.end();
    return dispatched;
  }

 private:
  void post();
  void use_kept_offers();
  void take_weights();
  void learn();
  void reserve();
  void make_tables();
  void choose_out();
  void move();
  void scatter();
  void send();
  Dispatched result();
  Tensor make_result(DType dtype, std::initializer_list<std::int64_t> shape);
  template <class MakeTensor>
  Dispatched arrived(const MakeTensor& tensor) const;

  bool counted() const { return !request_.cached && request_.worst_case_rows == 0; }
  // Whether the rows may go where every rank has room for all that can arrive, so that the host
  // enqueues their move without the counts and waits for those meanwhile. Not for expert_major,
  // where many more can arrive than do, nor with copy_out, whose tensor has as many rows as arrive.
  bool may_go_ahead() const {
    return counted() && request_.order == RowOrder::token_major && !request_.scatter &&
           !request_.copy_out && place_.nodes() == 1 && !calls_.capturing() &&
           most_rows() <= kMostRows / config_.topk;
  }
  // Whether ranks with copy_out take the rows to a tensor of the caller's while others arrive.
  bool takes() const {
    return request_.copy_out && request_.order == RowOrder::token_major && place_.nodes() == 1;
  }
  std::int64_t most_rows() const { return std::int64_t(place_.world()) * config_.max_tokens; }
  // What a rank's region is laid out for.
  std::int64_t laid_rows(int rank) const {
    return goes_ahead_ ? most_rows() : routing_->rows_of(rank);
  }
  // For the sums that a rank forms of its rows, under enable_local_combine.
  bool needs_row_weights() const {
    return config_.enable_local_combine && request_.order == RowOrder::expert_major &&
           place_.locals() > 1;
  }
  std::byte* own_payload() const { return move_.payload.data[place_.local()]; }
  std::int64_t all_pairs() const { return place_.nodes() * config_.max_tokens * config_.topk; }
  std::int64_t bytes_of(std::int64_t rows) const;
  std::vector<std::int64_t> region_bytes() const;
  // Where the tables of the ranks of this node are; null where there is no such table.
  NodePointers table_pointers(const NodePointers& regions, std::int64_t RegionLayout::* size,
                              std::int64_t RegionLayout::* offset) const;

  CudaLayer& layer_;
  const Place& place_;
  const Config& config_;
  Regions& regions_;
  Handshake& handshake_;
  CudaCalls& calls_;
  const DispatchArgs& args_;
  std::uint64_t number_ = 0;
  Request request_;
  Report report_ = Report::none;
  bool goes_ahead_ = false;
  std::optional<NewRouting> new_routing_;   // unless one is repeated
  std::shared_ptr<const Routing> routing_;  // the new one, or the cached one
  std::vector<std::int64_t> bytes_;         // [W] of the regions, once the rows are known
  const std::byte* table_ = nullptr;        // for the rail peers
  std::int64_t table_bytes_ = 0;
  DenseRows scales_, dense_weights_;
  std::shared_ptr<Region> output_, buffer_, weights_;
  std::optional<Dispatched> taken_;  // the tensors that rows are taken to
  NodePointers owners_;
  MoveParams move_;
};

// Says what this rank has and wants, or what is wrong with it, and receives the same from all.
void CudaDispatch::post() {
  Header header;
  const auto attempt = [&](const auto& step) {
    header.refuse_what_throws(kDispatch, step);
    if (header.refusal == 0) return;
    regions_.offer(header);
    handshake_.exchange(kCountsPhase, header, nullptr, nullptr, 0, Report::headers);
    handshake_.wait_report();
  };
  attempt([&] {
    request_ = check_request(config_, layer_.identity(), args_);
    header = make_header(request_, args_);
    if (args_.scales.present()) scales_ = rows_of_words(layer_, args_.scales);
    routing_ = request_.cached;
    if (routing_ == nullptr) {
      new_routing_.emplace(layer_, request_, args_, number_);
      routing_ = new_routing_->routing();
      table_ = new_routing_->table();
      table_bytes_ = new_routing_->table_bytes();
    } else if (request_.weights) {
      take_weights();
    }
  });
  if (counted()) {
    if (calls_.capturing()) {
      throw Error(ErrorCode::invalid_argument, std::string(kDispatch), "worst_case_rows",
                  "1 or more while a graph is recorded, since the host cannot wait for counts",
                  "0");
    }
    report_ = Report::more;
    goes_ahead_ = may_go_ahead();
    if (goes_ahead_) bytes_ = region_bytes();
    goes_ahead_ = goes_ahead_ && regions_.fits(bytes_);
    if (goes_ahead_) {
      attempt([&] { reserve(); });
    } else {
      bytes_.clear();
    }
  } else {
    bytes_ = region_bytes();
    if (!regions_.fits(bytes_)) use_kept_offers();
    if (!regions_.fits(bytes_)) {
      report_ = Report::headers;
    } else {
      attempt([&] { reserve(); });
      // So that a call like this one need not wait next time either.
      if (!calls_.capturing() && !regions_.fits(bytes_)) report_ = Report::later;
    }
  }
  if (report_ != Report::none) regions_.offer(header);
  if (new_routing_) new_routing_->count();
  handshake_.exchange(kCountsPhase, header, new_routing_ ? new_routing_->counts() : nullptr, table_,
                      table_bytes_, report_);
}

// What the ranks offered in an earlier call, for which the host did not wait. If that is not
// enough, the headers of this call tell more, for which the host waits if it can.
void CudaDispatch::use_kept_offers() {
  handshake_.read_offers();
  if (regions_.use_kept(bytes_) || !calls_.capturing()) return;
  throw Error(ErrorCode::invalid_argument, std::string(kDispatch),
              "the arena is too small for what a graph records: make Config::arena_rows larger");
}

// A repeated routing sends the rail peers weights only, back to back.
void CudaDispatch::take_weights() {
  if (place_.nodes() == 1 || request_.tokens == 0) return;
  dense_weights_ = dense_rows(layer_, args_.weights);
  table_ = dense_weights_.data;
  table_bytes_ = request_.tokens * dense_weights_.stride;
}

void CudaDispatch::learn() {
  handshake_.wait_report();
  regions_.learn(number_, handshake_.received());
  if (goes_ahead_) regions_.release_learned();
}

// The rows, behind what they need.
void CudaDispatch::move() {
  if (request_.scatter) scatter();
  if (place_.nodes() > 1) send();
  calls_.check(launch_move(move_, layer_.blocks(), calls_.stream()), "move");
  layer_.quiet();
}

// Of a rank with so many rows: the output's region, combine_buffer().
std::int64_t CudaDispatch::bytes_of(std::int64_t rows) const {
  return RegionLayout(config_, request_, rows).bytes + CombineRoom(config_, request_, rows).bytes;
}

// What each rank needs.
std::vector<std::int64_t> CudaDispatch::region_bytes() const {
  std::vector<std::int64_t> bytes;
  for (int rank = 0; rank < place_.world(); ++rank) {
    bytes.push_back(bytes_of(laid_rows(rank)));
  }
  return bytes;
}

NodePointers CudaDispatch::table_pointers(const NodePointers& regions,
                                          std::int64_t RegionLayout::* size,
                                          std::int64_t RegionLayout::* offset) const {
  NodePointers pointers;
  const Topology& topology = place_.map.topology;
  for (int local = 0; local < topology.local_world_size; ++local) {
    const std::int64_t rows = laid_rows(topology.rank(place_.node(), local));
    const RegionLayout layout(config_, request_, rows);
    if (layout.*size > 0) pointers.data[local] = regions.data[local] + layout.*offset;
  }
  return pointers;
}

// Takes the region of this rank and finds those of its node.
void CudaDispatch::reserve() {
  if (bytes_.empty()) bytes_ = region_bytes();  // a counted dispatch: now the counts are there
  // Where the arena has to grow, the next call like this one shall go ahead.
  const std::vector<Extent> extents =
      layer_.reserve(bytes_, may_go_ahead() ? bytes_of(most_rows()) : 0);
  const Extent& mine = extents[static_cast<std::size_t>(place_.rank)];
  const std::int64_t rows = laid_rows(place_.rank);
  std::int64_t end = mine.offset;
  const auto take = [&](std::int64_t bytes) {
    return regions_.arena().take(mine.segment, std::exchange(end, end + bytes), bytes);
  };
  output_ = take(RegionLayout(config_, request_, rows).bytes);
  buffer_ = request_.copy_out ? output_ : take(CombineRoom(config_, request_, rows).bytes);

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
void CudaDispatch::make_tables() {
  const std::int64_t rows = laid_rows(place_.rank);
  if (new_routing_) new_routing_->make_row_tables(rows);
  if (request_.weights) {
    weights_ = keep_tables(layer_, [&](Tables& add) {
      add.add(move_.pair_weights, all_pairs());
      if (needs_row_weights()) add.add(move_.weights_of_rows, rows);
    });
  }
  move_.view = layer_.view();
  move_.token_major = request_.order == RowOrder::token_major;
  move_.fresh = new_routing_.has_value();
  move_.pads = request_.expert_alignment > 1;
  move_.weights_travel = request_.weights;
  move_.max_tokens = config_.max_tokens;
  move_.rows = rows;
  move_.tables = routing_->tables;
  move_.tokens = request_.tokens;
  move_.input = static_cast<const std::byte*>(args_.input.data());
  move_.scales = scales_.data;
  move_.weights = static_cast<const std::byte*>(args_.weights.data());
  move_.input_stride = row_stride(args_.input);
  move_.scale_stride = scales_.stride;
  move_.weight_stride = row_stride(args_.weights);
  move_.row_bytes = request_.row_bytes;
  move_.element_bytes = static_cast<int>(size_of(request_.input));
  move_.scale_words = static_cast<int>(request_.scale_bytes / std::int64_t(sizeof(float)));
  move_.weight_dtype = config_.weight_dtype;
  move_.takes = takes();
  move_.shares_gpu = calls_.shares_gpu();
}

// Where the rows go, which are counted now, and the tables of a repeated routing.
void CudaDispatch::choose_out() {
  if (!takes()) return;
  taken_ = arrived([&](void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    const bool wanted = data != nullptr && (request_.cached || data == own_payload());
    return wanted ? make_result(dtype, shape) : Tensor();
  });
  const TensorView out = args_.out.present() ? args_.out : taken_->output.view();
  if (reinterpret_cast<std::uintptr_t>(out.data()) % 16 != 0 || row_stride(out) % 16 != 0) return;
  move_.out = static_cast<std::byte*>(out.data());
  move_.out_stride = row_stride(out);
  move_.taken = {static_cast<std::byte*>(taken_->weights.data()),
                 static_cast<std::uint32_t*>(taken_->scales.data()),
                 static_cast<std::int32_t*>(taken_->expert_ids.data())};
}

// Rows that the caller chose take the place of those that place has found.
void CudaDispatch::scatter() {
  ScatterParams params;
  params.view = layer_.view();
  params.max_tokens = config_.max_tokens;
  params.tokens = request_.tokens;
  params.tables = routing_->tables;
  const std::shared_ptr<Region> rows =
      layer_.keep(request_.tokens * config_.topk * std::int64_t(sizeof(std::int32_t)));
  params.rows = reinterpret_cast<std::int32_t*>(rows->data());
  params.owners = owners_;
  scatter_rows(layer_, args_.scatter_indices, args_.stream, params, routing_->wanted_rows,
               routing_->tokens_per_rank, new_routing_->scatter_rows());
}

// Each token once to every other node that wants it.
void CudaDispatch::send() {
  RailSendParams params;
  params.view = layer_.view();
  params.placed = new_routing_ ? nullptr : routing_->tables.placed;
  params.indices =
      routing_->tables.indices + place_.node() * config_.max_tokens * std::int64_t(config_.topk);
  params.tokens = request_.tokens;
  params.rows = move_.input;
  params.row_stride = move_.input_stride;
  params.row_bytes = request_.row_bytes;
  params.scales = request_.scale_bytes > 0 ? move_.scales : nullptr;
  params.scale_stride = move_.scale_stride;
  params.scale_bytes = request_.scale_bytes;
  layer_.rail_send(params);
}

Tensor CudaDispatch::make_result(DType dtype, std::initializer_list<std::int64_t> shape) {
  if (!args_.allocate) {
    std::int64_t bytes = size_of(dtype);
    for (const std::int64_t size : shape) bytes *= size;
    const std::shared_ptr<Region> own = layer_.keep(bytes);
    return Tensor::borrow(own, own->data(), dtype, shape, place_.device());
  }
  try {
    return args_.allocate(dtype, shape);
  } catch (const std::exception&) {
    calls_.fail_without_memory();
  }
}

template <class MakeTensor>
Dispatched CudaDispatch::arrived(const MakeTensor& tensor) const {
  const auto here = [&](const NodePointers& table) { return table.data[place_.local()]; };
  return make_dispatched(
      Backend::cuda, request_, config_, routing_->rows_of(place_.rank),
      {here(move_.payload), here(move_.row_weights), here(move_.row_scales), here(move_.ids)},
      args_.out.present(), tensor);
}

Dispatched CudaDispatch::result() {
  const std::int64_t rows = routing_->rows_of(place_.rank);
  const auto tensor = [&](void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    if (data == nullptr) return Tensor();
    if (move_.out != nullptr && data == own_payload()) return std::move(taken_->output);
    if (!request_.copy_out) return Tensor::borrow(output_, data, dtype, shape, place_.device());
    Tensor own = make_result(dtype, shape);
    const std::int64_t bytes = own.view().numel() * size_of(dtype);
    calls_.check(cudaMemcpyAsync(own.data(), data, static_cast<std::size_t>(bytes),
                                 cudaMemcpyDeviceToDevice, calls_.stream()),
                 "copy_out");
    return own;
  };
  if (args_.out.present() && move_.out == nullptr) {
    calls_.check(
        copy_rows(static_cast<std::byte*>(args_.out.data()), row_stride(args_.out), own_payload(),
                  request_.row_bytes, request_.row_bytes, rows, calls_.stream()),
        "out");
  }
  Dispatched result = move_.taken.ids != nullptr ? *std::move(taken_) : arrived(tensor);

  auto state = make_state(layer_.identity(), place_.rank, number_, request_, routing_, buffer_,
                          CombineRoom(config_, request_, laid_rows(place_.rank)).values);
  state->cuda_weights = {move_.pair_weights, move_.weights_of_rows};
  state->memory = {weights_};
  if (calls_.capturing()) {  // the graph uses it again
    if (dense_weights_.copy) state->memory.push_back(dense_weights_.copy);
    if (scales_.copy) state->memory.push_back(scales_.copy);
    if (new_routing_) state->memory.push_back(new_routing_->scratch());
    state->memory.push_back(output_);
  }
  result.descriptor = std::make_shared<const Descriptor>(std::move(state));
  return result;
}

}  // namespace

Dispatched dispatch(CudaLayer& layer, const DispatchArgs& args) {
  return CudaDispatch(layer, args).run();
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
