#include "winnow/expert_parallel/layer/layer_cuda.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/layer/layer.h"
#include "winnow/expert_parallel/layer/layer_kernels_cuda.h"
#include "winnow/expert_parallel/memory/layouts.h"
#include "winnow/expert_parallel/transport/communicator.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = "expert_parallel::AllToAll";
constexpr std::int64_t kLeastOwnMemory = std::int64_t{16} << 20;

std::vector<PhaseText> texts_of(std::span<const CudaOperation> operations) {
  constexpr std::string_view kBarrier = "expert_parallel::barrier";
  std::vector<PhaseText> texts = {{Phase::world_barrier, kBarrier, "the world barrier"},
                                  {Phase::node_barrier, kBarrier, "the node barrier"}};
  for (const CudaOperation& operation : operations) {
    texts.insert(texts.end(), operation.texts.begin(), operation.texts.end());
  }
  return texts;
}

int multiprocessors(Device device) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index);
  return count;
}

}  // namespace

// ---- Creation and end.

// Everything that takes memory or loads kernels comes before the last collective step: afterwards
// other ranks' kernels may be waiting already.
CudaLayer::CudaLayer(std::shared_ptr<Transport> transport, const Config& config,
                     std::span<const CudaOperation> operations)
    : config_(config),
      map_(map_of(config, *transport)),
      transport_(std::move(transport)),
      wire_(transport_->wire()),
      rank_(transport_->rank()),
      call_sm_count_(config.sm_count),
      calls_(transport_, view_, config_.device, kOperation, texts_of(operations)) {
  if (map_.topology.local_world_size > kMaxLocals) {
    throw Error(ErrorCode::unsupported, std::string(kOperation),
                to_string(device()) + " cannot be used: a node has at most " +
                    std::to_string(kMaxLocals) + " ranks");
  }
  constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
  if (config_.max_tokens > kMostTokens / map_.topology.world_size) {
    throw Error(ErrorCode::unsupported, std::string(kOperation),
                to_string(device()) + " cannot be used: all ranks together have at most " +
                    std::to_string(kMostTokens) + " tokens");
  }
  const DeviceGuard guard(device());
  load_kernels(operations);
  const auto world = static_cast<std::size_t>(map_.topology.world_size);
  const std::int64_t locals = map_.topology.local_world_size;
  view_.topology = topology_of(map_, rank_);
  view_.control_layout =
      control_layout(map_, config_,
                     std::int64_t(sizeof(Header)) + (map_.experts + map_.topology.world_size) * 4 +
                         std::int64_t(sizeof(Findings)));
  view_.rail_layout = rail_layout(map_, config_);
  view_.timeout_ns = static_cast<std::uint64_t>(config_.timeout.count());

  std::byte **control = nullptr, **rail = nullptr, **pushed = nullptr;
  const auto lay_out = [&](Tables tables) {
    tables.add(view_.state, 1);
    for (std::byte*** pointers : {&control, &rail, &pushed}) tables.add(*pointers, locals);
    tables.add(segments_, kMaxSegments * locals);
    return static_cast<std::size_t>(tables.bytes());
  };
  private_ = allocate_cuda_memory(device(), lay_out(Tables()));
  lay_out(Tables(private_.get()));
  view_.segments = segments_;
  own_.add(own_memory(device(), static_cast<std::size_t>(kLeastOwnMemory)));
  make_reports();

  const std::int64_t segment = arena_.add(allocate(first_segment_bytes(config_), "the arena"));
  const NodePointers arena = node_pointers_of(arena_.memory(segment));
  write_cuda_memory(device(), segment_row(segment), arena.data, pointers_bytes());
  if (nodes() > 1) {
    rail_ = allocate(view_.rail_layout.bytes, "the rail buffers");
    view_.rail = view_of(*rail_, rail);
  }
  control_ = allocate(view_.control_layout.bytes, "the mailboxes");
  view_.control = view_of(*control_, control);
  world_is_one_gpu_ = transport_->ranks_on_gpu() == map_.topology.world_size;
  if (locals > 1 && (config_.enable_local_combine || pushes_rows(config_.max_tokens))) {
    pushed_ = allocate(pushed_bytes(map_, config_), "what other ranks push");
    view_.pushed = view_of(*pushed_, pushed);
  }
  holes_.assign(world, arena_.largest_hole());
  const int ranks = calls_.count_ranks();
  blocks_ = std::max(1, std::min(config_.sm_count, multiprocessors(device()) / ranks));
}

void CudaLayer::load_kernels(std::span<const CudaOperation> operations) {
  check(wire_->load(), "loading the kernels");
  check(load_layer_kernels(), "loading the kernels");
  for (const CudaOperation& operation : operations) check(operation.load(), "loading the kernels");
}

std::shared_ptr<SymmetricMemory> CudaLayer::allocate(std::int64_t bytes, std::string_view what) {
  return transport_->allocate_cuda(device(), static_cast<std::size_t>(bytes),
                                   Deadline(config_.timeout), what);
}

NodePointers CudaLayer::node_pointers_of(SymmetricMemory& memory) const {
  NodePointers pointers;
  std::ranges::copy(expert_parallel::node_pointers(memory, map_.topology, rank_, kOperation),
                    pointers.data);
  return pointers;
}

SymmetricView CudaLayer::view_of(SymmetricMemory& memory, std::byte** pointers) const {
  write_cuda_memory(device(), pointers, node_pointers_of(memory).data, pointers_bytes());
  return {memory.local(), pointers, memory.peers()};
}

std::size_t CudaLayer::pointers_bytes() const {
  return static_cast<std::size_t>(map_.topology.local_world_size) * sizeof(std::byte*);
}

bool CudaLayer::pushes_rows(std::int64_t tokens) const {
  if (world_is_one_gpu_ && !config_.enable_local_combine) return false;
  Config config = config_;
  config.sm_count = call_sm_count_;  // what the layer's memory is for, or less
  return expert_parallel::pushes_rows(map_, config, tokens);
}

float* CudaLayer::combine_weights() {
  if (!combine_weights_) {
    const std::int64_t pairs = nodes() * config_.max_tokens * config_.topk;
    combine_weights_ = keep(2 * pairs * std::int64_t(sizeof(float)));
  }
  return reinterpret_cast<float*>(combine_weights_->data());
}

void CudaLayer::make_reports() {
  const std::int64_t world = map_.topology.world_size;
  report_words_ = static_cast<std::size_t>(4 * world + 2 * map_.per_rank() + 64);
  calls_.make_reports<ReportView>({&host_report_, &host_deferred_},
                                  {&view_.report, &view_.deferred}, view_,
                                  [&](Tables& tables, ReportView& view) {
                                    tables.add(view.report, 1);
                                    tables.add(view.headers, world);
                                    tables.add(view.findings, world);
                                    tables.add(view.wanted, world);
                                    tables.add(view.words, std::int64_t(report_words_));
                                  });
}

std::shared_ptr<Region> CudaLayer::keep(std::int64_t bytes) {
  bytes = std::max<std::int64_t>(bytes, 1);
  Extent hole = own_.largest_hole();
  if (hole.bytes < Arena::round_up(bytes)) {
    const std::int64_t grown = Arena::round_up(std::max(bytes, 2 * own_.largest_segment()));
    try {
      hole = {own_.add(own_memory(device(), static_cast<std::size_t>(grown))), 0, grown};
    } catch (const Error&) {
      if (others_go_on_) calls_.fail_without_memory();
      throw;
    }
  }
  return own_.take(hole.segment, hole.offset, bytes);
}

// ---- A call.

std::uint64_t CudaLayer::begin(std::string_view operation, Stream stream, int sm_count) {
  calls_.begin(operation, stream);
  const bool fewer = sm_count > 0 && sm_count < config_.sm_count;
  call_sm_count_ = fewer ? sm_count : config_.sm_count;
  call_blocks_ = std::min(blocks_, call_sm_count_);
  fresh_holes_ = reserved_ = false;
  releasable_ = 0;
  own_header_ = {};
  others_go_on_ = false;
  return calls_.number();
}

void CudaLayer::exchange(Phase phase, const Header& header, const std::int32_t* counts,
                         const std::byte* table, std::int64_t table_bytes, Report report) {
  own_header_ = header;
  if (capturing() && header.refusal != 0) return;  // the recording ends with the Error
  if (capturing() && report != Report::none) {
    throw Error(ErrorCode::internal, calls_.operation(), "a graph cannot wait for a report");
  }
  ExchangeParams params;
  params.view = view_;
  params.header = header;
  const Call call = header.options.call;
  const bool reserves = call == Call::dispatch || call == Call::cached_dispatch;
  const bool waits = report == Report::headers || report == Report::more;
  if (reserves && reserved_) params.header.options.regions = 1 + std::int64_t(regions_ >> 2);
  params.counts = counts;
  params.table = table;
  params.table_bytes = nodes() > 1 ? table_bytes : 0;
  params.phase = phase;
  params.call = calls_.number();
  params.waits = waits || header.refusal != 0;
  params.reports = params.waits || report == Report::later;
  params.completes = report != Report::more;
  if (params.reports) read_offer();  // before kernels write the next report
  check(wire_->exchange(params, stream()), "exchange");
  if (report == Report::later && !params.waits) offered_ = calls_.number();
  others_go_on_ = !capturing();
}

void CudaLayer::wait_report() {
  if (capturing()) {
    if (own_header_.subject < 0) own_header_.subject = rank_;
    throw_refusals(calls_.operation(), std::span(&own_header_, 1));
  }
  calls_.wait_for(host_report_.report->call, calls_.number());
  if (host_report_.report->refused != 0) throw_heard(host_report_, false, calls_.number());
}

void CudaLayer::quiet() {
  if (nodes() > 1) check(wire_->quiet(view_, stream()), "quiet");
}

void CudaLayer::end() {
  calls_.end();
  if (capturing()) return;
  calls_.throw_fault();
  throw_deferred();
}

void CudaLayer::barrier(bool node_only, Stream stream) {
  begin("expert_parallel::barrier", stream);
  BarrierParams params;
  params.view = view_;
  params.node_only = node_only;
  check(wire_->barrier(params, calls_.stream()), "barrier");
  end();
}

// ---- Faults.

// What was heard, with the texts of indices that kernels have found: those that refuse the call, or
// those that do not.
std::vector<Header> CudaLayer::refusals(const ReportView& heard, bool deferred) const {
  std::vector<Header> headers(heard.headers, heard.headers + map_.topology.world_size);
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    const Findings& found = heard.findings[rank];
    Header& header = headers[rank];
    if (found.bad == 0 || header.refusal != 0) continue;
    if ((header.options.worst_case_rows > 0) != deferred) continue;
    header.refuse(Error(ErrorCode::invalid_argument, calls_.operation(), "expert_indices",
                        "-1 to " + std::to_string(map_.experts),
                        std::to_string(found.value) + " for token " + std::to_string(found.token)));
  }
  return headers;
}

void CudaLayer::throw_heard(const ReportView& heard, bool deferred, std::uint64_t call) {
  const std::vector<Header> headers = refusals(heard, deferred);
  const auto reserves = [](const Header& one) { return one.options.regions > 0; };
  // Ranks that refused it have reserved nothing. What was learned since, all have learned.
  if (!deferred && call >= learned_ && std::ranges::any_of(headers, reserves)) {
    holes_.assign(headers.size(), {});
    forget_offer();
  }
  throw_refusals(calls_.operation(), headers);
}

void CudaLayer::throw_deferred() {
  CallReport& report = *host_deferred_.report;
  calls_.throw_deferred(report.call, [&](std::uint64_t call) {
    if (report.overflow == 0) return throw_heard(host_deferred_, report.refused == 0, call);
    for (int rank = 0; rank < map_.topology.world_size; ++rank) {
      const std::int64_t wanted = host_deferred_.wanted[rank];
      if (wanted <= report.worst_case_rows) continue;
      throw Error(ErrorCode::invalid_argument, calls_.operation(),
                  "rank " + std::to_string(rank) + ": worst_case_rows",
                  std::to_string(wanted) + " or more", std::to_string(report.worst_case_rows));
    }
  });
}

// ---- Regions.

bool CudaLayer::fits(std::span<const std::int64_t> bytes) const {
  for (std::size_t rank = 0; rank < holes_.size(); ++rank) {
    if (holes_[rank].segment < 0 || Arena::round_up(bytes[rank]) > holes_[rank].bytes) return false;
  }
  return true;
}

void CudaLayer::learn_offered(std::span<const std::int64_t> bytes) {
  read_offer();
  if (offer_) {
    const std::vector<Extent> known = std::exchange(holes_, offer_->holes);
    if (fits(bytes)) {
      learned_ = offer_->call;
      regions_ = 0;
      offer_.reset();
      return;
    }
    holes_ = known;  // this call's exchange will tell more
  }
  if (!capturing()) return;
  throw Error(ErrorCode::invalid_argument, calls_.operation(),
              "the arena is too small for what a graph records: make Config::arena_rows larger");
}

// What a refused call offered is as good as that of another one, but a rank that refused it did not
// ask for it.
void CudaLayer::read_offer() {
  if (offered_ == 0) return;
  const std::uint64_t call = std::exchange(offered_, 0);
  calls_.wait_for(host_report_.report->call, call);
  offer_.reset();
  if (host_report_.report->refused == 0) offer_ = heard_offer(call);
}

void CudaLayer::forget_offer() {
  offered_ = 0;
  offer_.reset();
}

CudaLayer::Offer CudaLayer::heard_offer(std::uint64_t call) const {
  Offer offer{call, std::vector<Extent>(holes_.size()), ~std::uint64_t{0}};
  for (std::size_t rank = 0; rank < holes_.size(); ++rank) {
    offer.holes[rank] = host_report_.headers[rank].rows;
    offer.releasable &= host_report_.headers[rank].releasable;
  }
  return offer;
}

void CudaLayer::offer_hole(Header& header) const {
  header.rows = arena_.largest_hole();
  header.releasable = arena_.releasable(header.rows);
}

void CudaLayer::learn_holes() {
  Offer offer = heard_offer(calls_.number());
  learned_ = offer.call;
  holes_ = std::move(offer.holes);
  releasable_ = offer.releasable;
  forget_offer();
  fresh_holes_ = true;
  regions_ = 0;
}

std::vector<Extent> CudaLayer::reserve(std::span<const std::int64_t> bytes, std::int64_t room) {
  release_learned();
  forget_offer();  // it may be the hole that is taken from now
  const std::vector<Extent> regions = take_regions(holes_, bytes, [&](std::int64_t missing) {
    if (!fresh_holes_) {
      throw Error(ErrorCode::internal, calls_.operation(), "no room, and no word of it");
    }
    const std::int64_t grown =
        arena_.grown_for(room <= 2 * missing ? std::max(missing, room) : missing);
    const std::int64_t segment = arena_.add(allocate(grown, "a larger arena"));
    check(set_segment(segment_row(segment), node_pointers_of(arena_.memory(segment)),
                      map_.topology.local_world_size, stream()),
          "the table of segments");
    return Extent{segment, 0, grown};
  });
  for (const Extent& region : regions) {
    for (const std::int64_t value : {region.segment, region.offset, region.bytes}) {
      regions_ = (regions_ ^ std::uint64_t(value)) * 0x100000001b3u;  // FNV-1a
    }
  }
  reserved_ = true;
  return regions;
}

std::byte** CudaLayer::segment_row(std::int64_t segment) const {
  return segments_ + segment % kMaxSegments * map_.topology.local_world_size;
}

NodePointers CudaLayer::node_pointers(std::span<const Extent> extents) const {
  NodePointers pointers;
  for (int i = 0; i < map_.topology.local_world_size; ++i) {
    const int rank = map_.topology.rank(node(), i);
    const Extent& extent = extents[static_cast<std::size_t>(rank)];
    pointers.data[i] = arena_.memory(extent.segment).peer(rank) + extent.offset;
  }
  return pointers;
}

}  // namespace winnow::expert_parallel
