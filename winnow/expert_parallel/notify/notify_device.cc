// notify on a GPU, host side. Only in builds with CUDA.
#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/rows.h"
#include "winnow/expert_parallel/device/fault_report.h"
#include "winnow/expert_parallel/device/gpu_memory.h"
#include "winnow/expert_parallel/device/layouts.h"
#include "winnow/expert_parallel/device/report_wait.h"
#include "winnow/expert_parallel/device/wire.h"
#include "winnow/expert_parallel/notify/notify_cuda.h"
#include "winnow/expert_parallel/notify/notify_impl.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {
namespace {

template <class T>
T* at(std::byte* memory, std::int64_t offset) {
  return reinterpret_cast<T*>(memory + offset);
}

class DeviceNotifier : public NotifierBackend {
 public:
  DeviceNotifier(std::shared_ptr<Transport> transport, const NotifierConfig& config,
                 const Deadline& deadline);
  ~DeviceNotifier() override;

  void notify(const NotifyArgs& args) override;

 private:
  void check_device() const;
  void make_reports();
  void check(int cuda_error, const char* what);
  void throw_fault();
  void throw_report(const NotifyReportView& report) const;
  void throw_deferred();
  void begin(Stream stream);
  void enqueue(const NotifyArgs& args, const Statement& statement, bool waits);
  void wait_report();

  std::shared_ptr<Transport> transport_;
  std::shared_ptr<SymmetricMemory> control_;
  std::shared_ptr<std::byte> private_;  // of this rank alone, on the GPU
  PinnedPage page_;
  NotifyView view_;
  NotifyReportView host_report_, host_deferred_;
  FaultReport* host_fault_ = nullptr;
  bool shares_gpu_ = false;

  std::uint64_t calls_ = 0;
  cudaStream_t stream_ = nullptr;
  bool capturing_ = false;
  cudaEvent_t last_ = nullptr;  // the end of the last call that was not recorded
  cudaStream_t last_stream_ = nullptr;
  bool any_call_ = false;
  std::optional<FaultRecord> fault_;
  std::string broken_;  // why a call could not be queued
};

// ---- Creation and end.

DeviceNotifier::DeviceNotifier(std::shared_ptr<Transport> transport, const NotifierConfig& config,
                               const Deadline& deadline)
    : NotifierBackend(config, *transport), transport_(std::move(transport)) {
  check_device();
  const DeviceGuard guard(config_.device);
  check(transport_->wire()->load(), "loading the kernels");
  check(load_notify_kernels(), "loading the kernels");
  const std::int64_t world = topology_.world_size, locals = topology_.local_world_size;
  const std::int64_t nodes = topology_.nodes(), experts = experts_per_rank();

  LayerView& layer = view_.layer;
  layer.topology = topology_of({topology_, config_.experts, 1}, rank_);
  layer.timeout_ns = static_cast<std::uint64_t>(config_.timeout.count());

  constexpr std::int64_t kWord = NotifyLayout::kWord;
  constexpr int kStatement = NotifyLayout::kStatementWords;
  NotifyLayout& layout = view_.layout;
  // Even numbers of words: puts like multiples of 16 bytes.
  const auto even = [](std::int64_t words) { return static_cast<int>((words + 1) / 2 * 2); };
  layout.node_message_words = even(kStatement + locals + locals * experts + 1);
  layout.local_message_words = even(nodes * (kStatement + 1) + experts);
  Parts shared;
  layer.control_layout.fault = shared.add(kWord);
  layer.control_layout.notices = shared.add(locals * std::int64_t(sizeof(FaultNotice)));
  layout.node_signals = shared.add(2 * nodes * kWord);
  layout.local_signals = shared.add(2 * locals * kWord);
  layout.node_messages = shared.add(2 * nodes * layout.node_message_words * kWord);
  layout.local_messages = shared.add(2 * locals * layout.local_message_words * kWord);
  layout.outbox = shared.add(nodes > 1 ? 2 * nodes * layout.node_message_words * kWord : 0);

  Parts own;
  const std::int64_t state = own.add(sizeof(DeviceState));
  const std::int64_t pointers = own.add(locals * std::int64_t(sizeof(std::byte*)));
  const std::int64_t sums = own.add((world + nodes) * std::int64_t(sizeof(std::int32_t)));
  const std::int64_t results = own.add((nodes + world + experts) * kWord);
  private_ = allocate_on_gpu(config_.device, static_cast<std::size_t>(own.end()));
  layer.state = at<DeviceState>(private_.get(), state);
  view_.sums = at<std::int32_t>(private_.get(), sums);
  view_.results = at<std::int64_t>(private_.get(), results);
  make_reports();

  control_ = transport_->allocate_device(config_.device, static_cast<std::size_t>(shared.end()),
                                         deadline, "the counts of notify");
  std::vector<std::byte*> node;  // pointers are asked for inside the node only
  for (int local = 0; local < topology_.local_world_size; ++local) {
    node.push_back(control_->peer(topology_.rank(layer.topology.node, local)));
  }
  write_to_gpu(config_.device, private_.get() + pointers, node.data(),
               node.size() * sizeof(std::byte*));
  layer.control = {control_->local(), at<std::byte* const>(private_.get(), pointers),
                   control_->wire()};
  const int ranks = transport_->ranks_on_gpu();
  if (ranks > kMostRanksOnGpu) {
    throw Error(ErrorCode::unsupported, kNotifierOperation, "device",
                "at most " + std::to_string(kMostRanksOnGpu) + " ranks on a GPU",
                std::to_string(ranks) + " on " + to_string(config_.device));
  }
  shares_gpu_ = ranks > 1;
  check(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "an event");
}

DeviceNotifier::~DeviceNotifier() {
  if (any_call_) {
    try {
      free_after(last_);
    } catch (const Error&) {  // the GPU is lost, and its memory with it
    }
  }
  page_.retire(any_call_ ? std::exchange(last_, nullptr) : nullptr);
  if (last_ != nullptr) cudaEventDestroy(last_);
}

void DeviceNotifier::check_device() const {
  const auto unsupported = [&](const std::string& why) {
    throw Error(ErrorCode::unsupported, kNotifierOperation,
                to_string(config_.device) + " cannot be used: " + why);
  };
  const Gpu* found = nullptr;
  for (const Gpu& gpu : gpus().gpus) {
    if (gpu.index == config_.device.index) found = &gpu;
  }
  if (found == nullptr) {
    unsupported(gpus().gpus.empty()
                    ? gpus().reason
                    : "the machine has " + std::to_string(gpus().gpus.size()) + " GPUs");
  }
  if (found->compute_major < 9) {
    unsupported("notify needs compute capability 9.0, " + found->name + " has " +
                std::to_string(found->compute_major) + "." + std::to_string(found->compute_minor));
  }
  if (transport_->wire() == nullptr) {
    unsupported("the transport " + transport_->name() + " serves no GPUs");
  }
}

void DeviceNotifier::make_reports() {
  const std::int64_t world = topology_.world_size;
  const std::int64_t totals = (2 + experts_per_rank()) * std::int64_t(sizeof(std::int32_t));
  const std::int64_t statements = world * std::int64_t(sizeof(CheckedStatement));
  Parts parts;
  const std::int64_t fault = parts.add(sizeof(FaultReport));
  struct Offsets {
    std::int64_t report, totals, statements;
  };
  const auto lay_out = [&] {
    return Offsets{parts.add(sizeof(NotifyReport)), parts.add(totals), parts.add(statements)};
  };
  const Offsets report = lay_out(), deferred = lay_out();
  page_ = PinnedPage(static_cast<std::size_t>(parts.end()));
  const auto view = [](std::byte* page, const Offsets& offsets) {
    return NotifyReportView{at<NotifyReport>(page, offsets.report),
                            at<std::int32_t>(page, offsets.totals),
                            at<CheckedStatement>(page, offsets.statements)};
  };
  host_report_ = view(page_.host(), report);
  host_deferred_ = view(page_.host(), deferred);
  host_fault_ = at<FaultReport>(page_.host(), fault);
  view_.report = view(page_.device(), report);
  view_.deferred = view(page_.device(), deferred);
  view_.layer.fault = at<FaultReport>(page_.device(), fault);
}

// ---- A call.

void DeviceNotifier::notify(const NotifyArgs& args) {
  const DeviceGuard guard(config_.device);
  forget_totals();
  begin(args.stream);
  // Whatever is wrong here, the other ranks wait for this one: they hear of it instead.
  Statement statement = {};
  statement.channels = args.channels;
  try {
    check_args(args);
  } catch (const Error& error) {
    if (capturing_) throw;  // the recording ends with it
    refuse(statement, error);
  } catch (const std::bad_alloc&) {
    if (capturing_) throw;
    refuse_for_memory(statement);
  }
  const bool waits = args.worst_case_rows == 0 || statement.refusal != 0;
  if (capturing_ && waits) {
    throw Error(ErrorCode::invalid_argument, kNotifyOperation, "worst_case_rows",
                "above 0 while a graph is recorded, since the host cannot wait", "0");
  }
  enqueue(args, statement, waits);
  if (waits) wait_report();
  if (capturing_) return;
  throw_fault();
  throw_deferred();
}

void DeviceNotifier::begin(Stream stream) {
  stream_ = static_cast<cudaStream_t>(stream.handle);
  throw_fault();
  if (!broken_.empty()) throw Error(ErrorCode::internal, kNotifyOperation, broken_);
  if (shares_gpu_ && stream_ == nullptr) {
    throw Error(ErrorCode::invalid_argument, kNotifyOperation, "stream",
                "one of this rank's own, since other ranks share " + to_string(config_.device),
                "the default stream");
  }
  capturing_ = in_capture(config_.device, stream);
  if (!capturing_ && any_call_ && stream_ != last_stream_) {
    check(cudaStreamWaitEvent(stream_, last_), "the order of streams");
  }
  ++calls_;
}

void DeviceNotifier::enqueue(const NotifyArgs& args, const Statement& statement, bool waits) {
  const auto data = [](const TensorView& view) { return static_cast<std::int32_t*>(view.data()); };
  const auto counts = [](const ConstTensorView& view) {
    return static_cast<const std::int32_t*>(view.data());
  };
  NotifyParams params;
  params.view = view_;
  params.statement = statement;
  params.ticket = calls_;
  params.waits = waits;
  TokenParams tokens;
  tokens.view = view_;
  const bool sound = statement.refusal == 0;
  if (sound) {
    params.per_rank = counts(args.tokens_per_rank);
    params.per_node = counts(args.tokens_per_node);
    params.per_expert = counts(args.tokens_per_expert);
    params.alignment = args.expert_alignment;
    params.recv_node_prefix = data(args.recv_node_prefix_sum);
    params.recv_rank_prefix = data(args.recv_rank_prefix_sum);
    params.num_recv = data(args.num_recv_tokens);
    params.num_forward = data(args.num_forward_tokens);
    params.pairs = data(args.recv_pairs_per_expert);
    tokens.in_rank = static_cast<const std::uint8_t*>(args.is_token_in_rank.data());
    tokens.stride = args.is_token_in_rank.stride(0);
    tokens.tokens = args.is_token_in_rank.size(0);
    tokens.channels = args.channels;
    const auto rank_prefix = rows_of<std::int32_t*>(args.rank_channel_prefix_matrix, 0);
    const auto node_prefix = rows_of<std::int32_t*>(args.node_channel_prefix_matrix, 0);
    tokens.rank_prefix = rank_prefix.data;
    tokens.rank_stride = rank_prefix.stride0;
    tokens.node_prefix = node_prefix.data;
    tokens.node_stride = node_prefix.stride0;
    check(sum_tokens(tokens, stream_), "the sums of tokens");
  }
  check(transport_->wire()->notify(params, stream_), "the exchange");
  if (tokens.rank_prefix != nullptr || tokens.node_prefix != nullptr) {
    check(prefix_channels(tokens, stream_), "the sums of channels");
  }
  if (capturing_) return;
  check(cudaEventRecord(last_, stream_), "the end of the call");
  last_stream_ = stream_;
  any_call_ = true;
}

void DeviceNotifier::wait_report() {
  wait_for_report(
      host_report_.report->ticket, calls_, stream_, [this] { throw_fault(); },
      [this](int error, const char* what) { check(error, what); });
  throw_report(host_report_);
  totals_.recv_tokens = host_report_.totals[0];
  totals_.forward_tokens = host_report_.totals[1];
  std::copy_n(host_report_.totals + 2, totals_.recv_pairs_per_expert.size(),
              totals_.recv_pairs_per_expert.begin());
}

// ---- What goes wrong.

void DeviceNotifier::check(int cuda_error, const char* what) {
  if (cuda_error == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(cuda_error);
  broken_ = "rank " + std::to_string(rank_) + ": " + what + ": " + cudaGetErrorString(error);
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::resource : ErrorCode::internal,
              calls_ == 0 ? kNotifierOperation : kNotifyOperation, broken_);
}

void DeviceNotifier::throw_fault() {
  if (!fault_) {
    if (std::atomic_ref(host_fault_->state).load(std::memory_order_acquire) == 0) return;
    fault_ = fault_record(*host_fault_, *transport_);
    fault_->operation = kNotifyOperation;
  }
  expert_parallel::throw_fault(*fault_, rank_);
}

void DeviceNotifier::throw_report(const NotifyReportView& report) const {
  if (report.report->refused != 0) {
    std::vector<Statement> statements;
    for (int rank = 0; rank < topology_.world_size; ++rank) {
      const CheckedStatement& statement = report.statements[rank];
      statements.push_back(statement.said);
      if (statement.found.fault == CountFault::none) continue;
      refuse(statements.back(), error_of(statement.found));
    }
    throw_refusal(topology_.world_size, [&](int rank) -> const Statement& {
      return statements[static_cast<std::size_t>(rank)];
    });
  }
  if (report.report->too_many == 0) return;
  throw_too_many(report.report->count, report.report->too_many == 1 ? "tokens" : "pairs");
}

void DeviceNotifier::throw_deferred() {
  const std::uint64_t ticket = load_acquire(&host_deferred_.report->ticket);
  if (ticket == 0 || ticket == calls_) return;  // none, or this call's own: the next one tells it
  forget_totals();
  try {
    throw_report(host_deferred_);
  } catch (...) {
    store_release(&host_deferred_.report->ticket, 0);
    throw;
  }
}

}  // namespace

std::unique_ptr<NotifierBackend> make_device_notifier(std::shared_ptr<Transport> transport,
                                                      const NotifierConfig& config,
                                                      const Deadline& deadline) {
  return std::make_unique<DeviceNotifier>(std::move(transport), config, deadline);
}

}  // namespace winnow::expert_parallel
