// The Notifier of the CPU backend.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "winnow/core/interrupt.h"
#include "winnow/core/read_once.h"
#include "winnow/core/rows.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/notify/notify_impl.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::expert_parallel {
namespace {

// Converts a count to i32, the dtype of all results, or throws.
std::int32_t narrow(std::int64_t count, const char* what) {
  if (count > kMostCounts) throw_too_many(count, what);
  return static_cast<std::int32_t>(count);
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

class CpuNotifier : public NotifierBackend {
 public:
  CpuNotifier(std::shared_ptr<Transport> transport, const NotifierConfig& config,
              const Deadline& deadline)
      : NotifierBackend(Backend::cpu, config, *transport),
        communicator_(std::move(transport), topology_, deadline),
        exchange_(communicator_, {topology_, config.experts, 1}, kMostCounts, 0, deadline),
        from_node_(static_cast<std::size_t>(topology_.nodes())),
        from_rank_(static_cast<std::size_t>(topology_.world_size)),
        pairs_(static_cast<std::size_t>(experts_per_rank())) {}

  void notify(const NotifyArgs& args) override;

 private:
  PairCounts prepare(const NotifyArgs& args);
  void count_channels(const NotifyArgs& args);
  CountFinding check_counts(const PairCounts& counts, std::int64_t channels) const;
  void write_results(const NotifyArgs& args, const WorldCounts& received);

  Communicator communicator_;
  Exchange exchange_;
  std::uint64_t epoch_ = 0;  // of the last exchange
  // Of one call: [W, C], [NN, C]; [NN], [W], [E/W].
  std::vector<std::int32_t> rank_prefix_, node_prefix_;
  std::vector<std::int32_t> from_node_, from_rank_, pairs_;
};

void CpuNotifier::notify(const NotifyArgs& args) {
  forget_totals();
  communicator_.call(kNotifyOperation, [&] {
    Header header;
    PairCounts counts;
    header.options.call = Call::notify;
    header.options.channels = args.channels;
    header.refuse_what_throws(kNotifyOperation, [&] { counts = prepare(args); });
    exchange_.run(++epoch_, kNotifyOperation, "the counts", header,
                  header.refusal == 0 ? &counts : nullptr, {});
    exchange_.throw_refusals(kNotifyOperation);
    write_results(args, exchange_.counts());
  });
}

// Reads this rank's counts once and checks all arguments. Writes no output.
PairCounts CpuNotifier::prepare(const NotifyArgs& args) {
  check_args(args);
  count_channels(args);
  const auto taken = [](const ConstTensorView& view) {
    std::vector<std::int32_t> counts(static_cast<std::size_t>(view.size(0)));
    const auto* from = static_cast<const std::int32_t*>(view.data());
    for (std::int32_t& count : counts) count = read_once(from++);
    return counts;
  };
  PairCounts counts{taken(args.tokens_per_expert), taken(args.tokens_per_rank),
                    taken(args.tokens_per_node)};
  const CountFinding finding = check_counts(counts, args.channels);
  if (finding.fault != CountFault::none) throw error_of(finding);
  return counts;
}

void CpuNotifier::count_channels(const NotifyArgs& args) {
  const auto ranks = static_cast<std::size_t>(topology_.world_size);
  const auto nodes = static_cast<std::size_t>(topology_.nodes());
  const std::size_t ranks_per_node = ranks / nodes;
  const auto channels = static_cast<std::size_t>(args.channels);
  const std::int64_t n = args.is_token_in_rank.size(0);
  const std::int64_t per_channel = (n + args.channels - 1) / args.channels;
  rank_prefix_.resize(ranks * channels);
  node_prefix_.resize(nodes * channels);
  std::vector<std::int32_t> to_rank(ranks), to_node(nodes);
  const auto in_rank = rows_of<const std::uint8_t*>(args.is_token_in_rank, 0);
  std::int64_t token = 0;
  Interrupts interrupts;
  for (std::size_t channel = 0; channel < channels; ++channel) {
    const std::int64_t end = std::min(token + per_channel, n);
    for (; token < end; ++token) {
      interrupts.step();
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

// Returns the first error in the counts.
CountFinding CpuNotifier::check_counts(const PairCounts& counts, std::int64_t channels) const {
  // The last channel of a prefix matrix is the total that the counts must equal.
  const auto differing = [&](CountFault fault, const std::vector<std::int32_t>& got,
                             const std::vector<std::int32_t>& prefix) -> CountFinding {
    for (std::size_t i = 0; i < got.size(); ++i) {
      const std::int32_t wanted = prefix[(i + 1) * static_cast<std::size_t>(channels) - 1];
      if (got[i] != wanted) return {fault, static_cast<std::int32_t>(i), wanted, got[i]};
    }
    return {};
  };
  CountFinding found = differing(CountFault::tokens_of_rank, counts.tokens, rank_prefix_);
  if (found.fault != CountFault::none) return found;
  found = differing(CountFault::tokens_of_node, counts.nodes, node_prefix_);
  if (found.fault != CountFault::none) return found;
  const int per_rank = experts_per_rank();
  for (int rank = 0; rank < topology_.world_size; ++rank) {
    std::int64_t pairs = 0;
    for (int expert = rank * per_rank; expert < (rank + 1) * per_rank; ++expert) {
      const std::int32_t count = counts.pairs[static_cast<std::size_t>(expert)];
      if (count < 0) return {CountFault::negative, expert, 0, count};
      pairs += count;
    }
    const std::int64_t tokens = counts.tokens[static_cast<std::size_t>(rank)];
    if (pairs < tokens || pairs > kMaxTopk * tokens) {
      return {CountFault::pairs, rank, tokens, pairs};
    }
  }
  return {};
}

void CpuNotifier::write_results(const NotifyArgs& args, const WorldCounts& received) {
  const int node = topology_.node(rank_), local = topology_.local(rank_);
  std::int64_t sum = 0;
  for (std::size_t from = 0; from < from_node_.size(); ++from) {
    const auto rail_source =
        static_cast<std::size_t>(topology_.rank(static_cast<int>(from), local));
    from_node_[from] = narrow(sum += received.nodes[rail_source][node], "tokens");
  }
  sum = 0;
  for (std::size_t from = 0; from < from_rank_.size(); ++from) {
    from_rank_[from] = narrow(sum += received.tokens[from][rank_], "tokens");
  }
  const std::size_t first = static_cast<std::size_t>(rank_) * pairs_.size();
  for (std::size_t x = 0; x < pairs_.size(); ++x) {
    sum = 0;
    for (const std::int32_t* pairs : received.pairs) sum += pairs[first + x];
    const std::int64_t segments = (sum + args.expert_alignment - 1) / args.expert_alignment;
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
  totals_.recv_tokens = from_rank_.back();
  totals_.forward_tokens = from_node_.back();
  std::copy(pairs_.begin(), pairs_.end(), totals_.recv_pairs_per_expert.begin());
}

}  // namespace

std::unique_ptr<NotifierBackend> make_cpu_notifier(std::shared_ptr<Transport> transport,
                                                   const NotifierConfig& config,
                                                   const Deadline& deadline) {
  return std::make_unique<CpuNotifier>(std::move(transport), config, deadline);
}

}  // namespace winnow::expert_parallel
