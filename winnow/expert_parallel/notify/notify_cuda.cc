// notify on a GPU, host side. Only in builds with CUDA.
#include "winnow/expert_parallel/notify/notify_cuda.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "winnow/core/device_memory.h"
#include "winnow/core/rows.h"
#include "winnow/expert_parallel/cuda/calls.h"
#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/memory/cuda_memory.h"
#include "winnow/expert_parallel/memory/layouts.h"
#include "winnow/expert_parallel/notify/notify_impl.h"
#include "winnow/expert_parallel/routing/topology_cuda.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {
namespace {

class CudaNotifier : public NotifierBackend {
 public:
  CudaNotifier(std::shared_ptr<Transport> transport, const NotifierConfig& config,
               const Deadline& deadline);

  void notify(const NotifyArgs& args) override;

 private:
  void throw_report(const NotifyReportView& report) const;
  void throw_deferred();
  void call(const NotifyArgs& args);
  void enqueue(const NotifyArgs& args, const Header& statement, bool waits);
  void wait_report();

  std::shared_ptr<Transport> transport_;
  std::shared_ptr<SymmetricMemory> control_;
  std::shared_ptr<std::byte> private_;  // of this rank alone, on the GPU
  NotifyView view_;
  NotifyReportView host_report_, host_deferred_;
  CudaCalls calls_;  // the last member: all of the above goes when the last call has ended
};

// ---- Creation and end.

CudaNotifier::CudaNotifier(std::shared_ptr<Transport> transport, const NotifierConfig& config,
                           const Deadline& deadline)
    : NotifierBackend(Backend::cuda, config, *transport),
      transport_(std::move(transport)),
      calls_(transport_, view_.layer, config_.device, kNotifierOperation,
             {{kNotifyCountsPhase, kNotifyOperation, "the counts"},
              {Phase::memory, kNotifyOperation, "memory"}}) {
  const DeviceGuard guard(config_.device);
  calls_.check(transport_->fabric()->load(), "loading the kernels");
  calls_.check(load_notify_kernels(), "loading the kernels");
  const std::int64_t world = topology_.world_size, locals = topology_.local_world_size;
  const std::int64_t nodes = topology_.nodes(), experts = experts_per_rank();

  LayerView& layer = view_.layer;
  layer.topology = topology_of({topology_, config_.experts, 1}, rank_);
  layer.timeout_ns = static_cast<std::uint64_t>(config_.timeout.count());

  layer.control_layout =
      exchange_layout(topology_, std::int64_t(sizeof(Header)) + CountRow::bytes(layer.topology));

  std::byte** pointers = nullptr;
  const auto lay_out = [&](Tables tables) {
    tables.add(layer.state, 1);
    tables.add(pointers, locals);
    tables.add(view_.sums, world + nodes);
    tables.add(view_.results, nodes + world + experts);
    tables.add(view_.row, CountRow::bytes(layer.topology));
    return static_cast<std::size_t>(tables.bytes());
  };
  private_ = allocate_cuda_memory(config_.device, lay_out(Tables()));
  lay_out(Tables(private_.get()));
  calls_.make_reports<NotifyReportView>({&host_report_, &host_deferred_},
                                        {&view_.report, &view_.deferred}, layer,
                                        [&](Tables& add, NotifyReportView& report) {
                                          add.add(report.report, 1);
                                          add.add(report.totals, 2 + experts_per_rank());
                                          add.add(report.statements, world);
                                        });

  control_ = transport_->allocate_cuda(config_.device,
                                       static_cast<std::size_t>(layer.control_layout.bytes),
                                       deadline, "the counts of notify");
  const std::vector<std::byte*> node =
      node_pointers(*control_, topology_, rank_, kNotifierOperation);
  write_cuda_memory(config_.device, pointers, node.data(), node.size() * sizeof(std::byte*));
  layer.control = {control_->local(), pointers, control_->peers()};
  calls_.count_ranks();
}

// ---- A call.

void CudaNotifier::notify(const NotifyArgs& args) {
  calls_.run([&] { call(args); });
}

void CudaNotifier::call(const NotifyArgs& args) {
  forget_totals();
  calls_.begin(kNotifyOperation, args.stream);
  Header statement;
  statement.options.call = Call::notify;
  statement.options.channels = args.channels;
  if (calls_.capturing()) {
    check_args(args);  // the recording ends with what it throws
  } else {
    statement.refuse_what_throws(kNotifyOperation, [&] { check_args(args); });
  }
  const bool waits = args.worst_case_rows == 0 || statement.refusal != 0;
  if (calls_.capturing() && waits) {
    throw Error(ErrorCode::invalid_argument, kNotifyOperation, "worst_case_rows",
                "above 0 while a graph is recorded, since the host cannot wait", "0");
  }
  enqueue(args, statement, waits);
  calls_.end();
  if (waits) wait_report();
  if (calls_.capturing()) return;
  calls_.throw_fault();
  throw_deferred();
}

void CudaNotifier::enqueue(const NotifyArgs& args, const Header& statement, bool waits) {
  const auto data = [](const TensorView& view) { return static_cast<std::int32_t*>(view.data()); };
  const auto counts = [](const ConstTensorView& view) {
    return static_cast<const std::int32_t*>(view.data());
  };
  CountExchangeParams params;
  params.view = view_;
  params.header = statement;
  params.call = calls_.number();
  params.waits = waits;
  TokenParams tokens;
  tokens.view = view_;
  const bool sound = statement.refusal == 0;
  if (sound) {
    params.per_rank = counts(args.tokens_per_rank);
    params.per_node = counts(args.tokens_per_node);
    params.per_expert = counts(args.tokens_per_expert);
    params.counts = view_.row;
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
    calls_.check(sum_tokens(tokens, calls_.stream()), "the sums of tokens");
  }
  calls_.check(transport_->fabric()->notify(params, calls_.stream()), "the exchange");
  if (tokens.rank_prefix != nullptr || tokens.node_prefix != nullptr) {
    calls_.check(prefix_channels(tokens, calls_.stream()), "the sums of channels");
  }
}

void CudaNotifier::wait_report() {
  calls_.wait_for(host_report_.report->call, calls_.number());
  throw_report(host_report_);
  totals_.recv_tokens = host_report_.totals[0];
  totals_.forward_tokens = host_report_.totals[1];
  std::copy_n(host_report_.totals + 2, totals_.recv_pairs_per_expert.size(),
              totals_.recv_pairs_per_expert.begin());
}

// ---- What goes wrong.

void CudaNotifier::throw_report(const NotifyReportView& report) const {
  if (report.report->refused != 0) {
    std::vector<Header> headers;
    for (int rank = 0; rank < topology_.world_size; ++rank) {
      const CheckedStatement& statement = report.statements[rank];
      headers.push_back(statement.message);
      if (statement.found.fault != CountFault::none) {
        headers.back().refuse(error_of(statement.found));
      }
    }
    throw_refusals(kNotifyOperation, headers);
  }
  if (report.report->too_many == 0) return;
  throw_too_many(report.report->count, report.report->too_many == 1 ? "tokens" : "pairs");
}

void CudaNotifier::throw_deferred() {
  calls_.throw_deferred(host_deferred_.report->call, [&](std::uint64_t) {
    forget_totals();
    throw_report(host_deferred_);
  });
}

}  // namespace

std::unique_ptr<NotifierBackend> make_cuda_notifier(std::shared_ptr<Transport> transport,
                                                    const NotifierConfig& config,
                                                    const Deadline& deadline) {
  return std::make_unique<CudaNotifier>(std::move(transport), config, deadline);
}

}  // namespace winnow::expert_parallel
