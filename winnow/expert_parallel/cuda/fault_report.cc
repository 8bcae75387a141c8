#include "winnow/expert_parallel/cuda/fault_report.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::expert_parallel {

FaultRecord fault_record(const FaultReport& report, std::span<const PhaseText> texts,
                         const Transport& transport) {
  const FaultNotice& notice = report.notice;
  const auto text = std::ranges::find(texts, notice.phase, &PhaseText::phase);
  FaultRecord record;
  record.operation = text == texts.end() ? "expert_parallel" : text->operation;
  record.phase = text == texts.end() ? "a word" : text->text;
  record.rank = report.reporter;
  record.peer = notice.peer;
  record.waited_for = notice.waited_for;
  record.seen = notice.seen;
  record.text = "rank " + std::to_string(report.reporter);
  if (notice.phase == Phase::memory) {
    record.code = ErrorCode::resource;
    record.text += ": out of memory in the call";
    return record;
  }
  if (notice.phase == Phase::interrupted) {
    record.reason = ErrorReason::interrupted;
    record.phase = "the end of an interrupt";
    record.text += " was interrupted";
    return record;
  }
  record.text +=
      " waited " + to_seconds(std::chrono::nanoseconds(notice.elapsed_ns)) + " for " + record.phase;
  const std::string wanted = std::to_string(notice.waited_for), seen = std::to_string(notice.seen);
  if (notice.phase == Phase::blocks) {
    record.text += ", of which " + seen + " of " + wanted + " run: other work holds its SMs";
    return record;
  }
  record.text +=
      " of rank " + std::to_string(notice.peer) + " (epoch " + wanted + ", seen " + seen + ")";
  if (notice.peer >= 0 && notice.peer < transport.world_size()) {
    record.text += ": " + transport.describe_peer(notice.peer);
    const bool gone = transport.peer_gone(notice.peer);
    record.reason = gone ? ErrorReason::peer_gone : ErrorReason::absent;
  }
  return record;
}

}  // namespace winnow::expert_parallel
