// Words of reports, and what may be left when a thread or a block ends.
#include "winnow/simulator/engine/report.h"

#include <cstring>
#include <stdexcept>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/grid.h"

namespace winnow::simulator {

std::string line_of(const Where& where) {
  if (where.code() != nullptr) return line_of_code(where.code());
  if (where.line() == 0) return "an unknown line";
  const char* const slash = std::strrchr(where.file_name(), '/');
  return std::string(slash == nullptr ? where.file_name() : slash + 1) + ":" +
         std::to_string(where.line());
}

std::string name_of_actor(Actor actor) {
  const unsigned ranks = cluster->ranks();
  const auto name = [&](const char* what, unsigned each, unsigned number) {
    std::string text = what + std::to_string(number % each);
    if (ranks > 1) text += " of block " + std::to_string(number / each);
    return text;
  };
  if (actor < ranks * cluster->threads) return name("thread ", cluster->threads, actor);
  actor -= ranks * cluster->threads;
  if (actor < ranks * cluster->warps()) {
    return name("a matrix product for warp ", cluster->warps(), actor);
  }
  actor -= ranks * cluster->warps();
  if (actor < ranks) return "a tcgen05 product that block " + std::to_string(actor) + " issued";
  return "a copy that an mbarrier tells of";
}

bool Waiting::is_over() const {
  switch (kind) {
    case Kind::nothing:
    case Kind::poll:
      return true;
    case Kind::meeting:
      return static_cast<const WarpMeeting*>(object)->generation != value;
    case Kind::named:
      return static_cast<const NamedBarrier*>(object)->generation != value;
    case Kind::mbarrier:
      return (static_cast<const Barrier*>(object)->phase & 1) != value;
    case Kind::products:
      return static_cast<const Warpgroup*>(object)->done >= value;
    case Kind::reads:
      return static_cast<const BulkGroup*>(object)->reading == 0;
    case Kind::writes:
      return static_cast<const BulkGroup*>(object)->writing == 0;
    case Kind::cluster:
      return cluster->generation != value;
    case Kind::kernel:
      return knows_before(*static_cast<const GridRun*>(object));
  }
  return true;
}

std::string Waiting::describe() const {
  const std::string at = " (" + line_of(where) + ")";
  switch (kind) {
    case Kind::nothing:
      return " for their turn";
    case Kind::poll:
      return " in a loop that looks again and again";
    case Kind::meeting:
      return " for the other lanes at " + std::string(role) + at;
    case Kind::named:
      return " at barrier " + std::to_string(what) + " (" + role + ") with " +
             std::to_string(static_cast<const NamedBarrier*>(object)->arrived) + " of " +
             std::to_string(static_cast<const NamedBarrier*>(object)->threads) + " threads" + at;
    case Kind::mbarrier: {
      const auto& barrier = *static_cast<const Barrier*>(object);
      return " as \"" + std::string(role) + "\" " + std::to_string(what) + " for parity " +
             std::to_string(value) + " of the mbarrier " + barrier.name + ", which misses " +
             std::to_string(barrier.pending) + " of " + std::to_string(barrier.count) +
             " arrivals and " + std::to_string(barrier.bytes) + " bytes in phase " +
             std::to_string(barrier.phase) + at;
    }
    case Kind::kernel:
      return " for the kernel before to end" + at;
    case Kind::cluster:
      return " at the barrier of the cluster, at which " + std::to_string(cluster->arrived) +
             " threads have arrived" + at;
    default:
      return " in " + std::string(role) + at;
  }
}

// Called by a thread at its end, and for the block at its end.
void check_at_exit() {
  if (current != nullptr) {
    if (!current->accumulators.empty()) {
      fail("exit", "a thread ends while a matrix product uses its registers", {});
    }
    if (current->in_cluster_barrier) {
      fail("exit", "a thread ends between its arrival and its wait at the cluster barrier", {});
    }
    if (!current->tensor_loads.empty()) {
      fail("exit", "a thread ends without tcgen05.wait::ld behind its tcgen05.ld", {});
    }
    if (current->open_group) fail("exit", "a bulk copy was never committed", {});
    for (const auto& group : current->groups) {
      for (const std::uint64_t operation : group->operations) {
        if (cluster->operations[operation].stamp.none()) {
          fail("exit", "a thread ends before its bulk copy has read shared memory",
               cluster->operations[operation].where);
        }
      }
    }
    return;
  }
  if (block->grid.early && !block->knows_before) {
    fail("launch", "a block of a kernel that may begin early ends without griddepcontrol.wait", {});
  }
  check_reached();
  check_tensor_memory_at_exit();
  if (cluster->queued > 0) {
    fail("exit", std::to_string(cluster->queued) + " asynchronous operations are under way", {});
  }
  for (const OperationRecord& record : cluster->operations) {
    if (record.stamp.none()) {
      fail("exit",
           std::string(record.what) + " of " + name_of_actor(record.thread) +
               " was never waited for",
           record.where);
    }
  }
  for (const auto& [address, barrier] : block->barriers) {
    if (barrier.bytes != 0) {
      fail("exit",
           "the mbarrier " + barrier.name + " still expects " + std::to_string(barrier.bytes) +
               " bytes",
           barrier.where);
    }
  }
}

std::string to_string(const Schedule& schedule) {
  switch (schedule.kind) {
    case Schedule::Kind::eager:
      return "eager";
    case Schedule::Kind::late:
      return "late";
    case Schedule::Kind::random:
      return "random:" + std::to_string(schedule.seed);
    case Schedule::Kind::starved:
      return "starved:" + std::to_string(schedule.seed);
  }
  return "";
}

Schedule parse_schedule(const std::string& text) {
  const auto colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  Schedule schedule;
  if (colon != std::string::npos) schedule.seed = std::stoull(text.substr(colon + 1));
  if (kind == "eager") {
    schedule.kind = Schedule::Kind::eager;
  } else if (kind == "late") {
    schedule.kind = Schedule::Kind::late;
  } else if (kind == "random") {
    schedule.kind = Schedule::Kind::random;
  } else if (kind == "starved") {
    schedule.kind = Schedule::Kind::starved;
  } else {
    throw std::invalid_argument("a schedule is eager, late, random:SEED or starved:WARP, not " +
                                text);
  }
  return schedule;
}

}  // namespace winnow::simulator
