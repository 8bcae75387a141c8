#include "winnow/expert_parallel/notify/notify.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "winnow/core/check.h"
#include "winnow/core/error.h"
#include "winnow/core/rows.h"
#include "winnow/expert_parallel/deadline.h"
#include "winnow/expert_parallel/layout/layout_impl.h"
#include "winnow/expert_parallel/notify/count_exchange.h"
#include "winnow/expert_parallel/sizes.h"
#include "winnow/expert_parallel/transport/agreement.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {
namespace {

constexpr const char* kConstructor = "expert_parallel::Notifier";
constexpr const char* kOperation = "expert_parallel::notify";
constexpr std::int64_t kMostInt32 = std::numeric_limits<std::int32_t>::max();

// A count below 2^31, as all results are.
std::int32_t narrow(std::int64_t count, const char* what) {
  if (count <= kMostInt32) return static_cast<std::int32_t>(count);
  throw Error(ErrorCode::invalid_argument, kOperation,
              std::to_string(count) + " " + what + " for this rank are more than 2^31 - 1");
}

void write(const TensorView& view, std::span<const std::int32_t> values) {
  if (!view.present()) return;
  std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(view.data()));
}

// [rows, C]
void write_matrix(const TensorView& view, const std::vector<std::int32_t>& values) {
  if (!view.present()) return;
  const std::int64_t channels = view.size(1);
  for (std::int64_t row = 0; row < view.size(0); ++row) {
    std::copy_n(values.data() + row * channels, channels, &view.at<std::int32_t>(row, 0));
  }
}

}  // namespace

class Notifier::Impl {
 public:
  Impl(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
       const NotifierConfig& wanted);
  void notify(const NotifyArgs& args);

  NotifierConfig config;
  NotifyTotals totals;
  std::shared_ptr<Communicator> communicator;

 private:
  const Topology& topology() const { return communicator->topology(); }
  void forget_totals();
  void prepare(const NotifyArgs& args);
  void check_tensors(const Check& check, const NotifyArgs& args) const;
  void check_queues(const Check& check, const NotifyArgs& args) const;
  void count_channels(const NotifyArgs& args);
  void check_counts(const Check& check, const NotifyArgs& args) const;
  void refuse(ErrorCode code, std::string_view reason);
  void throw_refusal(const CountsIn& in) const;
  void write_results(const NotifyArgs& args, const CountsIn& in);

  std::optional<CountExchange> exchange_;
  // Of one call: [W, C], [NN, C]; [NN], [W], [E/W].
  std::vector<std::int32_t> rank_prefix_, node_prefix_;
  std::vector<std::int32_t> from_node_, from_rank_, pairs_;
};

Notifier::Impl::Impl(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
                     const NotifierConfig& wanted)
    : config(wanted) {
  const Check check(kConstructor);
  check.that(transport != nullptr, "transport", "a transport", "none");
  check.that(store != nullptr, "store", "a store", "none");
  const Deadline deadline(config.timeout);
  config.timeout = deadline.timeout();
  const int ranks = transport->world_size();
  if (config.local_world_size == 0) config.local_world_size = ranks;
  // First, so that a rank with other sizes is named by all and none waits for it.
  agree(*transport, *store, kConstructor,
        {{"experts", std::to_string(config.experts)},
         {"local_world_size", std::to_string(config.local_world_size)}},
        deadline);
  const std::string of_ranks = "of world_size " + std::to_string(ranks);
  check.that(config.experts >= 1 && config.experts % ranks == 0, "experts",
             "a multiple " + of_ranks, std::to_string(config.experts));
  check.that(config.local_world_size >= 1 && ranks % config.local_world_size == 0,
             "local_world_size", "a divisor " + of_ranks, std::to_string(config.local_world_size));
  communicator = std::make_shared<Communicator>(std::move(transport),
                                                Topology(ranks, config.local_world_size), deadline);
  try {
    exchange_.emplace(communicator, config.experts, kOperation, deadline);
    from_node_.resize(static_cast<std::size_t>(topology().nodes()));
    from_rank_.resize(static_cast<std::size_t>(ranks));
    pairs_.resize(static_cast<std::size_t>(config.experts / ranks));
    totals.recv_pairs_per_expert.assign(pairs_.size(), -1);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::resource, kConstructor, "memory for the counts could not be had");
  }
}

void Notifier::Impl::notify(const NotifyArgs& args) {
  const Deadline deadline(config.timeout);
  forget_totals();
  communicator->check();
  // Whatever is wrong here, the other ranks wait for this one: they hear of it instead.
  CountsOut& out = exchange_->out();
  out.statement = {};
  out.statement.channels = args.channels;
  try {
    prepare(args);
  } catch (const Error& error) {
    refuse(error.code(),
           std::string_view(error.what()).substr(error.operation().size() + std::strlen(": ")));
  } catch (const std::bad_alloc&) {
    refuse(ErrorCode::resource, "memory for the channels could not be had");
  } catch (const std::length_error&) {
    refuse(ErrorCode::resource, "memory for the channels could not be had");
  }
  const CountsIn& in = exchange_->run(deadline);
  throw_refusal(in);
  write_results(args, in);
}

void Notifier::Impl::forget_totals() {
  totals.recv_tokens = totals.forward_tokens = -1;
  std::fill(totals.recv_pairs_per_expert.begin(), totals.recv_pairs_per_expert.end(), -1);
}

// Checks everything and takes down this rank's counts. Writes no output.
void Notifier::Impl::prepare(const NotifyArgs& args) {
  const Check check(kOperation);
  check.that(args.channels >= 1 && args.channels <= kMostInt32, "channels", "at least 1",
             std::to_string(args.channels));
  check.that(args.expert_alignment >= 1 && args.expert_alignment <= kMostInt32, "expert_alignment",
             "at least 1", std::to_string(args.expert_alignment));
  check.that(args.worst_case_rows >= 0, "worst_case_rows", "at least 0",
             std::to_string(args.worst_case_rows));
  check_tensors(check, args);
  check_queues(check, args);
  count_channels(args);
  check_counts(check, args);
  CountsOut& out = exchange_->out();
  const auto take = [](const ConstTensorView& view, std::vector<std::int64_t>& counts) {
    std::copy_n(static_cast<const std::int32_t*>(view.data()), counts.size(), counts.begin());
  };
  take(args.tokens_per_rank, out.per_rank);
  take(args.tokens_per_node, out.per_node);
  take(args.tokens_per_expert, out.per_expert);
}

void Notifier::Impl::check_tensors(const Check& check, const NotifyArgs& args) const {
  const Device cpu;
  const Dim ranks{"W", topology().world_size}, nodes{"W/L", topology().nodes()};
  const Dim experts{"E", config.experts}, own_experts{"E/W", config.experts / ranks.size};
  const Dim channels{"C", args.channels}, one{"1", 1};
  check.input("tokens_per_rank", args.tokens_per_rank, {ranks}, {DType::i32}, cpu);
  check.input("tokens_per_node", args.tokens_per_node, {nodes}, {DType::i32}, cpu);
  check.input("tokens_per_expert", args.tokens_per_expert, {experts}, {DType::i32}, cpu);
  check.rank("is_token_in_rank", args.is_token_in_rank, 2, "[n, W]");
  const Dim n{"n", args.is_token_in_rank.size(0)};
  check.input("is_token_in_rank", args.is_token_in_rank, {n, ranks}, {DType::u8}, cpu);
  check.that(n.size <= kMostInt32, "is_token_in_rank", "fewer than 2^31 tokens",
             std::to_string(n.size));

  const auto output = [&](std::string_view name, const TensorView& view,
                          std::initializer_list<Dim> dims) {
    if (view.present()) check.output(name, view, dims, {DType::i32}, cpu);
  };
  output("node_channel_prefix_matrix", args.node_channel_prefix_matrix, {nodes, channels});
  output("rank_channel_prefix_matrix", args.rank_channel_prefix_matrix, {ranks, channels});
  output("recv_node_prefix_sum", args.recv_node_prefix_sum, {nodes});
  output("recv_rank_prefix_sum", args.recv_rank_prefix_sum, {ranks});
  output("num_recv_tokens", args.num_recv_tokens, {one});
  output("num_forward_tokens", args.num_forward_tokens, {one});
  output("recv_pairs_per_expert", args.recv_pairs_per_expert, {own_experts});
}

void Notifier::Impl::check_queues(const Check& check, const NotifyArgs& args) const {
  const QueueBuffers& queues = args.queues;
  if (queues.bytes_per_token == 0) return;
  QueueShape shape{.bytes_per_token = queues.bytes_per_token,
                   .recv_tokens = queues.local_recv_tokens,
                   .nodes = topology().nodes(),
                   .local_world_size = topology().local_world_size,
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

void Notifier::Impl::count_channels(const NotifyArgs& args) {
  const auto ranks = static_cast<std::size_t>(topology().world_size);
  const auto nodes = static_cast<std::size_t>(topology().nodes());
  const std::size_t ranks_per_node = ranks / nodes;
  const auto channels = static_cast<std::size_t>(args.channels);
  const std::int64_t n = args.is_token_in_rank.size(0);
  const std::int64_t per_channel = (n + args.channels - 1) / args.channels;
  rank_prefix_.resize(ranks * channels);
  node_prefix_.resize(nodes * channels);
  std::vector<std::int32_t> to_rank(ranks), to_node(nodes);
  const auto in_rank = rows_of<const std::uint8_t*>(args.is_token_in_rank, 0);
  std::int64_t token = 0;
  for (std::size_t channel = 0; channel < channels; ++channel) {
    const std::int64_t end = std::min(token + per_channel, n);
    for (; token < end; ++token) {
      const std::uint8_t* row = in_rank.data + in_rank.offset(token);
      for (std::size_t rank = 0; rank < ranks; ++rank) to_rank[rank] += row[rank] != 0;
      for (std::size_t node = 0; node < nodes; ++node, row += ranks_per_node) {
        to_node[node] += std::any_of(row, row + ranks_per_node, [](auto is) { return is != 0; });
      }
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      rank_prefix_[rank * channels + channel] = to_rank[rank];
    }
    for (std::size_t node = 0; node < nodes; ++node) {
      node_prefix_[node * channels + channel] = to_node[node];
    }
  }
}

void Notifier::Impl::check_counts(const Check& check, const NotifyArgs& args) const {
  // The last channel of a prefix matrix holds what the counts must be.
  const auto same = [&](std::string_view name, std::string_view of, const ConstTensorView& counts,
                        const std::vector<std::int32_t>& prefix) {
    for (std::int64_t i = 0; i < counts.size(0); ++i) {
      const std::int32_t wanted = prefix[static_cast<std::size_t>((i + 1) * args.channels - 1)];
      const std::int32_t got = counts.at<std::int32_t>(i);
      if (got == wanted) continue;
      check.that(false, name,
                 std::to_string(wanted) + " for " + std::string(of) + std::to_string(i) +
                     " as in is_token_in_rank",
                 std::to_string(got));
    }
  };
  same("tokens_per_rank", "rank ", args.tokens_per_rank, rank_prefix_);
  same("tokens_per_node", "node ", args.tokens_per_node, node_prefix_);
  const std::int64_t per_rank = config.experts / topology().world_size;
  for (std::int64_t rank = 0; rank < topology().world_size; ++rank) {
    std::int64_t pairs = 0;
    for (std::int64_t expert = rank * per_rank; expert < (rank + 1) * per_rank; ++expert) {
      const std::int32_t count = args.tokens_per_expert.at<std::int32_t>(expert);
      if (count < 0) {
        check.that(false, "tokens_per_expert", "counts of at least 0",
                   std::to_string(count) + " for expert " + std::to_string(expert));
      }
      pairs += count;
    }
    const std::int64_t tokens = args.tokens_per_rank.at<std::int32_t>(rank);
    if (pairs >= tokens && pairs <= kMaxTopk * tokens) continue;
    check.that(false, "tokens_per_expert",
               std::to_string(tokens) + " to " + std::to_string(kMaxTopk * tokens) + " for the " +
                   std::to_string(tokens) + " tokens of rank " + std::to_string(rank),
               std::to_string(pairs));
  }
}

void Notifier::Impl::refuse(ErrorCode code, std::string_view reason) {
  CountsOut& out = exchange_->out();
  out.statement.refusal = 1 + static_cast<std::int64_t>(code);
  const std::size_t length = std::min(reason.size(), sizeof(out.statement.text) - 1);
  std::copy_n(reason.data(), length, out.statement.text);
  for (auto* counts : {&out.per_rank, &out.per_node, &out.per_expert}) {
    std::fill(counts->begin(), counts->end(), 0);
  }
}

// All ranks have the same statements and come to the same verdict.
void Notifier::Impl::throw_refusal(const CountsIn& in) const {
  for (std::size_t rank = 0; rank < in.statements.size(); ++rank) {
    const Statement& statement = in.statements[rank];
    if (statement.refusal == 0) continue;
    throw Error(static_cast<ErrorCode>(statement.refusal - 1), kOperation,
                "rank " + std::to_string(rank) + ": " + statement.text);
  }
  const std::int64_t channels = in.statements[0].channels;
  for (std::size_t rank = 1; rank < in.statements.size(); ++rank) {
    if (in.statements[rank].channels == channels) continue;
    throw Error(ErrorCode::invalid_argument, kOperation,
                "channels differs: " + std::to_string(channels) + " on rank 0, " +
                    std::to_string(in.statements[rank].channels) + " on rank " +
                    std::to_string(rank));
  }
}

void Notifier::Impl::write_results(const NotifyArgs& args, const CountsIn& in) {
  const auto add_up = [](const std::vector<std::int64_t>& counts, std::vector<std::int32_t>& sums) {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) sums[i] = narrow(sum += counts[i], "tokens");
  };
  add_up(in.from_node, from_node_);
  add_up(in.from_rank, from_rank_);
  for (std::size_t x = 0; x < pairs_.size(); ++x) {
    const std::int64_t segments = (in.pairs[x] + args.expert_alignment - 1) / args.expert_alignment;
    pairs_[x] = narrow(segments * args.expert_alignment, "pairs");
  }
  write_matrix(args.node_channel_prefix_matrix, node_prefix_);
  write_matrix(args.rank_channel_prefix_matrix, rank_prefix_);
  write(args.recv_node_prefix_sum, from_node_);
  write(args.recv_rank_prefix_sum, from_rank_);
  write(args.num_recv_tokens, std::span(from_rank_).last(1));
  write(args.num_forward_tokens, std::span(from_node_).last(1));
  write(args.recv_pairs_per_expert, pairs_);
  if (args.worst_case_rows > 0) return;
  totals.recv_tokens = from_rank_.back();
  totals.forward_tokens = from_node_.back();
  std::copy(pairs_.begin(), pairs_.end(), totals.recv_pairs_per_expert.begin());
}

Notifier::Notifier(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
                   const NotifierConfig& config)
    : impl_(std::make_unique<Impl>(std::move(transport), std::move(store), config)) {}
Notifier::~Notifier() = default;

void Notifier::notify(const NotifyArgs& args) { impl_->notify(args); }
const NotifyTotals& Notifier::totals() const { return impl_->totals; }
const NotifierConfig& Notifier::config() const { return impl_->config; }
const Topology& Notifier::topology() const { return impl_->communicator->topology(); }
int Notifier::rank() const { return impl_->communicator->rank(); }

}  // namespace winnow::expert_parallel
