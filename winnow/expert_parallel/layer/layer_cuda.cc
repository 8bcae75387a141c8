#include "winnow/expert_parallel/layer/layer_cuda.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"
#include "winnow/expert_parallel/exchange/rail_cuda.h"
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
    : transport_(std::move(transport)),
      place_{config, map_of(config, *transport_), transport_->rank()},
      fabric_(transport_->fabric()),
      call_sm_count_(config.sm_count),
      calls_(transport_, view_, config.device, kOperation, texts_of(operations)) {
  const auto unsupported = [&](const std::string& why) {
    throw Error(ErrorCode::unsupported, std::string(kOperation),
                to_string(config.device) + " cannot be used: " + why);
  };
  const ExpertMap& map = place_.map;
  const std::int64_t locals = place_.locals();
  if (locals > kMaxLocals) {
    unsupported("a node has at most " + std::to_string(kMaxLocals) + " ranks");
  }
  constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
  if (config.max_tokens > kMostTokens / place_.world()) {
    unsupported("all ranks together have at most " + std::to_string(kMostTokens) + " tokens");
  }
  const DeviceGuard guard(config.device);
  load_kernels(operations);
  view_.topology = topology_of(map, place_.rank);
  view_.control_layout =
      control_layout(map, config,
                     std::int64_t(sizeof(Header)) + (map.experts + place_.world()) * 4 +
                         std::int64_t(sizeof(Findings)));
  view_.rail_layout = rail_layout(map, config);
  view_.timeout_ns = static_cast<std::uint64_t>(config.timeout.count());

  std::byte **control = nullptr, **rail = nullptr, **pushed = nullptr;
  const auto lay_out = [&](Tables tables) {
    tables.add(view_.state, 1);
    for (std::byte*** pointers : {&control, &rail, &pushed}) tables.add(*pointers, locals);
    tables.add(segments_, kMaxSegments * locals);
    return static_cast<std::size_t>(tables.bytes());
  };
  private_ = allocate_cuda_memory(config.device, lay_out(Tables()));
  lay_out(Tables(private_.get()));
  view_.segments = segments_;
  own_.emplace(kLeastOwnMemory, [this](std::int64_t bytes) { return allocate_own(bytes); });
  handshake_.emplace(place_, view_, *fabric_, regions_, calls_);

  Arena& arena = regions_.arena();
  const std::int64_t segment = arena.add(allocate(first_segment_bytes(config), "the arena"));
  const NodePointers pointers = node_pointers_of(arena.memory(segment));
  write_cuda_memory(config.device, segment_row(segment), pointers.data, pointers_bytes());
  if (place_.nodes() > 1) {
    rail_ = allocate(view_.rail_layout.bytes, "the rail buffers");
    view_.rail = view_of(*rail_, rail);
  }
  control_ = allocate(view_.control_layout.bytes, "the mailboxes");
  view_.control = view_of(*control_, control);
  world_is_one_gpu_ = transport_->ranks_on_gpu() == place_.world();
  if (locals > 1 && (config.enable_local_combine || pushes_rows(config.max_tokens))) {
    pushed_ = allocate(pushed_bytes(map, config), "what other ranks push");
    view_.pushed = view_of(*pushed_, pushed);
  }
  regions_.start(place_.world());
  const int ranks = calls_.count_ranks();
  blocks_ = std::max(1, std::min(config.sm_count, multiprocessors(config.device) / ranks));
}

void CudaLayer::load_kernels(std::span<const CudaOperation> operations) {
  calls_.check(fabric_->load(), "loading the kernels");
  calls_.check(load_layer_kernels(), "loading the kernels");
  for (const CudaOperation& operation : operations) {
    calls_.check(operation.load(), "loading the kernels");
  }
}

std::shared_ptr<SymmetricMemory> CudaLayer::allocate(std::int64_t bytes, std::string_view what) {
  return transport_->allocate_cuda(place_.device(), static_cast<std::size_t>(bytes),
                                   Deadline(place_.config.timeout), what);
}

std::shared_ptr<SymmetricMemory> CudaLayer::allocate_own(std::int64_t bytes) {
  try {
    return own_memory(place_.device(), static_cast<std::size_t>(bytes));
  } catch (const Error&) {
    if (handshake_ && handshake_->others_go_on()) calls_.fail_without_memory();
    throw;
  }
}

NodePointers CudaLayer::node_pointers_of(SymmetricMemory& memory) const {
  NodePointers pointers;
  std::ranges::copy(
      expert_parallel::node_pointers(memory, place_.map.topology, place_.rank, kOperation),
      pointers.data);
  return pointers;
}

SymmetricView CudaLayer::view_of(SymmetricMemory& memory, std::byte** pointers) const {
  write_cuda_memory(place_.device(), pointers, node_pointers_of(memory).data, pointers_bytes());
  return {memory.local(), pointers, memory.peers()};
}

std::size_t CudaLayer::pointers_bytes() const {
  return static_cast<std::size_t>(place_.locals()) * sizeof(std::byte*);
}

bool CudaLayer::pushes_rows(std::int64_t tokens) const {
  if (world_is_one_gpu_ && !place_.config.enable_local_combine) return false;
  Config config = place_.config;
  config.sm_count = call_sm_count_;  // what the layer's memory is for, or less
  return expert_parallel::pushes_rows(place_.map, config, tokens);
}

float* CudaLayer::combine_weights() {
  if (!combine_weights_) {
    const std::int64_t pairs = place_.nodes() * place_.config.max_tokens * place_.config.topk;
    combine_weights_ = keep(2 * pairs * std::int64_t(sizeof(float)));
  }
  return reinterpret_cast<float*>(combine_weights_->data());
}

// ---- A call.

std::uint64_t CudaLayer::begin(std::string_view operation, Stream stream, int sm_count) {
  calls_.begin(operation, stream);
  const int most = place_.config.sm_count;
  call_sm_count_ = sm_count > 0 && sm_count < most ? sm_count : most;
  call_blocks_ = std::min(blocks_, call_sm_count_);
  regions_.begin();
  handshake_->begin();
  return calls_.number();
}

std::vector<Extent> CudaLayer::reserve(std::span<const std::int64_t> bytes, std::int64_t room) {
  return regions_.reserve(calls_.operation(), bytes, room, [&](std::int64_t grown) {
    Arena& arena = regions_.arena();
    const std::int64_t segment = arena.add(allocate(grown, "a larger arena"));
    calls_.check(set_segment(segment_row(segment), node_pointers_of(arena.memory(segment)),
                             place_.locals(), calls_.stream()),
                 "the table of segments");
    return segment;
  });
}

std::byte** CudaLayer::segment_row(std::int64_t segment) const {
  return segments_ + segment % kMaxSegments * place_.locals();
}

NodePointers CudaLayer::node_pointers(std::span<const Extent> extents) const {
  NodePointers pointers;
  for (int i = 0; i < place_.locals(); ++i) {
    const int rank = place_.map.topology.rank(place_.node(), i);
    const Extent& extent = extents[static_cast<std::size_t>(rank)];
    pointers.data[i] = regions_.arena().memory(extent.segment).peer(rank) + extent.offset;
  }
  return pointers;
}

void CudaLayer::rail_send(const RailSendParams& params) {
  calls_.check(fabric_->rail_send(params, blocks(), calls_.stream()), "rail_send");
}

void CudaLayer::quiet() {
  if (place_.nodes() > 1) calls_.check(fabric_->quiet(view_, calls_.stream()), "quiet");
}

void CudaLayer::end() {
  calls_.end();
  if (!calls_.capturing()) handshake_->throw_deferred();
}

void CudaLayer::barrier(bool node_only, Stream stream) {
  begin("expert_parallel::barrier", stream);
  BarrierParams params;
  params.view = view_;
  params.node_only = node_only;
  calls_.check(fabric_->barrier(params, calls_.stream()), "barrier");
  end();
}

}  // namespace winnow::expert_parallel
