// The record of the first fault of a world or a layer: written once, read by every rank. Internal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "winnow/core/error.h"
#include "winnow/core/export.h"
#include "winnow/expert_parallel/transport/untrusted.h"

namespace winnow::expert_parallel {

struct FaultRecord {
  ErrorCode code = ErrorCode::timeout;
  ErrorReason reason = ErrorReason::none;
  std::string operation;  // "expert_parallel::dispatch"
  std::string phase;      // what was waited for: "the counts"
  int rank = -1;          // the rank that reports it
  int peer = -1;          // the rank at fault; -1: no particular one
  std::uint64_t waited_for = 0;
  std::uint64_t seen = 0;
  std::string text;  // the message after "<operation>: "
};

// A record in memory that ranks share.
struct SharedRecord {
  std::uint64_t waited_for, seen;
  std::int32_t code, rank, peer, reason;
  char operation[64], phase[128], text[792];
};
// For Untrusted<SharedRecord>.
void check_bounds(const SharedRecord& record, const Sender& by);

// Its place. Zero-filled memory is an empty slot.
struct FaultSlot {
  static constexpr std::uint64_t kEmpty = 0, kBeingWritten = 1, kWritten = 2;

  std::uint64_t state;
  Untrusted<SharedRecord> record;
};
static_assert(sizeof(FaultSlot) == 1024);

// Whether there is a fault yet. One load.
WINNOW_EXPORT bool has_fault(const FaultSlot& slot);
// True if this record is the first. False: another one is there, or is just being written.
WINNOW_EXPORT bool record_first(FaultSlot& slot, const FaultRecord& record);
// The record, if there is one. A rank that is killed while it writes leaves a record that says so,
// and so does whatever else writes there.
WINNOW_EXPORT std::optional<FaultRecord> read_fault(const FaultSlot& slot);
// The text of an error without its operation, as records and refusals contain it.
WINNOW_EXPORT std::string message_of(const Error& error);
// What such a text says of an argument, the name before the first ": want ".
WINNOW_EXPORT ErrorDetails details_of(const std::string& message);
// The error with such a text.
WINNOW_EXPORT Error error_from_message(ErrorCode code, std::string operation,
                                       const std::string& message,
                                       ErrorReason reason = ErrorReason::none);
// Throws the record as Error; on ranks other than the reporter with "; reported by rank 0".
[[noreturn]] WINNOW_EXPORT void throw_fault(const FaultRecord& record, int own_rank);

}  // namespace winnow::expert_parallel
