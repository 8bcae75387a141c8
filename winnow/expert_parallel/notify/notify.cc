#include "winnow/expert_parallel/notify/notify.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/layer/backend.h"
#include "winnow/expert_parallel/notify/notify_impl.h"
#include "winnow/expert_parallel/queue_buffers/queue_buffers.h"
#include "winnow/expert_parallel/transport/deadline.h"
#include "winnow/expert_parallel/transport/fault.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

NotifierBackend::NotifierBackend(Backend backend, const NotifierConfig& config,
                                 const Transport& transport)
    : CollectiveBackend(backend),
      config_(config),
      topology_(transport.world_size(), config.local_world_size),
      rank_(transport.rank()) {
  totals_.recv_pairs_per_expert.assign(static_cast<std::size_t>(experts_per_rank()), -1);
}

void NotifierBackend::forget_totals() {
  totals_.recv_tokens = totals_.forward_tokens = -1;
  std::fill(totals_.recv_pairs_per_expert.begin(), totals_.recv_pairs_per_expert.end(), -1);
}

void NotifierBackend::check_args(const NotifyArgs& args) const {
  if (args.refusal != nullptr) throw *args.refusal;
  const Check check(kNotifyOperation);
  for (const auto& [name, value] : {std::pair("channels", args.channels),
                                    std::pair("expert_alignment", args.expert_alignment)}) {
    check.that(value >= 1, name, "at least 1", std::to_string(value));
    check.that(value <= kMostCounts, name, "at most 2^31 - 1", std::to_string(value));
  }
  check.that(args.worst_case_rows >= 0, "worst_case_rows", "at least 0",
             std::to_string(args.worst_case_rows));
  check_tensors(check, args);
  check_queues(check, args);
}

void NotifierBackend::check_tensors(const Check& check, const NotifyArgs& args) const {
  const Device device = config_.device;
  const Dim ranks{"W", topology_.world_size}, nodes{"W/L", topology_.nodes()};
  const Dim experts{"E", config_.experts}, own_experts{"E/W", config_.experts / ranks.size};
  const Dim channels{"C", args.channels}, one{"1", 1};
  check.input("tokens_per_rank", args.tokens_per_rank, {ranks}, {DType::i32}, device);
  check.input("tokens_per_node", args.tokens_per_node, {nodes}, {DType::i32}, device);
  check.input("tokens_per_expert", args.tokens_per_expert, {experts}, {DType::i32}, device);
  check.rank("is_token_in_rank", args.is_token_in_rank, 2, "[n, W]");
  const Dim n{"n", args.is_token_in_rank.size(0)};
  check.input("is_token_in_rank", args.is_token_in_rank, {n, ranks}, {DType::u8}, device);
  check.that(n.size <= kMostCounts, "is_token_in_rank", "fewer than 2^31 tokens",
             std::to_string(n.size));

  const auto output = [&](std::string_view name, const TensorView& view,
                          std::initializer_list<Dim> dims) {
    if (view.present()) check.output(name, view, dims, {DType::i32}, device);
  };
  output("node_channel_prefix_matrix", args.node_channel_prefix_matrix, {nodes, channels});
  output("rank_channel_prefix_matrix", args.rank_channel_prefix_matrix, {ranks, channels});
  output("recv_node_prefix_sum", args.recv_node_prefix_sum, {nodes});
  output("recv_rank_prefix_sum", args.recv_rank_prefix_sum, {ranks});
  output("num_recv_tokens", args.num_recv_tokens, {one});
  output("num_forward_tokens", args.num_forward_tokens, {one});
  output("recv_pairs_per_expert", args.recv_pairs_per_expert, {own_experts});
  check.apart({{"node_channel_prefix_matrix", args.node_channel_prefix_matrix},
               {"rank_channel_prefix_matrix", args.rank_channel_prefix_matrix},
               {"recv_node_prefix_sum", args.recv_node_prefix_sum},
               {"recv_rank_prefix_sum", args.recv_rank_prefix_sum},
               {"num_recv_tokens", args.num_recv_tokens},
               {"num_forward_tokens", args.num_forward_tokens},
               {"recv_pairs_per_expert", args.recv_pairs_per_expert}},
              {{"tokens_per_rank", args.tokens_per_rank},
               {"tokens_per_node", args.tokens_per_node},
               {"tokens_per_expert", args.tokens_per_expert},
               {"is_token_in_rank", args.is_token_in_rank}});
}

void NotifierBackend::check_queues(const Check& check, const NotifyArgs& args) const {
  const QueueBuffers& queues = args.queues;
  if (queues.bytes_per_token == 0) return;
  QueueShape shape{.bytes_per_token = queues.bytes_per_token,
                   .recv_tokens = queues.local_recv_tokens,
                   .nodes = topology_.nodes(),
                   .local_world_size = topology_.local_world_size,
                   .channels = args.channels};
  const auto holds = [&](std::string_view name, std::int64_t given, std::int64_t needed) {
    check.that(given >= needed, name, "at least " + std::to_string(needed) + " bytes",
               std::to_string(given));
  };
  holds("local_buffer_bytes", queues.local_buffer_bytes, local_buffer_layout(shape).bytes);
  if (shape.nodes == 1) return;
  shape.recv_tokens = queues.node_recv_tokens;
  holds("node_buffer_bytes", queues.node_buffer_bytes, node_buffer_layout(shape).bytes);
}

// ---- Refusals.

void throw_too_many(std::int64_t count, const char* what) {
  throw Error(ErrorCode::invalid_argument, kNotifyOperation,
              std::to_string(count) + " " + what + " for this rank are more than 2^31 - 1");
}

Error error_of(const CountFinding& finding) {
  const auto error = [](const char* argument, const std::string& wanted, const std::string& got) {
    return Error(ErrorCode::invalid_argument, kNotifyOperation, argument, wanted, got);
  };
  const std::string index = std::to_string(finding.index), got = std::to_string(finding.got);
  const std::string wanted = std::to_string(finding.wanted);
  switch (finding.fault) {
    case CountFault::tokens_of_rank:
      return error("tokens_per_rank", wanted + " for rank " + index + " as in is_token_in_rank",
                   got);
    case CountFault::tokens_of_node:
      return error("tokens_per_node", wanted + " for node " + index + " as in is_token_in_rank",
                   got);
    case CountFault::negative:
      return error("tokens_per_expert", "counts of at least 0", got + " for expert " + index);
    case CountFault::pairs:
      return error("tokens_per_expert",
                   wanted + " to " + std::to_string(kMaxTopk * finding.wanted) + " for the " +
                       wanted + " tokens of rank " + index,
                   got);
    case CountFault::none:
      break;
  }
  return Error(ErrorCode::internal, kNotifyOperation, "no finding");
}

// ---- The entry points.

namespace {

std::unique_ptr<NotifierBackend> make_backend(std::shared_ptr<Transport> transport,
                                              const std::shared_ptr<Store>& store,
                                              NotifierConfig config) {
  const Check check(kNotifierOperation);
  check.that(transport != nullptr, "transport", "a transport", "none");
  check.that(store != nullptr, "store", "a store", "none");
  const Deadline deadline(config.timeout);
  config.timeout = deadline.timeout();
  const int ranks = transport->world_size();
  if (config.local_world_size == 0) config.local_world_size = ranks;
  const Fields fields = {
      {"experts", std::to_string(config.experts)},
      {"local_world_size", std::to_string(config.local_world_size)},
      {"device", config.device.type == DeviceType::cuda ? "cuda" : "cpu"},
      {"backend", std::string(config.backend ? to_string(*config.backend) : "any")}};
  const auto check_config = [&] {
    const std::string of_ranks = "of world_size " + std::to_string(ranks);
    check.that(config.experts >= 1 && config.experts % ranks == 0, "experts",
               "a multiple " + of_ranks, std::to_string(config.experts));
    check.that(config.local_world_size >= 1 && ranks % config.local_world_size == 0,
               "local_world_size", "a divisor " + of_ranks,
               std::to_string(config.local_world_size));
    return choose_layer_backend(kNotifierOperation, config.device, config.backend);
  };
  // All ranks compare the fields before each checks its own, so that they refuse the same.
  return make_collective({kNotifierOperation, *transport, *store, deadline}, fields, check_config,
                         [&](Backend backend) {
                           if constexpr (kBuiltWithCuda) {
                             if (backend == Backend::cuda) {
                               return make_cuda_notifier(transport, config, deadline);
                             }
                           }
                           return make_cpu_notifier(transport, config, deadline);
                         });
}

}  // namespace

Notifier::Notifier(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
                   const NotifierConfig& config)
    : backend_(make_backend(std::move(transport), store, config)) {}
Notifier::~Notifier() = default;

Backend Notifier::notify(const NotifyArgs& args) {
  using A = NotifyArgs;
  constexpr Members<&A::tokens_per_rank, &A::tokens_per_node, &A::tokens_per_expert,
                    &A::is_token_in_rank, &A::channels, &A::expert_alignment, &A::worst_case_rows,
                    &A::node_channel_prefix_matrix, &A::rank_channel_prefix_matrix,
                    &A::recv_node_prefix_sum, &A::recv_rank_prefix_sum, &A::num_recv_tokens,
                    &A::num_forward_tokens, &A::recv_pairs_per_expert, &A::queues, &A::stream,
                    &A::refusal>
      members;
  logged(members, kNotifyOperation, rank(), args, backend(), [&] { backend_->notify(args); });
  return backend();
}
Backend Notifier::backend() const { return backend_->backend(); }
const NotifyTotals& Notifier::totals() const { return backend_->totals(); }
const NotifierConfig& Notifier::config() const { return backend_->config(); }
const Topology& Notifier::topology() const { return backend_->topology(); }
int Notifier::rank() const { return backend_->rank(); }

}  // namespace winnow::expert_parallel
