#include "winnow/expert_parallel/device/device_layer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/combine/combine.h"
#include "winnow/expert_parallel/device/fault_report.h"
#include "winnow/expert_parallel/device/layer_kernels.h"
#include "winnow/expert_parallel/device/layouts.h"
#include "winnow/expert_parallel/device/report_wait.h"
#include "winnow/expert_parallel/dispatch/dispatch.h"
#include "winnow/expert_parallel/layer.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = "expert_parallel::AllToAll";
constexpr std::int64_t kLeastOwnMemory = std::int64_t{16} << 20;

int multiprocessors(Device device) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index);
  return count;
}

}  // namespace

// ---- Creation and end.

// Everything that takes memory or loads kernels comes before the last collective step: afterwards
// other ranks' kernels may be waiting already.
DeviceLayer::DeviceLayer(std::shared_ptr<Transport> transport, const Config& config)
    : config_(config),
      map_(map_of(config, *transport)),
      transport_(std::move(transport)),
      wire_(transport_->wire()),
      rank_(transport_->rank()) {
  check_device();
  const DeviceGuard guard(device());
  load_kernels();
  const auto world = static_cast<std::size_t>(map_.topology.world_size);
  const std::int64_t locals = map_.topology.local_world_size;
  view_.topology = topology_of(map_, rank_);
  view_.control_layout = control_layout(map_, config_);
  view_.rail_layout = rail_layout(map_, config_);
  view_.timeout_ns = static_cast<std::uint64_t>(config_.timeout.count());

  Parts own;  // what kernels of this rank know: the state and the tables of pointers
  const std::int64_t pointers = locals * std::int64_t(sizeof(std::byte*));
  const std::int64_t state = own.add(sizeof(DeviceState));
  const std::int64_t control = own.add(pointers), rail = own.add(pointers);
  const std::int64_t segments = own.add(kMaxSegments * pointers);
  private_ = allocate_on_gpu(device(), static_cast<std::size_t>(own.end()));
  view_.state = reinterpret_cast<DeviceState*>(private_.get() + state);
  segments_ = reinterpret_cast<std::byte**>(private_.get() + segments);
  view_.segments = segments_;
  own_.add(own_memory(device(), static_cast<std::size_t>(kLeastOwnMemory)));
  make_reports();
  check(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "an event");

  const std::int64_t segment = arena_.add(allocate(first_segment_bytes(config_), "the arena"));
  const NodePointers arena = node_pointers_of(arena_.memory(segment));
  write_to_gpu(device(), segment_row(segment), arena.data, static_cast<std::size_t>(pointers));
  if (nodes() > 1) {
    rail_ = allocate(view_.rail_layout.bytes, "the rail buffers");
    view_.rail = view_of(*rail_, private_.get() + rail);
  }
  control_ = allocate(view_.control_layout.bytes, "the mailboxes");
  view_.control = view_of(*control_, private_.get() + control);
  holes_.assign(world, arena_.largest_hole());
  const int ranks = transport_->ranks_on_gpu();
  if (ranks > kMostRanksOnGpu) {
    throw Error(ErrorCode::unsupported, std::string(kOperation), "device",
                "at most " + std::to_string(kMostRanksOnGpu) + " ranks on a GPU",
                std::to_string(ranks) + " on " + to_string(device()));
  }
  shares_gpu_ = ranks > 1;
  blocks_ = std::max(1, std::min(config_.sm_count, multiprocessors(device()) / ranks));
}

DeviceLayer::~DeviceLayer() {
  if (last_ == nullptr) return;
  if (any_call_) {
    try {
      free_after(last_);
    } catch (const Error&) {  // the GPU is lost, and its memory with it
    }
  }
  page_.retire(any_call_ ? std::exchange(last_, nullptr) : nullptr);
  if (last_ != nullptr) cudaEventDestroy(last_);
}

void DeviceLayer::check_device() {
  const auto unsupported = [&](const std::string& why) {
    throw Error(ErrorCode::unsupported, std::string(kOperation),
                to_string(device()) + " cannot be used: " + why);
  };
  const GpuList& list = winnow::gpus();
  const auto gpu = std::ranges::find(list.gpus, device().index, &Gpu::index);
  if (gpu == list.gpus.end()) {
    unsupported(list.gpus.empty()
                    ? list.reason
                    : "the machine has " + std::to_string(list.gpus.size()) + " GPUs");
  }
  if (gpu->compute_major < 9) {
    unsupported("the all-to-all needs compute capability 9.0, " + gpu->name + " has " +
                std::to_string(gpu->compute_major) + "." + std::to_string(gpu->compute_minor));
  }
  if (wire_ == nullptr) unsupported("the transport " + transport_->name() + " serves no GPUs");
  if (map_.topology.local_world_size > kMaxLocals) {
    unsupported("a node has at most " + std::to_string(kMaxLocals) + " ranks");
  }
}

void DeviceLayer::load_kernels() {
  for (const auto load :
       {wire_->load, &load_layer_kernels, &load_dispatch_kernels, &load_combine_kernels}) {
    check(load(), "loading the kernels");
  }
}

std::shared_ptr<SymmetricMemory> DeviceLayer::allocate(std::int64_t bytes, std::string_view what) {
  return transport_->allocate_device(device(), static_cast<std::size_t>(bytes),
                                     Deadline(config_.timeout), what);
}

// Pointers are asked for inside the node only.
NodePointers DeviceLayer::node_pointers_of(SymmetricMemory& memory) const {
  NodePointers pointers;
  for (int i = 0; i < map_.topology.local_world_size; ++i) {
    pointers.data[i] = memory.peer(map_.topology.rank(node(), i));
  }
  return pointers;
}

SymmetricView DeviceLayer::view_of(SymmetricMemory& memory, std::byte* table) const {
  const NodePointers pointers = node_pointers_of(memory);
  write_to_gpu(device(), table, pointers.data,
               static_cast<std::size_t>(map_.topology.local_world_size) * sizeof(std::byte*));
  return {memory.local(), reinterpret_cast<std::byte* const*>(table), memory.wire()};
}

void DeviceLayer::make_reports() {
  const std::int64_t world = map_.topology.world_size;
  report_words_ = static_cast<std::size_t>(4 * world + 2 * map_.per_rank() + 64);
  Parts parts;
  const std::int64_t fault = parts.add(sizeof(FaultReport));
  struct Offsets {
    std::int64_t report, headers, findings, wanted, words;
  };
  const auto lay_out = [&] {
    return Offsets{parts.add(sizeof(CallReport)), parts.add(world * sizeof(Header)),
                   parts.add(world * sizeof(Findings)), parts.add(world * sizeof(std::int64_t)),
                   parts.add(std::int64_t(report_words_ * sizeof(std::int32_t)))};
  };
  const Offsets report = lay_out(), deferred = lay_out();
  page_ = PinnedPage(static_cast<std::size_t>(parts.end()));
  const auto view = [](std::byte* page, const Offsets& at) {
    return ReportView{reinterpret_cast<CallReport*>(page + at.report),
                      reinterpret_cast<Header*>(page + at.headers),
                      reinterpret_cast<Findings*>(page + at.findings),
                      reinterpret_cast<std::int64_t*>(page + at.wanted),
                      reinterpret_cast<std::int32_t*>(page + at.words)};
  };
  host_report_ = view(page_.host(), report);
  host_deferred_ = view(page_.host(), deferred);
  host_fault_ = reinterpret_cast<FaultReport*>(page_.host() + fault);
  view_.report = view(page_.device(), report);
  view_.deferred = view(page_.device(), deferred);
  view_.fault = reinterpret_cast<FaultReport*>(page_.device() + fault);
}

std::shared_ptr<Region> DeviceLayer::keep(std::int64_t bytes) {
  bytes = std::max<std::int64_t>(bytes, 1);
  Extent hole = own_.largest_hole();
  if (hole.bytes < Arena::round_up(bytes)) {
    const std::int64_t grown = Arena::round_up(std::max(bytes, 2 * own_.largest_segment()));
    hole = {own_.add(own_memory(device(), static_cast<std::size_t>(grown))), 0, grown};
  }
  return own_.take(hole.segment, hole.offset, bytes);
}

// ---- A call.

std::uint64_t DeviceLayer::begin(std::string_view operation, Stream stream) {
  operation_ = operation;
  stream_ = static_cast<cudaStream_t>(stream.handle);
  throw_fault();
  if (!broken_.empty()) throw Error(ErrorCode::internal, operation_, broken_);
  if (shares_gpu_ && stream_ == nullptr) {
    throw Error(ErrorCode::invalid_argument, operation_, "stream",
                "one of this rank's own, since other ranks share " + to_string(device()),
                "the default stream");
  }
  capturing_ = in_capture(device(), stream);
  fresh_holes_ = false;
  releasable_ = 0;
  own_header_ = {};
  if (!capturing_ && any_call_ && stream_ != last_stream_) {
    check(cudaStreamWaitEvent(stream_, last_), "the order of streams");
  }
  return ++calls_;
}

void DeviceLayer::exchange(const Header& header, const std::int32_t* counts, const std::byte* table,
                           std::int64_t table_bytes, Report report) {
  own_header_ = header;
  if (capturing_ && header.refusal != 0) return;  // the recording ends with the Error
  if (capturing_ && report != Report::none) {
    throw Error(ErrorCode::internal, operation_, "a graph cannot wait for a report");
  }
  ExchangeParams params;
  params.view = view_;
  params.header = header;
  params.header.row_bytes = view_.control_layout.row_bytes;
  const Call call = header.options.call;
  const bool reserves = call == Call::dispatch || call == Call::cached_dispatch;
  const bool waits = report == Report::headers || report == Report::more;
  if (reserves && !waits) params.header.options.regions = 1 + regions_;
  params.counts = counts;
  params.table = table;
  params.table_bytes = nodes() > 1 ? table_bytes : 0;
  params.phase = call == Call::combine ? Phase::expert_rows : Phase::counts;
  params.ticket = calls_;
  params.waits = waits || header.refusal != 0;
  params.reports = params.waits || report == Report::later;
  params.completes = report != Report::more;
  if (params.reports) read_offer();  // before kernels write the next report
  check(wire_->exchange(params, stream_), "exchange");
  if (report == Report::later && !params.waits) offered_ = calls_;
}

void DeviceLayer::wait_report() {
  if (capturing_) throw_refusals(operation_, std::array{&std::as_const(own_header_)});
  mark_end();  // of a call that goes no further
  wait_for(calls_);
  if (host_report_.report->refused != 0) throw_heard(host_report_, false);
}

void DeviceLayer::wait_for(std::uint64_t call) {
  wait_for_report(
      host_report_.report->ticket, call, stream_, [this] { throw_fault(); },
      [this](int error, const char* what) { check(error, what); });
}

void DeviceLayer::mark_end() {
  check(cudaEventRecord(last_, stream_), "the end of the call");
  last_stream_ = stream_;
  any_call_ = true;
}

void DeviceLayer::end() {
  if (!capturing_) {
    mark_end();
    throw_fault();
    throw_deferred();
  }
}

void DeviceLayer::barrier(bool node_only, Stream stream) {
  begin("expert_parallel::barrier", stream);
  BarrierParams params;
  params.view = view_;
  params.node_only = node_only;
  check(wire_->barrier(params, stream_), "barrier");
  end();
}

// ---- Faults.

void DeviceLayer::check(int cuda_error, const char* what) {
  if (cuda_error == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(cuda_error);
  broken_ = "rank " + std::to_string(rank_) + ": " + what + ": " + cudaGetErrorString(error);
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::resource : ErrorCode::internal,
              operation_.empty() ? std::string(kOperation) : operation_, broken_);
}

void DeviceLayer::throw_fault() {
  if (!fault_) {
    if (std::atomic_ref(host_fault_->state).load(std::memory_order_acquire) == 0) return;
    fault_ = fault_record(*host_fault_, *transport_);
  }
  expert_parallel::throw_fault(*fault_, rank_);
}

// What was heard, with the texts of indices that kernels have found: those that refuse the call, or
// those that do not.
std::vector<Header> DeviceLayer::refusals(const ReportView& heard, bool deferred) const {
  std::vector<Header> headers(heard.headers, heard.headers + map_.topology.world_size);
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    const Findings& found = heard.findings[rank];
    Header& header = headers[rank];
    if (found.bad == 0 || header.refusal != 0) continue;
    if ((header.options.worst_case_rows > 0) != deferred) continue;
    header.refuse(Error(ErrorCode::invalid_argument, operation_, "expert_indices",
                        "-1 to " + std::to_string(map_.experts),
                        std::to_string(found.value) + " for token " + std::to_string(found.token)));
  }
  return headers;
}

void DeviceLayer::throw_heard(const ReportView& heard, bool deferred) {
  const std::vector<Header> headers = refusals(heard, deferred);
  const auto reserves = [](const Header& one) { return one.options.regions > 0; };
  if (!deferred && std::ranges::any_of(headers, reserves)) {
    holes_.assign(headers.size(), {});
    forget_offer();
  }
  std::vector<const Header*> pointers;
  for (const Header& header : headers) pointers.push_back(&header);
  throw_refusals(operation_, pointers);
}

void DeviceLayer::throw_deferred() {
  CallReport& report = *host_deferred_.report;
  // What this very call has found so soon waits for the next one, as it would if it came later.
  const std::uint64_t ticket = load_acquire(&report.ticket);
  if (ticket == 0 || ticket == calls_) return;
  // The kernels may write the next one when this is read.
  struct Read {
    CallReport& report;
    ~Read() { store_release(&report.ticket, 0); }
  } read{report};
  if (report.overflow == 0) return throw_heard(host_deferred_, report.refused == 0);
  for (int rank = 0; rank < map_.topology.world_size; ++rank) {
    const std::int64_t wanted = host_deferred_.wanted[rank];
    if (wanted <= report.worst_case_rows) continue;
    throw Error(ErrorCode::invalid_argument, operation_,
                "rank " + std::to_string(rank) + ": worst_case_rows",
                std::to_string(wanted) + " or more", std::to_string(report.worst_case_rows));
  }
}

// ---- Regions.

bool DeviceLayer::fits(std::span<const std::int64_t> bytes) const {
  for (std::size_t rank = 0; rank < holes_.size(); ++rank) {
    if (holes_[rank].segment < 0 || Arena::round_up(bytes[rank]) > holes_[rank].bytes) return false;
  }
  return true;
}

void DeviceLayer::learn_offered(std::span<const std::int64_t> bytes) {
  if (capturing_) {
    throw Error(ErrorCode::invalid_argument, operation_,
                "the arena is too small for what a graph records: make Config::arena_rows larger");
  }
  read_offer();
  if (!offer_) return;
  const std::vector<Extent> known = std::exchange(holes_, offer_->holes);
  if (!fits(bytes)) {  // this call's exchange will tell more
    holes_ = known;
    return;
  }
  releasable_ = offer_->releasable;
  regions_ = 0;
  offer_.reset();
}

// What a refused call offered is as good as that of another one, but a rank that refused it did not
// ask for it.
void DeviceLayer::read_offer() {
  if (offered_ == 0) return;
  wait_for(std::exchange(offered_, 0));
  offer_.reset();
  if (host_report_.report->refused == 0) offer_ = heard_offer();
}

void DeviceLayer::forget_offer() {
  offered_ = 0;
  offer_.reset();
}

DeviceLayer::Offer DeviceLayer::heard_offer() const {
  Offer offer{std::vector<Extent>(holes_.size()), ~std::uint64_t{0}};
  for (std::size_t rank = 0; rank < holes_.size(); ++rank) {
    offer.holes[rank] = host_report_.headers[rank].rows;
    offer.releasable &= host_report_.headers[rank].releasable;
  }
  return offer;
}

void DeviceLayer::offer_hole(Header& header) const {
  header.rows = arena_.largest_hole();
  header.releasable = arena_.releasable(header.rows);
}

void DeviceLayer::learn_holes() {
  Offer offer = heard_offer();
  holes_ = std::move(offer.holes);
  releasable_ = offer.releasable;
  forget_offer();
  fresh_holes_ = true;
  regions_ = 0;
}

std::vector<Extent> DeviceLayer::reserve(std::span<const std::int64_t> bytes) {
  arena_.release(std::exchange(releasable_, 0));
  forget_offer();            // it may be the hole that is taken from now
  std::int64_t missing = 0;  // the most that a rank without room needs
  for (std::size_t rank = 0; rank < holes_.size(); ++rank) {
    const std::int64_t wanted = Arena::round_up(bytes[rank]);
    const bool room = holes_[rank].segment >= 0 && wanted <= holes_[rank].bytes;
    if (!room) missing = std::max(missing, wanted);
    if (!room) holes_[rank] = {};
  }
  if (missing > 0) {
    if (!fresh_holes_) throw Error(ErrorCode::internal, operation_, "no room, and no word of it");
    const std::int64_t grown = std::max(missing, 2 * arena_.largest_segment());
    const std::int64_t segment = arena_.add(allocate(grown, "a larger arena"));
    check(set_segment(segment_row(segment), node_pointers_of(arena_.memory(segment)),
                      map_.topology.local_world_size, stream_),
          "the table of segments");
    for (Extent& hole : holes_) {
      if (hole.bytes < missing) hole = {segment, 0, grown};
    }
  }
  ++regions_;
  std::vector<Extent> extents;
  for (std::size_t rank = 0; rank < holes_.size(); ++rank) {
    Extent& hole = holes_[rank];
    extents.push_back({hole.segment, hole.offset, bytes[rank]});
    hole.offset += Arena::round_up(bytes[rank]);
    hole.bytes -= Arena::round_up(bytes[rank]);
  }
  return extents;
}

std::byte** DeviceLayer::segment_row(std::int64_t segment) const {
  return segments_ + segment % kMaxSegments * map_.topology.local_world_size;
}

NodePointers DeviceLayer::node_pointers(std::span<const Extent> extents) const {
  NodePointers pointers;
  for (int i = 0; i < map_.topology.local_world_size; ++i) {
    const int rank = map_.topology.rank(node(), i);
    const Extent& extent = extents[static_cast<std::size_t>(rank)];
    pointers.data[i] = arena_.memory(extent.segment).peer(rank) + extent.offset;
  }
  return pointers;
}

}  // namespace winnow::expert_parallel
