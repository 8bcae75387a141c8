#include <algorithm>
#include <array>
#include <cstring>

#include "winnow/expert_parallel/exchange/exchange.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::size_t kLine = 64;  // bytes of a cache line

std::size_t round_up(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

std::string given_or_absent(std::int64_t value) { return value != 0 ? "given" : "absent"; }
std::string number(std::int64_t value) { return std::to_string(value); }
std::string true_or_false(std::int64_t value) { return value != 0 ? "true" : "false"; }
std::string order_name(std::int64_t value) {
  return value == std::int64_t(RowOrder::token_major) ? "token_major" : "expert_major";
}
std::string dtype_name(std::int64_t value) {
  return std::string(to_string(static_cast<DType>(value)));
}
std::string region_digest(std::int64_t value) { return value == 0 ? "none" : number(value); }
std::string values_name(std::int64_t value) {
  return value == 2 ? "given without expert_output" : given_or_absent(value);
}
std::string dispatch_number(std::int64_t value) { return "of call " + std::to_string(value); }

struct Option {
  std::string_view name;
  std::int64_t Options::* value;
  std::string (*print)(std::int64_t);
};
constexpr std::array kOptions = {
    Option{"order", &Options::order, order_name},
    Option{"expert_alignment", &Options::expert_alignment, number},
    Option{"worst_case_rows", &Options::worst_case_rows, number},
    Option{"dtype of input", &Options::input, dtype_name},
    Option{"weights", &Options::weights, given_or_absent},
    Option{"scatter_indices", &Options::scatter_indices, given_or_absent},
    Option{"out or copy_out", &Options::copy_out, true_or_false},
    Option{"weighted", &Options::weighted, true_or_false},
    Option{"cached", &Options::cached, dispatch_number},
    Option{"descriptor", &Options::descriptor, dispatch_number},
    Option{"channels", &Options::channels, number},
    Option{"bytes of a row of scales", &Options::scale_bytes, number},
    Option{"pair_values", &Options::pair_values, values_name},
    Option{"add_values", &Options::add_values, true_or_false},
    Option{"pair_columns", &Options::pair_columns, number},
    Option{"sm_count", &Options::sm_count, number},
    Option{"the digest of the regions in the arena", &Options::regions, region_digest},
};

std::string call_name(Call call) {
  switch (call) {
    case Call::dispatch:
      return "dispatch";
    case Call::cached_dispatch:
      return "cached dispatch";
    case Call::scatter_rows:
    case Call::scatter_check:
      return "dispatch with scatter_indices";
    case Call::combine:
      return "combine";
    case Call::notify:
      return "notify";
  }
  return "unknown";
}

std::size_t bytes_of(const Header& header) {  // including the counts behind it
  return sizeof(Header) + header.counts * sizeof(std::int32_t);
}

// The last word of `name` is the argument: "dtype of input".
[[noreturn]] void fail_differing(std::string_view operation, std::string_view name,
                                 const std::string& first, const std::string& other, int rank) {
  throw Error(ErrorCode::invalid_argument, std::string(operation),
              std::string(name) + " differs: " + first + " on rank 0, " + other + " on rank " +
                  std::to_string(rank),
              {.differing = std::string(name.substr(name.rfind(' ') + 1)),
               .reason = ErrorReason::arguments_differ});
}

}  // namespace

void Header::refuse(const Error& error) {
  const std::string message = message_of(error);
  refusal = refusal_of(error.code());
  std::memset(text, 0, kTextBytes);
  std::memcpy(text, message.data(), std::min(message.size(), kTextBytes - 1));
}

std::string Header::message(int rank) const {
  return "rank " + std::to_string(subject < 0 ? rank : subject) + ": " + untrusted_text(text);
}

void check_bounds(const Header& header, const Sender& by, const HeaderBounds& bounds) {
  check_bounds(header.refusal, by, "a refusal", 0, kMostRefusal);
  check_bounds(header.subject, by, "the rank at fault", -1, bounds.world - 1);
  check_bounds(header.counts, by, "counts", 0, bounds.counts);
  check_bounds(header.tokens, by, "tokens", 0, bounds.tokens);
}

Exchange::Exchange(Communicator& communicator, const ExpertMap& map, std::int64_t max_tokens,
                   std::int64_t table_bytes, const Deadline& deadline)
    : communicator_(communicator),
      map_(map),
      max_tokens_(max_tokens),
      timeout_(deadline.timeout()) {
  const auto world = static_cast<std::size_t>(map.topology.world_size);
  const auto nodes = static_cast<std::size_t>(map.topology.nodes());
  row_bytes_ =
      round_up(sizeof(Header) + static_cast<std::size_t>(bounds().counts) * sizeof(std::int32_t));
  table_bytes_ = nodes > 1 ? round_up(static_cast<std::size_t>(table_bytes)) : 0;
  signal_bytes_ = round_up((world + nodes) * sizeof(std::uint64_t));
  const std::size_t rail = nodes > 1 ? nodes * (row_bytes_ + table_bytes_) : 0;
  memory_ = communicator.allocate(signal_bytes_ + 2 * (world * row_bytes_ + rail), deadline,
                                  "the mailboxes");
  message_.resize(row_bytes_ + table_bytes_);
  received_.resize(world * row_bytes_);
}

HeaderBounds Exchange::bounds() const {
  const Topology& topology = map_.topology;
  return {topology.world_size, max_tokens_, map_.experts + topology.world_size + topology.nodes()};
}

std::size_t Exchange::received_signal(int rank) const {
  return static_cast<std::size_t>(rank) * sizeof(std::uint64_t);
}
std::size_t Exchange::rail_signal(int node) const {
  return received_signal(map_.topology.world_size + node);
}
std::size_t Exchange::received_offset(int rank) const {
  const auto world = static_cast<std::size_t>(map_.topology.world_size);
  return signal_bytes_ + (epoch_ % 2 * world + static_cast<std::size_t>(rank)) * row_bytes_;
}
std::size_t Exchange::rail_offset(int node) const {
  const auto world = static_cast<std::size_t>(map_.topology.world_size);
  const auto nodes = static_cast<std::size_t>(map_.topology.nodes());
  return signal_bytes_ + 2 * world * row_bytes_ +
         (epoch_ % 2 * nodes + static_cast<std::size_t>(node)) * (row_bytes_ + table_bytes_);
}

void Exchange::run(std::uint64_t epoch, std::string_view operation, std::string_view phase,
                   Header header, const PairCounts* counts, std::span<const std::byte> table) {
  epoch_ = epoch;
  operation_ = operation;
  phase_ = phase;
  const Deadline deadline(timeout_);
  const WaitName name{operation, phase, -1};
  communicator_.check();
  post(header, counts, table);
  pass_on(deadline, name);
  receive(deadline, name);
}

void Exchange::post(const Header& header, const PairCounts* counts,
                    std::span<const std::byte> table) {
  std::size_t bytes = sizeof(Header);
  const auto append = [&](const void* data, std::size_t size) {
    if (size > 0) std::memcpy(message_.data() + bytes, data, size);
    bytes += size;
  };
  if (counts != nullptr) {
    append(counts->pairs.data(), counts->pairs.size() * sizeof(std::int32_t));
    append(counts->tokens.data(), counts->tokens.size() * sizeof(std::int32_t));
    append(counts->nodes.data(), counts->nodes.size() * sizeof(std::int32_t));
  }
  Header posted = header;
  posted.counts = static_cast<std::uint32_t>((bytes - sizeof(Header)) / sizeof(std::int32_t));
  std::memcpy(message_.data(), &posted, sizeof(Header));

  const int node = communicator_.node(), local = communicator_.local(), rank = communicator_.rank();
  const int nodes = map_.topology.nodes();
  if (nodes > 1 && !table.empty()) {
    bytes = row_bytes_;
    append(table.data(), table.size());
  }
  for (int step = 1; step < nodes; ++step) {  // from the next node, so that targets differ
    const int to = (node + step) % nodes;
    communicator_.put_signal(*memory_, to, local, rail_offset(node), message_.data(), bytes,
                             rail_signal(node), epoch_);
  }
  for (int to = 0; to < map_.topology.local_world_size; ++to) {
    communicator_.put_signal(*memory_, node, to, received_offset(rank), message_.data(),
                             bytes_of(posted), received_signal(rank), epoch_);
  }
}

void Exchange::pass_on(const Deadline& deadline, const WaitName& name) {
  const Topology& topology = map_.topology;
  const int node = communicator_.node();
  std::byte* local = Communicator::local_memory(*memory_);
  for (int step = topology.nodes() - 1; step > 0; --step) {  // in the order in which peers post
    const int from = (node + step) % topology.nodes();
    WaitName waiting = name;
    waiting.peer = topology.rank(from, communicator_.local());
    communicator_.wait_at_least(reinterpret_cast<std::uint64_t*>(local + rail_signal(from)), epoch_,
                                deadline, waiting);
    std::byte* row = local + rail_offset(from);
    const Header header = untrusted_at<Header>(row, 0)->read(sender(waiting.peer), bounds());
    for (int to = 0; to < topology.local_world_size; ++to) {
      communicator_.put_signal(*memory_, node, to, received_offset(waiting.peer), row,
                               bytes_of(header), received_signal(waiting.peer), epoch_);
    }
  }
}

void Exchange::receive(const Deadline& deadline, WaitName name) {
  const Topology& topology = map_.topology;
  const auto wait_for = [&](int rank) {
    name.peer = rank;
    name.writer = topology.rank(communicator_.node(), topology.local(rank));
    communicator_.wait_at_least(reinterpret_cast<std::uint64_t*>(
                                    Communicator::local_memory(*memory_) + received_signal(rank)),
                                epoch_, deadline, name);
  };
  // Waits for this node first. Its ranks forward the messages of other nodes, so that if one of
  // them is missing, the error names it and not a rank whose message it has not forwarded.
  for (int step = 0; step < topology.nodes(); ++step) {
    const int node = (communicator_.node() + step) % topology.nodes();
    for (int local = 0; local < topology.local_world_size; ++local) {
      wait_for(topology.rank(node, local));
    }
  }
  for (int rank = 0; rank < topology.world_size; ++rank) take(rank);
}

// Copies the message of a rank and checks it; its own is copied as posted.
void Exchange::take(int rank) {
  std::byte* const to = received_.data() + static_cast<std::size_t>(rank) * row_bytes_;
  if (rank == communicator_.rank()) {
    std::memcpy(to, message_.data(), row_bytes_);
    return;
  }
  std::byte* const row = Communicator::local_memory(*memory_) + received_offset(rank);
  const Sender by = sender(rank);
  const Header header = untrusted_at<Header>(row, 0)->read(by, bounds());
  std::memcpy(to, &header, sizeof(header));
  const auto* message = untrusted_at<std::int32_t>(row, sizeof(Header));
  auto* counts = reinterpret_cast<std::int32_t*>(to + sizeof(Header));
  const std::int64_t most = std::min<std::int64_t>(INT32_MAX, max_tokens_ * map_.topk);
  for (std::uint32_t i = 0; i < header.counts; ++i)
    counts[i] = message[i].read(by, "a count", 0, most);
}

const Header& Exchange::header(int rank) const {
  return *reinterpret_cast<const Header*>(received_.data() +
                                          static_cast<std::size_t>(rank) * row_bytes_);
}

WorldCounts Exchange::counts() const {
  WorldCounts counts;
  for (int rank = 0; rank < map_.topology.world_size; ++rank) {
    // The counts of nodes are optional.
    check_bounds(header(rank).counts, sender(rank), "counts",
                 bounds().counts - map_.topology.nodes(), bounds().counts);
    const auto* pairs = reinterpret_cast<const std::int32_t*>(&header(rank) + 1);
    counts.pairs.push_back(pairs);
    counts.tokens.push_back(pairs + map_.experts);
    counts.nodes.push_back(pairs + map_.experts + map_.topology.world_size);
  }
  return counts;
}

void Exchange::copy_table(int node, std::size_t offset, void* to, std::size_t bytes) const {
  const int rank = map_.topology.rank(node, communicator_.local());
  check_bounds(offset + bytes, sender(rank), "bytes of a table", 0,
               static_cast<std::int64_t>(table_bytes_));
  if (bytes == 0) return;
  const std::byte* table = Communicator::local_memory(*memory_) + rail_offset(node) + row_bytes_;
  std::memcpy(to, table + offset, bytes);
}

void Exchange::throw_refusals(std::string_view operation) const {
  std::vector<const Header*> received;
  for (int rank = 0; rank < map_.topology.world_size; ++rank) received.push_back(&header(rank));
  expert_parallel::throw_refusals(operation, received);
}

void throw_refusals(std::string_view operation, std::span<const Header* const> received) {
  for (std::size_t rank = 0; rank < received.size(); ++rank) {
    const Header& message = *received[rank];
    if (message.refusal == 0 || message.deferred != 0) continue;
    throw error_from_message(code_of(message.refusal), std::string(operation),
                             message.message(static_cast<int>(rank)));
  }
  const Options& first = received[0]->options;
  for (std::size_t rank = 1; rank < received.size(); ++rank) {
    const Options& other = received[rank]->options;
    if (other.call != first.call) {
      fail_differing(operation, "the call", call_name(first.call), call_name(other.call),
                     int(rank));
    }
    for (const Option& option : kOptions) {
      if (first.*option.value == other.*option.value) continue;
      fail_differing(operation, option.name, option.print(first.*option.value),
                     option.print(other.*option.value), int(rank));
    }
  }
}

void throw_refusals(std::string_view operation, std::span<const Header> received) {
  std::vector<const Header*> pointers;
  for (const Header& header : received) pointers.push_back(&header);
  throw_refusals(operation, pointers);
}

}  // namespace winnow::expert_parallel
