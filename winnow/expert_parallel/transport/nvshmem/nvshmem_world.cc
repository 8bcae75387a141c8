#include "winnow/expert_parallel/transport/nvshmem/nvshmem_world.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::chrono::milliseconds kLookAtRanks{20}, kLastWords{250};

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::internal, kNvshmemOperation, what);
}

// At the end of the process NVSHMEM's own handlers would wait for a call that was left behind, and
// its proxy thread would read memory that is gone. Registered later, this comes before.
void end_at_once(int status, void*) {
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace

NvshmemWorld& NvshmemWorld::instance() {
  static auto* const world = new NvshmemWorld;
  return *world;
}

NvshmemWorld::Group NvshmemWorld::group() const {
  const std::lock_guard lock(mutex_);
  return group_;
}

void NvshmemWorld::check(const std::string& operation) const {
  const std::lock_guard lock(mutex_);
  const std::string why = broken_.empty() ? ended_rank() : broken_;
  if (why.empty()) return;
  throw Error(ErrorCode::unsupported, operation,
              why + ", and an NVSHMEM world cannot go on without a rank: restart all processes");
}

std::string NvshmemWorld::ended_rank() const {
  for (std::size_t rank = 0; rank < group_.processes.size(); ++rank) {
    const ProcessIdentity& process = group_.processes[rank];
    if (state_of(process) != ProcessState::gone) continue;
    return "rank " + std::to_string(rank) + " has ended (" + describe(process) + ")";
  }
  return {};
}

void NvshmemWorld::run(const char* what, const Deadline& deadline, std::function<void()> call) {
  std::packaged_task<void()> task([library = library_, gpu = group_.device.index, call] {
    if (library->use_gpu(gpu) != 0) fail("the GPU cannot be used");
    call();
  });
  std::future<void> done = task.get_future();
  try {
    std::thread(std::move(task)).detach();
  } catch (const std::system_error& error) {
    broken_ = std::string("no thread for ") + what + " of NVSHMEM: " + error.what();
    throw Error(ErrorCode::resource, kNvshmemOperation, broken_);
  }
  Interrupts interrupts;
  const auto await = [&](Deadline::Clock::time_point end) {
    return done.wait_until(std::min(end, deadline.end())) == std::future_status::ready;
  };
  while (!await(Deadline::Clock::now() + kLookAtRanks)) {
    std::string why;
    ErrorReason reason = ErrorReason::absent;
    try {
      interrupts.look();
    } catch (...) {
      on_exit(end_at_once, nullptr);
      broken_ = std::string(what) + " of NVSHMEM was interrupted";
      throw;
    }
    if (deadline.expired()) {
      why = " has not ended within " + to_seconds(deadline.timeout());
    } else if (const std::string ended = ended_rank(); !ended.empty()) {
      // A rank whose part is done may go; the call then ends here, too.
      if (await(Deadline::Clock::now() + kLastWords)) break;
      why = " cannot end: " + ended;
      reason = ErrorReason::peer_gone;
    }
    if (why.empty()) continue;
    on_exit(end_at_once, nullptr);
    broken_ = what + (" of NVSHMEM" + why);
    throw Error(ErrorCode::timeout, kNvshmemOperation, broken_, {.reason = reason});
  }
  done.get();
}

void NvshmemWorld::start(const NvshmemLibrary& library, const Group& group,
                         const std::string& unique_id, const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  // From here on NVSHMEM may not be started again, whatever becomes of it.
  library_ = &library;
  group_ = group;
  broken_ = "NVSHMEM could not be started";
  const auto status = std::make_shared<int>(0);
  run("the start", deadline, [=, &library] {
    *status = library.start(unique_id.data(), group.rank, static_cast<int>(group.processes.size()));
  });
  if (*status != 0) fail(broken_ + " (status " + std::to_string(*status) + ")");
  broken_.clear();
  const auto elsewhere = [](const ProcessIdentity& process) {
    return !same_machine(process, own_process());
  };
  if (std::ranges::any_of(group.processes, elsewhere)) on_exit(end_at_once, nullptr);
}

NvshmemWorld::Memory NvshmemWorld::allocate(std::size_t bytes, const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = ++allocations_;
  const auto data = std::make_shared<void*>(nullptr);
  run("an allocation", deadline,
      [data, bytes, library = library_] { *data = library->allocate(bytes); });
  auto* const memory = static_cast<std::byte*>(*data);
  if (memory != nullptr) memories_[number] = memory;
  return {number, memory};
}

void NvshmemWorld::let_go(std::uint64_t number) noexcept {
  const std::lock_guard lock(mutex_);
  let_go_.insert(number);
}

std::set<std::uint64_t> NvshmemWorld::let_go() const {
  const std::lock_guard lock(mutex_);
  return let_go_;
}

void NvshmemWorld::free(std::uint64_t number, const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  const auto found = memories_.find(number);
  if (found == memories_.end()) {  // the ranks have agreed on numbers in a store
    throw Error(ErrorCode::internal, kNvshmemOperation,
                "there is no memory " + std::to_string(number) + " to free");
  }
  run("freeing memory", deadline,
      [memory = found->second, library = library_] { library->free(memory); });
  memories_.erase(number);
  let_go_.erase(number);
}

std::byte* NvshmemWorld::pointer(std::byte* memory, int rank) const {
  return static_cast<std::byte*>(library_->pointer(memory, rank));
}

}  // namespace winnow::expert_parallel
