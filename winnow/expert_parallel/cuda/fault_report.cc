#include "winnow/expert_parallel/cuda/fault_report.h"

#include <chrono>
#include <string>

#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::expert_parallel {
namespace {

struct PhaseName {
  std::string_view operation, phase;
};

PhaseName name_of(Phase phase) {
  constexpr std::string_view kDispatch = "expert_parallel::dispatch";
  constexpr std::string_view kCombine = "expert_parallel::combine";
  constexpr std::string_view kBarrier = "expert_parallel::barrier";
  constexpr std::string_view kNotify = "expert_parallel::notify";
  switch (phase) {
    case Phase::counts:
      return {kDispatch, "the counts"};
    case Phase::tokens:
      return {kDispatch, "the tokens"};
    case Phase::rows:
      return {kDispatch, "the rows"};
    case Phase::expert_rows:
    case Phase::pushed_rows:
      return {kCombine, "the expert rows"};
    case Phase::sums:
    case Phase::pushed_sums:
      return {kCombine, "the sums"};
    case Phase::end_of_sums:
      return {kCombine, "the end of the sums"};
    case Phase::world_barrier:
      return {kBarrier, "the world barrier"};
    case Phase::node_barrier:
      return {kBarrier, "the node barrier"};
    case Phase::notify_counts:
      return {kNotify, "the counts"};
    case Phase::notify_sums:
      return {kNotify, "the sums"};
    case Phase::blocks:
      return {kDispatch, "the blocks of its kernel"};
    case Phase::memory:
      return {kDispatch, "memory"};
    case Phase::interrupted:
      return {"expert_parallel", "the end of an interrupt"};
    case Phase::none:
      break;
  }
  return {"expert_parallel", "a word"};
}

}  // namespace

FaultRecord fault_record(const FaultReport& report, const Transport& transport) {
  const FaultNotice& notice = report.notice;
  const PhaseName name = name_of(notice.phase);
  FaultRecord record;
  record.operation = name.operation;
  record.phase = name.phase;
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
  }
  return record;
}

}  // namespace winnow::expert_parallel
