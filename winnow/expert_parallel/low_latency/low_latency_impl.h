// The common part of the low-latency calls on the CPU and on GPUs. Internal.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/expert_parallel/layer/backend.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/low_latency/low_latency_layout.h"
#include "winnow/expert_parallel/transport/deadline.h"
#include "winnow/expert_parallel/transport/transport.h"
#include "winnow/expert_parallel/transport/untrusted.h"

namespace winnow::expert_parallel {

inline constexpr const char* kLowLatency = "expert_parallel::LowLatency";
inline constexpr const char* kLowLatencyNames[kLowLatencyCalls] = {
    "expert_parallel::low_latency_dispatch", "expert_parallel::low_latency_combine"};
inline constexpr std::int64_t kScaleColumns = 128;

inline bool sends(CallPart part) { return part != CallPart::receive; }
inline bool receives(CallPart part) { return part != CallPart::send; }

class LowLatencyBackend : public CollectiveBackend {
 public:
  using CollectiveBackend::CollectiveBackend;
  virtual LowLatencySent dispatch(const LowLatencyDispatchArgs& args) = 0;
  virtual LowLatencySent combine(const LowLatencyCombineArgs& args) = 0;
  virtual std::vector<std::int32_t> mask() const = 0;
  virtual void set_mask(int rank, bool masked) = 0;
  virtual std::int64_t bytes() const = 0;
};

// A call that has been sent.
struct PendingCall {
  LowLatencySent sent = LowLatencySent::none;
  std::uint64_t epoch = 0;
  LowLatencyNote message{};  // of this rank; if it is a refusal, no argument is used
};

// The calls of one kind that have been sent and are still to be received, oldest first.
class PendingCalls {
 public:
  static constexpr std::uint64_t kMost = 2;

  // Throws Error (invalid_argument) if the places of the next call are those of a pending one.
  void check_send(const Check& check) const;
  PendingCall send(const LowLatencyNote& message);
  // Throws Error (invalid_argument) if it is not pending.
  PendingCall find(const Check& check, LowLatencySent sent) const;
  // Removes a call that has been received, or never will be.
  void end(const PendingCall& call);
  // The same for one that failed when it was to be received: its results are not written.
  void drop(const PendingCall& call);
  // Throws Error (invalid_argument), naming `dispatched`, if its results are not written.
  void check_received(const Check& check, LowLatencySent sent) const;
  // All up to this epoch are over.
  std::uint64_t consumed() const { return pending_.empty() ? last_ : pending_.front().epoch - 1; }

 private:
  std::uint64_t last_ = 0;
  std::vector<PendingCall> pending_;
  std::set<LowLatencySent> dropped_;
};

// What a rank says of a call: the refusal, if it is not null, or the rest.
LowLatencyNote note_of(const Error* refusal, int format, std::int64_t tokens);
// For Untrusted<LowLatencyNote>.
void check_bounds(const LowLatencyNote& note, const Sender& by, std::int64_t max_tokens);

// Throws Error (invalid_argument) for a size in `config` that is not allowed.
void check_low_latency_config(const LowLatencyConfig& config, int world);
LowLatencyLayout low_latency_layout(const LowLatencyConfig& config, int world);

// Throw Error (invalid_argument) naming the argument, for this rank alone; values of indices are
// not looked at. Arguments that the part does not take are not checked.
void check_dispatch(const Check& check, const LowLatencyConfig& config, int world,
                    const LowLatencyDispatchArgs& args);
void check_combine(const Check& check, const LowLatencyConfig& config, int world,
                   const PendingCalls& dispatches, const LowLatencyCombineArgs& args);

std::unique_ptr<LowLatencyBackend> make_low_latency_cpu(std::shared_ptr<Transport> transport,
                                                        const LowLatencyConfig& config);
// Only in builds with CUDA.
std::unique_ptr<LowLatencyBackend> make_low_latency_cuda(std::shared_ptr<Transport> transport,
                                                         const LowLatencyConfig& config);

}  // namespace winnow::expert_parallel
