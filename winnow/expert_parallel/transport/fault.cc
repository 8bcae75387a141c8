#include "winnow/expert_parallel/transport/fault.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>

#include "winnow/expert_parallel/transport/backoff.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {
namespace {

// A writer needs microseconds. One that needs longer was killed or stopped meanwhile.
constexpr std::chrono::milliseconds kWritingTime{200};

template <std::size_t N>
void copy_text(char (&target)[N], std::string_view text) {
  const std::size_t length = std::min(text.size(), N - 1);
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

}  // namespace

bool has_fault(const FaultSlot& slot) { return load_acquire(&slot.state) != FaultSlot::kEmpty; }

bool record_first(FaultSlot& slot, const FaultRecord& record) {
  std::uint64_t expected = FaultSlot::kEmpty;
  if (!std::atomic_ref(slot.state)
           .compare_exchange_strong(expected, FaultSlot::kBeingWritten,
                                    std::memory_order_acq_rel)) {
    return false;
  }
  SharedRecord shared{};
  shared.waited_for = record.waited_for;
  shared.seen = record.seen;
  shared.code = static_cast<std::int32_t>(record.code);
  shared.reason = static_cast<std::int32_t>(record.reason);
  shared.rank = record.rank;
  shared.peer = record.peer;
  copy_text(shared.operation, record.operation);
  copy_text(shared.phase, record.phase);
  copy_text(shared.text, record.text);
  slot.record.write(shared);
  store_release(&slot.state, FaultSlot::kWritten);
  return true;
}

std::optional<FaultRecord> read_fault(const FaultSlot& slot) {
  if (!has_fault(slot)) return std::nullopt;
  Backoff backoff;
  const Deadline deadline(kWritingTime);
  while (load_acquire(&slot.state) != FaultSlot::kWritten) {
    if (deadline.expired()) {
      FaultRecord record;
      record.operation = "expert_parallel";
      record.text = "a rank was killed or stopped while it recorded a fault";
      return record;
    }
    backoff.pause();
  }
  FaultRecord record;
  try {
    const SharedRecord received =
        slot.record.read({"expert_parallel", "the record of a fault", -1});
    record.code = static_cast<ErrorCode>(received.code);
    record.reason = static_cast<ErrorReason>(received.reason);
    record.operation = untrusted_text(received.operation);
    record.phase = untrusted_text(received.phase);
    record.rank = received.rank;
    record.peer = received.peer;
    record.waited_for = received.waited_for;
    record.seen = received.seen;
    record.text = untrusted_text(received.text);
  } catch (const Error& error) {
    record.code = error.code();
    record.operation = error.operation();
    record.text = message_of(error);
  }
  return record;
}

void check_bounds(const SharedRecord& record, const Sender& by) {
  check_bounds(record.code, by, "code", 0, kMostRefusal - 1);
  check_bounds(record.reason, by, "reason", 0, static_cast<int>(kLastReason));
  check_bounds(record.rank, by, "rank", -1, INT32_MAX);
  check_bounds(record.peer, by, "peer", -1, INT32_MAX);
}

std::string message_of(const Error& error) {
  constexpr std::string_view kSeparator = ": ";
  return std::string(error.what()).substr(error.operation().size() + kSeparator.size());
}

ErrorDetails details_of(const std::string& message) {
  constexpr std::string_view kSeparator = ": ", kWanted = ": want ", kGot = ", got ";
  ErrorDetails details;
  const std::size_t end = message.find(kWanted);
  if (end == std::string::npos) return details;
  details.argument = message.substr(0, end);
  const std::size_t begin = details.argument.rfind(kSeparator);
  if (begin != std::string::npos) details.argument.erase(0, begin + kSeparator.size());
  const std::size_t wanted = end + kWanted.size(), got = message.find(kGot, wanted);
  if (got == std::string::npos) return details;
  details.wanted = message.substr(wanted, got - wanted);
  details.got = message.substr(got + kGot.size());
  return details;
}

Error error_from_message(ErrorCode code, std::string operation, const std::string& message,
                         ErrorReason reason) {
  ErrorDetails details = details_of(message);
  details.reason = reason;
  if (reason == ErrorReason::arguments_differ) details.differing = details.argument;
  return {code, std::move(operation), message, std::move(details)};
}

void throw_fault(const FaultRecord& record, int own_rank) {
  std::string text = record.text;
  if (record.rank >= 0 && record.rank != own_rank) {
    text += "; reported by rank " + std::to_string(record.rank);
  }
  throw error_from_message(record.code, record.operation, text, record.reason);
}

}  // namespace winnow::expert_parallel
