#include "winnow/expert_parallel/low_latency/low_latency.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>

#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/low_latency/low_latency_impl.h"
#include "winnow/expert_parallel/transport/fault.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

Fields fields_of(const LowLatencyConfig& config) {
  const auto text = [](auto value) { return std::to_string(value); };
  return {{"max_tokens", text(config.max_tokens)},
          {"hidden", text(config.hidden)},
          {"topk", text(config.topk)},
          {"experts", text(config.experts)},
          {"enable_shrink", config.enable_shrink ? "true" : "false"},
          {"device", config.device.type == DeviceType::cuda ? "cuda" : "cpu"},
          {"backend", std::string(config.backend ? to_string(*config.backend) : "any")}};
}

bool is_fp8(RowFormat format) { return format != RowFormat::bf16; }

}  // namespace

// ---- Calls that are pending.

void PendingCalls::check_send(const Check& check) const {
  check.that(pending_.size() < kMost, "part", "at most two calls that were sent and not received",
             "a third");
  check.that(last_ - consumed() < kMost, "part",
             "the older call received first, whose places this one takes", "one that is not");
}

PendingCall PendingCalls::send(const LowLatencyNote& message) {
  static std::atomic<std::uint64_t> count{0};  // of all objects: one's call is no other's
  return pending_.emplace_back(PendingCall{LowLatencySent(++count), ++last_, message});
}

PendingCall PendingCalls::find(const Check& check, LowLatencySent sent) const {
  const auto found = std::ranges::find(pending_, sent, &PendingCall::sent);
  check.that(found != pending_.end(), "part", "a call that was sent before it is received",
             sent == LowLatencySent::none ? "none" : "one that is received, or of another object");
  return *found;
}

void PendingCalls::end(const PendingCall& call) {
  std::erase_if(pending_, [&](const PendingCall& one) { return one.epoch == call.epoch; });
}

void PendingCalls::drop(const PendingCall& call) {
  end(call);
  dropped_.insert(call.sent);
}

void PendingCalls::check_received(const Check& check, LowLatencySent sent) const {
  const bool pending = std::ranges::find(pending_, sent, &PendingCall::sent) != pending_.end();
  check.that(!pending && !dropped_.contains(sent), "dispatched", "a dispatch that was received",
             pending ? "one that was only sent" : "one that failed");
}

// ---- What ranks say.

LowLatencyNote note_of(const Error* refusal, int format, std::int64_t tokens) {
  LowLatencyNote note;
  if (refusal == nullptr) {
    note.format = format;
    note.tokens = static_cast<std::int32_t>(tokens);
    return note;
  }
  const std::string text = message_of(*refusal);
  note.refusal = refusal_of(refusal->code());
  text.copy(note.text, LowLatencyNote::kTextBytes - 1);
  return note;
}

void check_bounds(const LowLatencyNote& note, const Sender& by, std::int64_t max_tokens) {
  check_bounds(note.refusal, by, "a refusal", 0, kMostRefusal);
  check_bounds(note.format, by, "format", 0, static_cast<int>(RowFormat::fp8_ue8m0));
  check_bounds(note.tokens, by, "tokens", 0, max_tokens);
}

// ---- Checks.

void check_low_latency_config(const LowLatencyConfig& config, int world) {
  const Check check(kLowLatency);
  const auto in_range = [&](std::string_view field, std::int64_t value, std::int64_t least,
                            std::int64_t most) {
    check.that(value >= least && value <= most, field,
               std::to_string(least) + " to " + std::to_string(most), std::to_string(value));
  };
  in_range("max_tokens", config.max_tokens, 1, kMost / kMaxTopk / world);
  in_range("hidden", config.hidden, 8, std::int64_t{1} << 20);
  check.that(config.hidden % 8 == 0, "hidden", "a multiple of 8", std::to_string(config.hidden));
  in_range("topk", config.topk, 1, kMaxTopk);
  in_range("experts", config.experts, 1, std::int64_t{1} << 20);
  check.that(config.experts % world == 0, "experts",
             "a multiple of the " + std::to_string(world) + " ranks",
             std::to_string(config.experts));
  check.that(config.experts <= kMost / config.max_tokens, "experts",
             "at most 2^31 - 1 rows of a rank's experts",
             std::to_string(config.experts * config.max_tokens));
  in_range("sm_count", config.sm_count, 0, kMost);
}

LowLatencyLayout low_latency_layout(const LowLatencyConfig& config, int world) {
  constexpr std::int64_t kLine = 128;
  const auto round_up = [](std::int64_t bytes, std::int64_t step) {
    return (bytes + step - 1) / step * step;
  };
  LowLatencyLayout layout;
  layout.world = world;
  layout.topk = config.topk;
  layout.per_rank = config.experts / world;
  layout.max_tokens = config.max_tokens;
  layout.row_bytes = config.hidden * 2;
  // Those of f8 have scales, and are no larger.
  layout.message_bytes = round_up(layout.row_bytes, 16);
  layout.pieces =
      int((layout.row_bytes + LowLatencyLayout::kPieceBytes - 1) / LowLatencyLayout::kPieceBytes);
  std::int64_t end = 0;
  const auto add = [&](std::int64_t& offset, std::int64_t bytes) {
    offset = end;
    end = round_up(end + bytes, kLine);
  };
  add(layout.signals, kLowLatencyCalls * world * 8);
  add(layout.consumed, kLowLatencyCalls * world * 8);
  add(layout.notes, kLowLatencyCalls * 2 * world * std::int64_t(sizeof(LowLatencyNote)));
  add(layout.counts, 2 * std::int64_t(config.experts) * 4);
  add(layout.places, 2 * world * config.max_tokens * config.topk * 4);
  add(layout.messages, 2 * world * config.max_tokens * layout.message_bytes);
  add(layout.returned,
      2 * config.max_tokens * config.topk * layout.pieces * LowLatencyLayout::kPieceBytes);
  add(layout.count_words, world * 8);
  add(layout.announced, 2 * world * 8);
  add(layout.block_words, world * LowLatencyLayout::kMostBlocks * 8);
  add(layout.note_words, world * 8);
  add(layout.weights, 2 * world * config.max_tokens * config.topk * 8);
  add(layout.token_signals, 2 * world * config.max_tokens * 8);
  layout.bytes = end;
  return layout;
}

namespace {

void check_indices(const Check& check, const LowLatencyConfig& config,
                   const ConstTensorView& indices, std::int64_t tokens) {
  check.rank("expert_indices", indices, 2, "[n, k]");
  const std::int64_t topk = indices.size(1);
  check.that(topk >= 1 && topk <= config.topk, "expert_indices",
             "1 to " + std::to_string(config.topk) + " experts a token", std::to_string(topk));
  check.input("expert_indices", indices, {{"n", tokens}, {"k", topk}}, {DType::i32, DType::i64},
              config.device);
}

}  // namespace

void check_dispatch(const Check& check, const LowLatencyConfig& config, int world,
                    const LowLatencyDispatchArgs& args) {
  if (args.refusal != nullptr) throw *args.refusal;
  const Dim experts{"E / W", config.experts / world}, rows{"W * M", world * config.max_tokens};
  const Dim hidden{"hidden", config.hidden};
  const std::int64_t block =
      args.format == RowFormat::fp8_ue8m0 ? 4 * kScaleColumns : kScaleColumns;
  check.that(args.format <= RowFormat::fp8_ue8m0, "format", "a RowFormat",
             std::to_string(static_cast<int>(args.format)));
  check.that(!is_fp8(args.format) || config.hidden % block == 0, "format",
             "bf16 where hidden is not a multiple of " + std::to_string(block), "fp8");
  if (sends(args.part)) {
    check.rank("input", args.input, 2, "[n, hidden]");
    const std::int64_t tokens = args.input.size(0);
    check.input("input", args.input, {{"n", tokens}, hidden}, {DType::bf16}, config.device);
    check.that(tokens <= config.max_tokens, "input",
               "at most max_tokens = " + std::to_string(config.max_tokens) + " tokens",
               std::to_string(tokens));
    check_indices(check, config, args.expert_indices, tokens);
  }
  if (!receives(args.part)) return;
  const Device device = config.device;
  check.output("output", args.output, {experts, rows, hidden},
               {is_fp8(args.format) ? DType::f8_e4m3 : DType::bf16}, device);
  if (is_fp8(args.format)) {
    const bool packed = args.format == RowFormat::fp8_ue8m0;
    check.shape("scales", args.scales, {experts, rows, {"columns", config.hidden / block}});
    check.dtype("scales", args.scales, {packed ? DType::i32 : DType::f32});
    check.device("scales", args.scales, device);
    check.aligned("scales", args.scales, 4);
    check.distinct_elements("scales", args.scales);
  } else {
    check.that(!args.scales.present(), "scales", "none with the format bf16",
               to_string(args.scales));
  }
  check.output("counts", args.counts, {experts}, {DType::i32}, device);
  check.output("source_tokens", args.source_tokens, {experts, rows}, {DType::i32}, device);
  check.output("source_pairs", args.source_pairs, {experts, rows}, {DType::i32}, device);
  check.output("pair_rows", args.pair_rows,
               {{"W", world}, {"M", config.max_tokens}, {"K", config.topk}}, {DType::i32}, device);
  check.output("ranges", args.ranges, {experts, {"W", world}}, {DType::i64}, device);
  if (args.expert_statistics.present()) {
    check.output("expert_statistics", args.expert_statistics, {experts}, {DType::i32}, device);
  }
  if (args.wait_statistics.present()) {
    check.output("wait_statistics", args.wait_statistics, {{"W", world}}, {DType::i64}, device);
  }
  const bool read = sends(args.part);  // a call that only receives has no inputs
  check.apart({{"output", args.output},
               {"scales", args.scales},
               {"counts", args.counts},
               {"source_tokens", args.source_tokens},
               {"source_pairs", args.source_pairs},
               {"pair_rows", args.pair_rows},
               {"ranges", args.ranges},
               {"expert_statistics", args.expert_statistics},
               {"wait_statistics", args.wait_statistics}},
              {{"input", read ? args.input : ConstTensorView()},
               {"expert_indices", read ? args.expert_indices : ConstTensorView()}});
}

void check_combine(const Check& check, const LowLatencyConfig& config, int world,
                   const PendingCalls& dispatches, const LowLatencyCombineArgs& args) {
  if (args.refusal != nullptr) throw *args.refusal;
  const Dim experts{"E / W", config.experts / world}, rows{"W * M", world * config.max_tokens};
  const Dim hidden{"hidden", config.hidden};
  if (sends(args.part)) {
    dispatches.check_received(check, args.dispatched);
    check.input("expert_output", args.expert_output, {experts, rows, hidden}, {DType::bf16},
                config.device);
    check.input("pair_rows", args.pair_rows,
                {{"W", world}, {"M", config.max_tokens}, {"K", config.topk}}, {DType::i32},
                config.device);
  }
  if (!receives(args.part) && !args.weights.present()) return;
  check.rank("expert_indices", args.expert_indices, 2, "[n, k]");
  const std::int64_t tokens = args.expert_indices.size(0);
  check.that(tokens <= config.max_tokens, "expert_indices",
             "at most max_tokens = " + std::to_string(config.max_tokens) + " tokens",
             std::to_string(tokens));
  check_indices(check, config, args.expert_indices, tokens);
  check.input("weights", args.weights, {{"n", tokens}, {"k", args.expert_indices.size(1)}},
              {DType::f32}, config.device);
  if (!receives(args.part)) return;
  check.output("out", args.out, {{"n", tokens}, hidden}, {DType::bf16}, config.device);
  if (args.wait_statistics.present()) {
    check.output("wait_statistics", args.wait_statistics, {{"W", world}}, {DType::i64},
                 config.device);
  }
  const bool read = sends(args.part);
  check.apart({{"out", args.out}, {"wait_statistics", args.wait_statistics}},
              {{"expert_output", read ? args.expert_output : ConstTensorView()},
               {"pair_rows", read ? args.pair_rows : ConstTensorView()},
               {"expert_indices", args.expert_indices},
               {"weights", args.weights}});
}

// ---- The entry points.

LowLatency::LowLatency(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
                       const LowLatencyConfig& config)
    : config_(config) {
  const Check check(kLowLatency);
  check.that(transport != nullptr, "transport", "a transport", "none");
  check.that(store != nullptr, "store", "a store", "none");
  const Deadline deadline(config.timeout);
  config_.timeout = deadline.timeout();
  rank_ = transport->rank();
  world_size_ = transport->world_size();
  const auto choose = [&] {
    check_low_latency_config(config_, world_size_);
    return choose_layer_backend(kLowLatency, config_.device, config_.backend);
  };
  backend_ = make_collective({kLowLatency, *transport, *store, deadline}, fields_of(config_),
                             choose, [&](Backend backend) {
                               if constexpr (kBuiltWithCuda) {
                                 if (backend == Backend::cuda) {
                                   return make_low_latency_cuda(transport, config_);
                                 }
                               }
                               return make_low_latency_cpu(transport, config_);
                             });
  which_ = backend_->backend();
}

LowLatency::~LowLatency() { close(); }

LowLatencyBackend& LowLatency::open(const char* operation) const {
  if (backend_ == nullptr) {
    throw Error(ErrorCode::invalid_argument, operation, "the object is closed");
  }
  return *backend_;
}

LowLatencySent LowLatency::dispatch(const LowLatencyDispatchArgs& args) {
  const char* operation = kLowLatencyNames[kLowLatencyDispatch];
  LowLatencyBackend& backend = open(operation);
  using A = LowLatencyDispatchArgs;
  constexpr Members<&A::input, &A::expert_indices, &A::format, &A::part, &A::sent, &A::output,
                    &A::scales, &A::counts, &A::source_tokens, &A::source_pairs, &A::pair_rows,
                    &A::ranges, &A::expert_statistics, &A::wait_statistics, &A::stream, &A::refusal>
      members;
  return logged(members, operation, rank_, args, which_, [&] { return backend.dispatch(args); });
}
LowLatencySent LowLatency::combine(const LowLatencyCombineArgs& args) {
  const char* operation = kLowLatencyNames[kLowLatencyCombine];
  LowLatencyBackend& backend = open(operation);
  using A = LowLatencyCombineArgs;
  constexpr Members<&A::expert_output, &A::pair_rows, &A::dispatched, &A::expert_indices,
                    &A::weights, &A::out, &A::wait_statistics, &A::part, &A::sent, &A::stream,
                    &A::refusal>
      members;
  return logged(members, operation, rank_, args, which_, [&] { return backend.combine(args); });
}
std::vector<std::int32_t> LowLatency::mask() const { return open(kLowLatency).mask(); }
void LowLatency::set_mask(int rank, bool masked) {
  const Check check(kLowLatency);
  check.that(config_.enable_shrink, "set_mask", "an object made with enable_shrink", "another");
  check.that(rank >= 0 && rank < world_size_ && rank != rank_, "rank",
             "another one, 0 to " + std::to_string(world_size_ - 1), std::to_string(rank));
  open(kLowLatency).set_mask(rank, masked);
}

const LowLatencyConfig& LowLatency::config() const { return config_; }
int LowLatency::rank() const { return rank_; }
int LowLatency::world_size() const { return world_size_; }
Backend LowLatency::backend() const { return which_; }
std::int64_t LowLatency::bytes() const { return backend_ ? backend_->bytes() : 0; }
void LowLatency::close() noexcept { backend_.reset(); }

}  // namespace winnow::expert_parallel
