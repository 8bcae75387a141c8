// The parallel loop of the CPU backend. Internal: not installed; exported for tests and tools, as
// are the other internal functions that carry WINNOW_EXPORT.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "winnow/core/export.h"
#include "winnow/core/interrupt.h"

namespace winnow {

// Runs the iterations of a loop on several workers. The code that is built once per instruction
// set gets it as an object, so that only the main library creates threads.
class Executor {
 public:
  virtual ~Executor() = default;
  // Worker numbers passed to loop bodies are below this, and below the number of ranges.
  virtual int workers() const = 0;

  // Calls body(begin, end, worker) for disjoint ranges of at most `grain` iterations that cover
  // [0, count); a worker runs one range at a time. The body throws nothing, or std::bad_alloc. If
  // the program interrupts the call (interrupt.h), no further range begins, and this throws once
  // all running ranges have ended. A body that may take long should ask stopped() now and then and
  // return early.
  template <class Body>
  void for_each_range(std::int64_t count, std::int64_t grain, const Body& body) const {
    run(
        count, grain,
        [](const void* context, std::int64_t begin, std::int64_t end, int worker) {
          (*static_cast<const Body*>(context))(begin, end, worker);
        },
        &body);
  }
  virtual bool stopped() const = 0;

 protected:
  using RangeFunction = void (*)(const void* context, std::int64_t begin, std::int64_t end,
                                 int worker);

 private:
  virtual void run(std::int64_t count, std::int64_t grain, RangeFunction function,
                   const void* context) const = 0;
};

// Scratch memory for each worker of loops that have at most `ranges` ranges, constructed in place:
// a copy into the vector would double the memory of a single worker.
template <class Scratch, class... Arguments>
std::vector<Scratch> scratch_of_workers(const Executor& executor, std::int64_t ranges,
                                        const Arguments&... arguments) {
  const std::int64_t workers = std::min<std::int64_t>(executor.workers(), ranges);
  std::vector<Scratch> scratch;
  scratch.reserve(static_cast<std::size_t>(workers));
  for (std::int64_t n = 0; n < workers; ++n) scratch.emplace_back(arguments...);
  return scratch;
}

// The executor for one call of this thread, with num_threads() workers or kMostWorkers. Where that
// many threads cannot be created, fewer run the same ranges, so that the result is the same.
class WINNOW_EXPORT ThreadExecutor final : public Executor {
 public:
  // More than the processors of a machine. Operations cut work and take memory by the number of
  // workers, which without a limit would take seconds and gigabytes for a single query.
  static constexpr int kMostWorkers = 1024;

  ThreadExecutor();
  int workers() const override { return workers_; }
  bool stopped() const override;

 private:
  void run(std::int64_t count, std::int64_t grain, RangeFunction function,
           const void* context) const override;
  int workers_;
  std::thread::id caller_ = std::this_thread::get_id();  // the only one that looks for interrupts
  mutable Interrupts interrupts_;
  mutable std::exception_ptr interrupt_;
  mutable std::atomic<bool> stopped_{false};
};

}  // namespace winnow
