// The low-latency calls on the CPU: every rank writes into the memory of the others.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "winnow/core/interrupt.h"
#include "winnow/cpu/convert.h"
#include "winnow/cpu/kernels.h"
#include "winnow/cpu/quantize_f8.h"
#include "winnow/expert_parallel/combine/combine_row_sum.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/low_latency/low_latency_contents.h"
#include "winnow/expert_parallel/low_latency/low_latency_impl.h"
#include "winnow/expert_parallel/transport/communicator.h"

namespace winnow::expert_parallel {
namespace {

std::size_t size(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

// Of a RowFormat that a rank has sent, which may be none.
std::string name_of_format(std::int32_t format) {
  static constexpr const char* kNames[] = {"bf16", "fp8", "fp8_power_of_two", "fp8_ue8m0"};
  const bool known = format >= 0 && static_cast<std::size_t>(format) < std::size(kNames);
  return known ? kNames[format] : std::to_string(format);
}

// A row as it travels: its elements, and the scales of fp8 behind them.
void write_row(RowFormat format, const BFloat16* from, std::int64_t hidden, std::byte* to) {
  if (format == RowFormat::bf16) {
    std::memcpy(to, from, size(hidden * 2));
    return;
  }
  std::byte* scales = to + hidden;
  float group[kScaleColumns];
  for (std::int64_t c = 0; c < hidden; c += kScaleColumns) {
    load_f32(DType::bf16, from, c, kScaleColumns, group);
    const float scale = quantize_f8(group, kScaleColumns, format != RowFormat::fp8,
                                    reinterpret_cast<std::uint8_t*>(to + c));
    if (format == RowFormat::fp8_ue8m0) {
      *scales++ = static_cast<std::byte>(std::bit_cast<std::uint32_t>(scale) >> 23);
    } else {
      std::memcpy(scales, &scale, sizeof(scale));
      scales += sizeof(scale);
    }
  }
}

class CpuLowLatency : public LowLatencyBackend {
 public:
  CpuLowLatency(std::shared_ptr<Transport> transport, const LowLatencyConfig& config)
      : LowLatencyBackend(Backend::cpu),
        config_(config),
        world_(transport->world_size()),
        layout_(low_latency_layout(config, world_)),
        communicator_(transport, Topology(world_, world_), Deadline(config.timeout)),
        memory_(communicator_.allocate(size(layout_.bytes), Deadline(config.timeout),
                                       "the rows' places")),
        mask_(size(world_)) {
    for (int rank = 0; rank < world_; ++rank) {
      peers_.push_back(communicator_.node_pointer(*memory_, rank));
      if (peers_.back() != nullptr) continue;
      throw Error(ErrorCode::unsupported, kLowLatency,
                  "the memory of rank " + std::to_string(rank) + " is not within reach");
    }
  }

  LowLatencySent dispatch(const LowLatencyDispatchArgs& args) override {
    return run(kLowLatencyDispatch, args);
  }
  LowLatencySent combine(const LowLatencyCombineArgs& args) override {
    return run(kLowLatencyCombine, args);
  }
  std::vector<std::int32_t> mask() const override { return mask_; }
  void set_mask(int rank, bool masked) override { mask_[size(rank)] = masked; }
  std::int64_t bytes() const override { return layout_.bytes; }

 private:
  template <class Args>
  LowLatencySent run(LowLatencyCall call, const Args& args) {
    call_ = call;
    name_ = kLowLatencyNames[call];
    if (args.part != CallPart::both) communicator_.forget_order();
    return communicator_.call(name_, [&] {
      const LowLatencySent sent = sends(args.part) ? send(args) : args.sent;
      if (!receives(args.part)) return sent;
      receive(args, pending().find(Check(name_), sent));
      return LowLatencySent::none;
    });
  }
  PendingCalls& pending() { return pending_[call_]; }
  int rank() const { return communicator_.rank(); }
  std::byte* own() const { return peers_[size(rank())]; }
  static std::uint64_t* word(std::byte* memory, std::int64_t offset) {
    return reinterpret_cast<std::uint64_t*>(memory + offset);
  }
  Untrusted<LowLatencyNote>& note(int at, std::uint64_t epoch, int from) const {
    return *untrusted_at<LowLatencyNote>(peers_[size(at)], layout_.note(call_, epoch, from));
  }
  Sender by(int source, std::string_view phase = "the rows") const {
    return {name_, phase, source};
  }
  template <class Visit>
  void for_each_peer(const Visit& visit) {
    // From the next rank on: no rank is everyone's first.
    for (int step = 1; step <= world_; ++step) {
      const int peer = (rank() + step) % world_;
      if (mask_[size(peer)] == 0) visit(peer);
    }
  }

  // Whether the word of a rank in this one's memory has come so far; else the rank is masked now.
  bool wait(int peer, std::int64_t offset, std::uint64_t epoch, const Deadline& deadline,
            std::string_view phase) {
    const WaitName name{name_, phase, peer};
    if (!config_.enable_shrink) {
      communicator_.wait_at_least(word(own(), offset), epoch, deadline, name);
      return true;
    }
    if (communicator_.comes(word(own(), offset), epoch, deadline, name)) return true;
    mask_[size(peer)] = 1;
    return false;
  }

  // The first half of a call: `check_args` throws what is wrong, `write(epoch)` writes to the
  // others.
  template <class CheckArgs, class Write>
  LowLatencySent send_call(CallPart part, int format, std::int64_t tokens,
                           const CheckArgs& check_args, const Write& write) {
    pending().check_send(Check(name_));  // there are no places to refuse in
    std::optional<Error> refusal;
    try {
      check_args();
    } catch (const Error& error) {
      refusal = error;
    }
    const PendingCall call = pending().send(note_of(refusal ? &*refusal : nullptr, format, tokens));
    const std::uint64_t epoch = call.epoch;
    const Deadline deadline(config_.timeout);
    for_each_peer([&](int peer) {
      if (epoch <= PendingCalls::kMost) return;
      wait(peer, layout_.consumed_word(call_, peer), epoch - PendingCalls::kMost, deadline,
           "the places of an earlier call");
    });
    if (!refusal) write(epoch);
    for_each_peer([&](int peer) {
      note(peer, epoch, rank()).write(call.message);
      store_release(word(peers_[size(peer)], layout_.signal(call_, rank())), epoch);
    });
    if (!refusal || receives(part)) return call.sent;
    end(call);
    throw *refusal;
  }

  // What all ranks have said of a call, of those that are masked nothing.
  struct Received {
    std::vector<std::int32_t> tokens;  // [W]
    std::vector<std::int64_t> waited;  // [W] nanoseconds
  };
  // Waits for all ranks. What any of them refuses, all throw.
  Received receive(const PendingCall& call, int format) {
    Received received{std::vector<std::int32_t>(size(world_)),
                      std::vector<std::int64_t>(size(world_))};
    const Deadline deadline(config_.timeout);
    for_each_peer([&](int peer) {
      const auto start = std::chrono::steady_clock::now();
      wait(peer, layout_.signal(call_, peer), call.epoch, deadline, "the rows");
      const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - start;
      received.waited[size(peer)] = waited.count();
    });
    std::optional<std::string> differs;  // in a call that is refused it may
    for (int peer = 0; peer < world_; ++peer) {
      if (mask_[size(peer)] != 0) continue;
      const LowLatencyNote message =
          peer == rank() ? call.message
                         : note(rank(), call.epoch, peer).read(by(peer), config_.max_tokens);
      if (message.refusal != 0) {
        drop(call);
        throw error_from_message(
            code_of(message.refusal), name_,
            "rank " + std::to_string(peer) + ": " + untrusted_text(message.text));
      }
      received.tokens[size(peer)] = message.tokens;
      if (message.format == format || differs) continue;
      differs = "format differs: " + name_of_format(format) + " on rank " + std::to_string(rank()) +
                ", " + name_of_format(message.format) + " on rank " + std::to_string(peer);
    }
    if (differs) {
      drop(call);
      throw Error(ErrorCode::invalid_argument, name_, *differs,
                  {.differing = "format", .reason = ErrorReason::arguments_differ});
    }
    return received;
  }
  void add_waits(const Received& received, const TensorView& statistics) const {
    if (!statistics.present()) return;
    for (int peer = 0; peer < world_; ++peer) {
      statistics.at<std::int64_t>(peer) += received.waited[size(peer)];
    }
  }
  // This rank has received the call, or will not.
  void end(const PendingCall& call) {
    pending().end(call);
    free_places();
  }
  // Its results are not written.
  void drop(const PendingCall& call) {
    pending().drop(call);
    free_places();
  }
  void free_places() {
    const std::uint64_t epoch = pending().consumed();
    for_each_peer([&](int peer) {
      store_release(word(peers_[size(peer)], layout_.consumed_word(call_, rank())), epoch);
    });
  }

  LowLatencySent send(const LowLatencyDispatchArgs& args);
  void send_rows(const LowLatencyDispatchArgs& args, const std::vector<std::int32_t>& experts,
                 std::uint64_t epoch);
  void receive(const LowLatencyDispatchArgs& args, const PendingCall& call);
  // The rows of a source: how many each local expert gets, and where they begin there, [W, e]; of
  // each of its pairs the row and its expert.
  struct Places {
    std::vector<std::int32_t> counts, begins;  // [W, e]
    std::vector<std::int32_t> pairs;           // [W, M, K]: see LowLatencyLayout::places
  };
  Places receive_places(const PendingCall& call, const std::vector<std::int32_t>& tokens) const;
  void take_rows(const LowLatencyDispatchArgs& args, std::uint64_t epoch, int source,
                 std::int32_t tokens, const Places& places);
  LowLatencySent send(const LowLatencyCombineArgs& args);
  void receive(const LowLatencyCombineArgs& args, const PendingCall& call);

  LowLatencyConfig config_;
  int world_;
  LowLatencyLayout layout_;
  Communicator communicator_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::vector<std::byte*> peers_;   // [W]
  std::vector<std::int32_t> mask_;  // [W]
  PendingCalls pending_[kLowLatencyCalls];
  LowLatencyCall call_ = kLowLatencyDispatch;  // that runs
  const char* name_ = "";
  Interrupts interrupts_;
};

// ---- Dispatch.

LowLatencySent CpuLowLatency::send(const LowLatencyDispatchArgs& args) {
  std::vector<std::int32_t> experts;  // [n, k]
  return send_call(
      args.part, static_cast<int>(args.format), args.input.rank() == 2 ? args.input.size(0) : 0,
      [&] {
        check_dispatch(Check(name_), config_, world_, args);
        experts = read_experts(Check(name_), config_, args.expert_indices);
      },
      [&](std::uint64_t epoch) { send_rows(args, experts, epoch); });
}

void CpuLowLatency::send_rows(const LowLatencyDispatchArgs& args,
                              const std::vector<std::int32_t>& experts, std::uint64_t epoch) {
  const int per_rank = layout_.per_rank;
  std::vector<std::int32_t> counts(size(config_.experts));
  std::vector<std::byte> row(size(layout_.message_bytes));
  // [W, K] of a token.
  const std::size_t topk = size(config_.topk);
  std::vector<std::int32_t> places(size(world_) * topk);
  std::vector<bool> wanted(size(world_));
  const auto* input = static_cast<const BFloat16*>(args.input.data());
  const std::int32_t* next = experts.data();
  for (std::int64_t token = 0; token < args.input.size(0); ++token) {
    interrupts_.look();
    write_row(args.format, input + token * args.input.stride(0), config_.hidden, row.data());
    std::ranges::fill(places, -1);
    wanted.assign(size(world_), false);
    for (std::int64_t k = 0; k < args.expert_indices.size(1); ++k) {
      const std::int32_t expert = *next++;
      if (expert < 0) continue;
      const int home = expert / per_rank;
      places[size(home) * topk + size(k)] =
          layout_.place_of(expert % per_rank, counts[size(expert)]++);
      wanted[size(home)] = true;
    }
    for_each_peer([&](int peer) {
      std::memcpy(peers_[size(peer)] + layout_.place(epoch, rank(), token),
                  places.data() + size(peer) * topk, topk * sizeof(std::int32_t));
      if (!wanted[size(peer)]) return;
      std::memcpy(peers_[size(peer)] + layout_.message(epoch, rank(), token), row.data(),
                  row.size());
    });
  }
  for_each_peer([&](int peer) {
    std::memcpy(peers_[size(peer)] + layout_.count(epoch, rank(), 0),
                counts.data() + peer * per_rank, size(per_rank) * sizeof(std::int32_t));
  });
}

void CpuLowLatency::receive(const LowLatencyDispatchArgs& args, const PendingCall& call) {
  if (args.part == CallPart::receive) check_dispatch(Check(name_), config_, world_, args);
  const Received received = receive(call, static_cast<int>(args.format));
  const Places places = receive_places(call, received.tokens);
  for (int expert = 0; expert < layout_.per_rank; ++expert) {
    std::int32_t rows = 0;
    for (int source = 0; source < world_; ++source) {
      const std::size_t at = size(source * layout_.per_rank + expert);
      const std::int64_t begin = places.begins[at];
      args.ranges.at<std::int64_t>(expert, source) = begin << 32 | places.counts[at];
      rows += places.counts[at];
    }
    args.counts.at<std::int32_t>(expert) = rows;
    if (args.expert_statistics.present()) args.expert_statistics.at<std::int32_t>(expert) += rows;
  }
  for (int source = 0; source < world_; ++source) {
    for (std::int64_t token = 0; token < config_.max_tokens; ++token) {
      for (int k = 0; k < config_.topk; ++k) args.pair_rows.at<std::int32_t>(source, token, k) = -1;
    }
    take_rows(args, call.epoch, source, received.tokens[size(source)], places);
  }
  add_waits(received, args.wait_statistics);
  end(call);
}

// All of them before a row is taken.
CpuLowLatency::Places CpuLowLatency::receive_places(const PendingCall& call,
                                                    const std::vector<std::int32_t>& tokens) const {
  const std::int64_t experts = layout_.per_rank, topk = config_.topk;
  Places places;
  places.counts.resize(size(world_ * experts));
  places.begins.resize(places.counts.size());
  places.pairs.resize(size(world_ * config_.max_tokens * topk));
  std::vector<std::int32_t> rows(size(experts));
  for (int source = 0; source < world_; ++source) {
    const bool masked = mask_[size(source)] != 0;  // there are no tokens then
    const auto* counts = untrusted_at<std::int32_t>(own(), layout_.count(call.epoch, source, 0));
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      const std::size_t at = size(source * experts + expert);
      if (!masked) {
        places.counts[at] =
            counts[expert].read(by(source), "rows of an expert", 0, tokens[size(source)]);
      }
      places.begins[at] = std::exchange(rows[size(expert)], rows[size(expert)] + places.counts[at]);
    }
    for (std::int64_t token = 0; token < tokens[size(source)]; ++token) {
      const auto* message =
          untrusted_at<std::int32_t>(own(), layout_.place(call.epoch, source, token));
      for (std::int64_t k = 0; k < topk; ++k) {
        const std::int32_t place =
            message[k].read(by(source), "the place of a row", -1, experts * config_.max_tokens - 1);
        if (place >= 0) {
          const std::int64_t count =
              places.counts[size(source * experts + layout_.expert_of(place))];
          check_bounds(layout_.before_of(place), by(source), "the place of a row", 0, count - 1);
        }
        places.pairs[size((source * config_.max_tokens + token) * topk + k)] = place;
      }
    }
  }
  return places;
}

// To the output, from row begins[x] of each local expert x on.
void CpuLowLatency::take_rows(const LowLatencyDispatchArgs& args, std::uint64_t epoch, int source,
                              std::int32_t tokens, const Places& places) {
  const std::int64_t element = size_of(args.output.dtype());
  const std::int64_t columns = args.scales.present() ? args.scales.size(2) : 0;
  const std::int32_t* place = places.pairs.data() + source * config_.max_tokens * config_.topk;
  for (std::int32_t token = 0; token < tokens; ++token) {
    interrupts_.look();
    const std::byte* message = own() + layout_.message(epoch, source, token);
    for (int k = 0; k < config_.topk; ++k, ++place) {
      if (*place < 0) continue;
      const int expert = layout_.expert_of(*place);
      const std::int64_t row =
          places.begins[size(source * layout_.per_rank + expert)] + layout_.before_of(*place);
      args.source_pairs.at<std::int32_t>(expert, row) = token * config_.topk + k;
      args.source_tokens.at<std::int32_t>(expert, row) = token;
      args.pair_rows.at<std::int32_t>(source, token, k) =
          static_cast<std::int32_t>(expert * world_ * config_.max_tokens + row);
      auto* to = static_cast<std::byte*>(args.output.data()) +
                 (expert * args.output.stride(0) + row * args.output.stride(1)) * element;
      std::memcpy(to, message, size(config_.hidden * element));
      const std::byte* scales = message + config_.hidden * element;
      for (std::int64_t c = 0; c < columns; ++c) {
        const std::int64_t at = expert * args.scales.stride(0) + row * args.scales.stride(1) +
                                c * args.scales.stride(2);
        std::memcpy(static_cast<std::byte*>(args.scales.data()) + 4 * at, scales + 4 * c, 4);
      }
    }
  }
}

// ---- Combine.

LowLatencySent CpuLowLatency::send(const LowLatencyCombineArgs& args) {
  std::vector<std::int32_t> pair_rows;  // [W, M, K]
  const auto write = [&](std::uint64_t epoch) {
    const ConstTensorView& rows = args.expert_output;
    const std::int64_t pairs = config_.max_tokens * config_.topk;  // of a rank
    for_each_peer([&](int source) {
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        const std::int32_t row = pair_rows[size(source * pairs + pair)];
        if (row < 0) continue;
        interrupts_.look();
        const std::int64_t expert = row / rows.size(1), at = row % rows.size(1);
        std::memcpy(peers_[size(source)] + layout_.returned_row(epoch, pair),
                    static_cast<const std::byte*>(rows.data()) +
                        (expert * rows.stride(0) + at * rows.stride(1)) * 2,
                    size(layout_.row_bytes));
      }
    });
  };
  const auto check_args = [&] {
    check_combine(Check(name_), config_, world_, pending_[kLowLatencyDispatch], args);
    if (args.expert_indices.present()) read_experts(Check(name_), config_, args.expert_indices);
    pair_rows = read_pair_rows(Check(name_), args);
  };
  return send_call(args.part, 0, 0, check_args, write);
}

void CpuLowLatency::receive(const LowLatencyCombineArgs& args, const PendingCall& call) {
  const auto read = [&] { return read_experts(Check(name_), config_, args.expert_indices); };
  if (args.part == CallPart::receive) {
    check_combine(Check(name_), config_, world_, pending_[kLowLatencyDispatch], args);
    read();  // what is refused here can be received once more
  }
  const Received received = receive(call, 0);
  std::vector<std::int32_t> experts;  // [n, k]
  try {
    experts = read();
  } catch (const Error&) {  // they have changed since they were sent
    end(call);
    throw;
  }
  const std::size_t topk = size(args.expert_indices.size(1));
  static const auto sum_rows = cpu_kernels().expert_parallel_sum_rows;
  Addend addends[kMaxTopk];
  for (std::int64_t token = 0; token < args.out.size(0); ++token) {
    interrupts_.look();
    int count = 0;
    std::int64_t last = -1;  // the rank of the addend before
    for (const auto& [home, k] :
         pairs_by_rank({experts.data() + size(token) * topk, topk}, layout_.per_rank)) {
      if (mask_[size(home)] != 0) continue;
      if (count > 0) addends[count - 1].ends_rank = home != last;
      addends[count++] = {.row = own() + layout_.returned_row(call.epoch, token * config_.topk + k),
                          .weight = args.weights.at<float>(token, k)};
      last = home;
    }
    if (count > 0) addends[count - 1].ends_rank = addends[count - 1].ends_node = true;
    sum_rows({.dtype = DType::bf16,
              .hidden = config_.hidden,
              .addends = addends,
              .count = count,
              .weighted = true,
              .to = static_cast<BFloat16*>(args.out.data()) + token * args.out.stride(0)});
  }
  add_waits(received, args.wait_statistics);
  end(call);
}

}  // namespace

std::unique_ptr<LowLatencyBackend> make_low_latency_cpu(std::shared_ptr<Transport> transport,
                                                        const LowLatencyConfig& config) {
  return std::make_unique<CpuLowLatency>(std::move(transport), config);
}

}  // namespace winnow::expert_parallel
