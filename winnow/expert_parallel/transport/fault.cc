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
  slot.waited_for = record.waited_for;
  slot.seen = record.seen;
  slot.code = static_cast<std::int32_t>(record.code);
  slot.rank = record.rank;
  slot.peer = record.peer;
  copy_text(slot.operation, record.operation);
  copy_text(slot.phase, record.phase);
  copy_text(slot.text, record.text);
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
  record.code = static_cast<ErrorCode>(slot.code);
  record.operation = slot.operation;
  record.phase = slot.phase;
  record.rank = slot.rank;
  record.peer = slot.peer;
  record.waited_for = slot.waited_for;
  record.seen = slot.seen;
  record.text = slot.text;
  return record;
}

std::string message_of(const Error& error) {
  constexpr std::string_view kSeparator = ": ";
  return std::string(error.what()).substr(error.operation().size() + kSeparator.size());
}

Error error_from_message(ErrorCode code, std::string operation, const std::string& message) {
  constexpr std::string_view kSeparator = ": ", kWanted = ": want ";
  std::string argument;
  if (const std::size_t end = message.find(kWanted); end != std::string::npos) {
    argument = message.substr(0, end);
    const std::size_t begin = argument.rfind(kSeparator);
    if (begin != std::string::npos) argument.erase(0, begin + kSeparator.size());
  }
  return {code, std::move(operation), message, std::move(argument)};
}

void throw_fault(const FaultRecord& record, int own_rank) {
  std::string text = record.text;
  if (record.rank >= 0 && record.rank != own_rank) {
    text += "; reported by rank " + std::to_string(record.rank);
  }
  throw error_from_message(record.code, record.operation, text);
}

}  // namespace winnow::expert_parallel
