// The low-latency calls on a GPU, host side. Only in builds with CUDA.
#include "winnow/expert_parallel/low_latency/low_latency_cuda.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/cuda/calls.h"
#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/low_latency/low_latency_impl.h"
#include "winnow/expert_parallel/memory/cuda_memory.h"
#include "winnow/expert_parallel/memory/layouts.h"
#include "winnow/expert_parallel/routing/topology_cuda.h"
#include "winnow/expert_parallel/transport/communicator.h"

namespace winnow::expert_parallel {
namespace {

std::vector<PhaseText> phase_texts() {
  std::vector<PhaseText> texts;
  for (const int call : {kLowLatencyDispatch, kLowLatencyCombine}) {
    texts.push_back({rows_phase(call), kLowLatencyNames[call], "the rows"});
    texts.push_back({places_phase(call), kLowLatencyNames[call], "the places of an earlier call"});
  }
  return texts;
}

ExpertIndices indices_of(const ConstTensorView& view) {
  if (!view.present()) return {};
  return {view.data(), view.stride(0), view.size(0), static_cast<int>(view.size(1)),
          view.dtype() == DType::i64};
}

// Rows that warps move in vectors of 16 bytes.
void check_vectors(const Check& check, std::string_view name, const ConstTensorView& rows) {
  const std::int64_t size = size_of(rows.dtype());
  const bool fits = reinterpret_cast<std::uintptr_t>(rows.data()) % 16 == 0 &&
                    rows.stride(0) * size % 16 == 0 && rows.stride(1) * size % 16 == 0;
  check.that(rows.numel() == 0 || fits, name, "rows at multiples of 16 bytes on a GPU", "others");
}

class CudaLowLatency : public LowLatencyBackend {
 public:
  CudaLowLatency(std::shared_ptr<Transport> transport, const LowLatencyConfig& config);

  LowLatencySent dispatch(const LowLatencyDispatchArgs& args) override;
  LowLatencySent combine(const LowLatencyCombineArgs& args) override;
  std::vector<std::int32_t> mask() const override;
  void set_mask(int rank, bool masked) override;
  std::int64_t bytes() const override { return view_.layout.bytes; }

 private:
  template <class Params>
  void receive(LowLatencyCall call, Params params, const PendingCall& pending);
  template <class Args, class CheckArgs>
  LowLatencySent run(LowLatencyCall call, const Args& args, const CheckArgs& check_args);
  void throw_deferred();
  std::string text_of(int rank, const LowLatencyNote& note) const;
  LowLatencyDispatchParams params_of(const LowLatencyDispatchArgs& args) const;
  LowLatencyCombineParams params_of(const LowLatencyCombineArgs& args) const;

  LowLatencyConfig config_;
  std::shared_ptr<Transport> transport_;
  int world_, rank_, blocks_ = 1;
  std::shared_ptr<SymmetricMemory> control_, memory_;
  std::shared_ptr<std::byte> private_;
  LowLatencyView view_;
  LowLatencyReportView host_deferred_, host_unused_;
  // Its epochs are the host's, which knows none of what a graph repeats: kernels count their own,
  // and receive how far behind the oldest call one is.
  PendingCalls pending_[kLowLatencyCalls];
  CudaCalls calls_;  // the last member: all of the above goes when the last call has ended
};

CudaLowLatency::CudaLowLatency(std::shared_ptr<Transport> transport, const LowLatencyConfig& config)
    : LowLatencyBackend(Backend::cuda),
      config_(config),
      transport_(std::move(transport)),
      world_(transport_->world_size()),
      rank_(transport_->rank()),
      calls_(transport_, view_.layer, config.device, kLowLatency, phase_texts()) {
  const auto unsupported = [](const std::string& text) {
    throw Error(ErrorCode::unsupported, kLowLatency, text);
  };
  if (world_ > kMaxLocals) {
    unsupported("a GPU's low-latency calls serve " + std::to_string(kMaxLocals) + " ranks");
  }
  const DeviceGuard guard(config_.device);
  view_.layout = low_latency_layout(config_, world_);
  if (config_.experts > kLowLatencyMostExperts) {
    unsupported("a GPU's low-latency calls serve at most " +
                std::to_string(kLowLatencyMostExperts) + " experts");
  }
  if (config_.max_tokens > std::numeric_limits<std::int32_t>::max() / world_ / config_.topk) {
    unsupported("a GPU's low-latency calls serve at most 2^31 - 1 pairs of all ranks");
  }
  calls_.check(transport_->fabric()->load(), "loading the kernels");
  calls_.check(load_low_latency_dispatch(), "loading the kernels");
  calls_.check(load_low_latency_combine(), "loading the kernels");
  const Topology topology(world_, world_);
  LayerView& layer = view_.layer;
  layer.topology = topology_of({topology, config_.experts, config_.topk}, rank_);
  layer.timeout_ns = static_cast<std::uint64_t>(config_.timeout.count());
  layer.control_layout = exchange_layout(topology, 16);
  view_.shrinks = config_.enable_shrink;
  std::byte **control = nullptr, **peers = nullptr;
  const auto lay_out = [&](Tables tables) {
    tables.add(layer.state, 1);
    tables.add(view_.state, 1);
    tables.add(control, world_);
    tables.add(peers, world_);
    tables.add(view_.slots, config_.experts);
    tables.add(view_.mask, world_);
    tables.add(view_.verdicts, kLowLatencyCalls * 2 * world_);
    return static_cast<std::size_t>(tables.bytes());
  };
  private_ = allocate_cuda_memory(config_.device, lay_out(Tables()));
  lay_out(Tables(private_.get()));
  view_.peers = peers;
  LowLatencyReportView device_unused;
  calls_.make_reports<LowLatencyReportView>({&host_deferred_, &host_unused_},
                                            {&view_.deferred, &device_unused}, layer,
                                            [&](Tables& add, LowLatencyReportView& report) {
                                              add.add(report.report, 1);
                                              add.add(report.notes, world_);
                                            });
  const Deadline deadline(config_.timeout);
  const auto allocate = [&](std::int64_t bytes, std::byte** pointers, std::string_view what) {
    auto memory =
        transport_->allocate_cuda(config_.device, static_cast<std::size_t>(bytes), deadline, what);
    const std::vector<std::byte*> node = node_pointers(*memory, topology, rank_, kLowLatency);
    write_cuda_memory(config_.device, pointers, node.data(), node.size() * sizeof(std::byte*));
    return memory;
  };
  memory_ = allocate(view_.layout.bytes, peers, "the rows' places");
  control_ = allocate(layer.control_layout.bytes, control, "the control memory");
  layer.control = {control_->local(), control, control_->peers()};
  const int ranks = calls_.count_ranks();
  int sms = 0;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, config_.device.index);
  blocks_ = std::clamp(sms / ranks, 1, LowLatencyLayout::kMostBlocks);
  if (config_.sm_count > 0) blocks_ = std::min(blocks_, config_.sm_count);
}

// ---- A call.

template <class Params>
void CudaLowLatency::receive(LowLatencyCall call, Params params, const PendingCall& pending) {
  PendingCalls& calls = pending_[call];
  const std::uint64_t before = calls.consumed();
  params.place_in_line = static_cast<int>(pending.epoch - before) - 1;
  calls.end(pending);
  params.consumed = static_cast<int>(calls.consumed() - before);
  calls_.check(launch_low_latency_receive(params, blocks_, calls_.stream()), "receiving the rows");
}

template <class Args, class CheckArgs>
LowLatencySent CudaLowLatency::run(LowLatencyCall call, const Args& args,
                                   const CheckArgs& check_args) {
  return calls_.run([&] {
    calls_.begin(kLowLatencyNames[call], args.stream);
    const Check check(kLowLatencyNames[call]);
    PendingCall pending;
    if (sends(args.part)) {
      pending_[call].check_send(check);
    } else {
      pending = pending_[call].find(check, args.sent);
    }
    std::optional<Error> refusal;
    try {
      check_args(check);
    } catch (const Error& error) {
      refusal = error;
    }
    // Of a half alone, and while a graph is recorded, the other ranks receive nothing.
    if (refusal && (calls_.capturing() || !sends(args.part))) {
      calls_.end();
      throw *refusal;
    }
    auto params = params_of(refusal ? Args{} : args);
    params.call = calls_.number();
    if (sends(args.part)) {
      if (refusal) params.note = note_of(&*refusal, 0, 0);
      calls_.check(launch_low_latency_send(params, blocks_, calls_.stream()), "sending the rows");
      pending = pending_[call].send(params.note);
      params.behind_send = true;
    }
    // What comes of a call that this rank refuses is dropped, and this rank has been told.
    if (refusal) receive(call, params_of(Args{}), pending);
    if (receives(args.part) && !refusal) receive(call, params, pending);
    calls_.end();
    if (refusal) throw *refusal;
    // Whoever sends gets the number without which nobody could receive the call, so the half that
    // receives throws what an earlier call has found. It is enqueued first: the other ranks, which
    // learn of that in other calls, take part in this one. What has broken all calls the next one
    // throws before it enqueues anything.
    if (!receives(args.part)) return pending.sent;
    if (!calls_.capturing()) throw_deferred();
    return LowLatencySent::none;
  });
}

LowLatencySent CudaLowLatency::dispatch(const LowLatencyDispatchArgs& args) {
  return run(kLowLatencyDispatch, args, [&](const Check& check) {
    check_dispatch(check, config_, world_, args);
    if (receives(args.part)) check_vectors(check, "output", args.output);
  });
}

LowLatencySent CudaLowLatency::combine(const LowLatencyCombineArgs& args) {
  return run(kLowLatencyCombine, args, [&](const Check& check) {
    check_combine(check, config_, world_, pending_[kLowLatencyDispatch], args);
    if (sends(args.part)) check_vectors(check, "expert_output", args.expert_output);
  });
}

// Of arguments that may still be refused: nothing is read but the views themselves.
LowLatencyDispatchParams CudaLowLatency::params_of(const LowLatencyDispatchArgs& args) const {
  const auto stride = [](const auto& view, int dim) {
    return view.present() && view.rank() > dim ? view.stride(dim) : 0;
  };
  LowLatencyDispatchParams params;
  params.view = view_;
  params.note.format = static_cast<std::int32_t>(args.format);
  params.hidden = config_.hidden;
  params.input = static_cast<const std::byte*>(args.input.data());
  params.input_stride = stride(args.input, 0) * 2;
  if (args.expert_indices.present() && args.expert_indices.rank() == 2) {
    params.indices = indices_of(args.expert_indices);
  }
  params.note.tokens = static_cast<std::int32_t>(params.indices.tokens);
  if (!receives(args.part) || !args.output.present()) return params;
  const std::int64_t element = size_of(args.output.dtype());
  params.output = static_cast<std::byte*>(args.output.data());
  params.expert_stride = stride(args.output, 0) * element;
  params.row_stride = stride(args.output, 1) * element;
  params.scales = static_cast<std::byte*>(args.scales.data());
  for (int dim = 0; dim < 3; ++dim) params.scale_strides[dim] = stride(args.scales, dim);
  if (args.scales.present() && args.scales.rank() == 3) params.scale_words = args.scales.size(2);
  const auto words = [](const TensorView& view) { return static_cast<std::int32_t*>(view.data()); };
  params.counts = words(args.counts);
  params.source_tokens = words(args.source_tokens);
  params.source_pairs = words(args.source_pairs);
  params.tokens_stride = stride(args.source_tokens, 0);
  params.pairs_stride = stride(args.source_pairs, 0);
  params.pair_rows = words(args.pair_rows);
  for (int dim = 0; dim < 2; ++dim) params.pair_rows_strides[dim] = stride(args.pair_rows, dim);
  params.ranges = static_cast<std::int64_t*>(args.ranges.data());
  params.ranges_stride = stride(args.ranges, 0);
  params.expert_statistics = words(args.expert_statistics);
  params.wait_statistics = static_cast<std::int64_t*>(args.wait_statistics.data());
  return params;
}

LowLatencyCombineParams CudaLowLatency::params_of(const LowLatencyCombineArgs& args) const {
  const auto stride = [](const auto& view, int dim) {
    return view.present() && view.rank() > dim ? view.stride(dim) : 0;
  };
  LowLatencyCombineParams params;
  params.view = view_;
  params.hidden = config_.hidden;
  params.expert_output = static_cast<const std::byte*>(args.expert_output.data());
  params.expert_stride = stride(args.expert_output, 0) * 2;
  params.row_stride = stride(args.expert_output, 1) * 2;
  params.pair_rows = static_cast<const std::int32_t*>(args.pair_rows.data());
  for (int dim = 0; dim < 2; ++dim) params.pair_rows_strides[dim] = stride(args.pair_rows, dim);
  if (args.expert_indices.present() && args.expert_indices.rank() == 2) {
    params.indices = indices_of(args.expert_indices);
    params.weights = static_cast<const float*>(args.weights.data());
    params.weights_stride = stride(args.weights, 0);
  }
  // A call that also receives cannot end before the ranks that are late have begun, and their
  // weights come then: it is patient. Rows sent without their sums in vain would make this rank the
  // first again in the next call. The limit is for calls of several objects that ranks make in
  // different orders, and where ranks share a GPU, on which their blocks may not all fit.
  const bool patient = receives(args.part) && !calls_.shares_gpu();
  params.patience_ns = patient ? 100'000 : 10'000;
  if (!receives(args.part) || !args.out.present()) return params;
  params.out = static_cast<std::byte*>(args.out.data());
  params.out_stride = stride(args.out, 0) * 2;
  params.wait_statistics = static_cast<std::int64_t*>(args.wait_statistics.data());
  return params;
}

// ---- What goes wrong.

std::string CudaLowLatency::text_of(int rank, const LowLatencyNote& note) const {
  const std::string by = "rank " + std::to_string(rank) + ": ", value = std::to_string(note.value);
  const std::string token = " for token " + std::to_string(note.token);
  switch (note.found) {
    case LowLatencyNote::kNoExpert:
      return by + "expert_indices: want -1 to " + std::to_string(config_.experts) + ", got " +
             value + token;
    case LowLatencyNote::kExpertTwice:
      return by + "expert_indices: want each expert at most once for a token, got " + value +
             " again" + token;
    case LowLatencyNote::kNoRow:
      return by + "pair_rows: want the rows that dispatch() gave, got " + value;
    default:
      return by + untrusted_text(note.text);
  }
}

void CudaLowLatency::throw_deferred() {
  calls_.throw_deferred(host_deferred_.report->call, [&](std::uint64_t) {
    const char* const name = kLowLatencyNames[host_deferred_.report->kind];
    for (int rank = 0; rank < world_; ++rank) {
      const LowLatencyNote& note = host_deferred_.notes[rank];
      if (note.refusal == 0) continue;
      throw error_from_message(code_of(note.refusal), name, text_of(rank, note));
    }
    throw Error(ErrorCode::invalid_argument, name, "format differs between ranks",
                {.differing = "format", .reason = ErrorReason::arguments_differ});
  });
}

std::vector<std::int32_t> CudaLowLatency::mask() const {
  std::vector<std::int32_t> mask(static_cast<std::size_t>(world_));
  const DeviceGuard guard(config_.device);
  calls_.wait_for_last();
  CudaStream stream(config_.device);
  stream.copy(mask.data(), view_.mask, mask.size() * sizeof(std::int32_t));
  stream.wait();
  return mask;
}

void CudaLowLatency::set_mask(int rank, bool masked) {
  const DeviceGuard guard(config_.device);
  calls_.wait_for_last();
  const std::int32_t value = masked;
  write_cuda_memory(config_.device, view_.mask + rank, &value, sizeof(value));
}

}  // namespace

std::unique_ptr<LowLatencyBackend> make_low_latency_cuda(std::shared_ptr<Transport> transport,
                                                         const LowLatencyConfig& config) {
  return std::make_unique<CudaLowLatency>(std::move(transport), config);
}

}  // namespace winnow::expert_parallel
