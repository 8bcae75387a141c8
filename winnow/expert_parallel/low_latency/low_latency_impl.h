// The common part of the low-latency calls on the CPU and on GPUs. Internal.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/expert_parallel/layer/backend.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/low_latency/low_latency_layout.h"
#include "winnow/expert_parallel/transport/deadline.h"
#include "winnow/expert_parallel/transport/transport.h"

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
  virtual void dispatch(const LowLatencyDispatchArgs& args) = 0;
  virtual void combine(const LowLatencyCombineArgs& args) = 0;
  virtual std::vector<std::int32_t> mask() const = 0;
  virtual void set_mask(int rank, bool masked) = 0;
  virtual std::int64_t bytes() const = 0;
};

// The calls of one kind that have been sent and are still to be received.
class PendingCalls {
 public:
  static constexpr std::size_t kMost = 2;

  // Throws Error (invalid_argument) if too many calls are pending, or none to receive.
  void check_send(const Check& check) const;
  void check_receive(const Check& check) const;
  std::uint64_t next() const { return last_ + 1; }  // that a send would be
  std::uint64_t send();                             // its epoch
  // One that was sent and will not be received.
  void give_up(std::uint64_t epoch);
  std::uint64_t oldest() const { return pending_.front(); }
  void receive();
  // All up to this one are over.
  std::uint64_t consumed() const { return pending_.empty() ? last_ : pending_.front() - 1; }

 private:
  std::uint64_t last_ = 0;
  std::deque<std::uint64_t> pending_;
};

// `config` is resolved; throws Error (invalid_argument) for what a size must not be.
void check_low_latency_config(const LowLatencyConfig& config, int world);
LowLatencyLayout low_latency_layout(const LowLatencyConfig& config, int world);

// Throw Error (invalid_argument) naming the argument, for this rank alone; values of indices are
// not looked at. What a part does not take is not looked at either.
void check_dispatch(const Check& check, const LowLatencyConfig& config, int world,
                    const LowLatencyDispatchArgs& args);
void check_combine(const Check& check, const LowLatencyConfig& config, int world,
                   const LowLatencyCombineArgs& args);

std::unique_ptr<LowLatencyBackend> make_low_latency_cpu(std::shared_ptr<Transport> transport,
                                                        const LowLatencyConfig& config);
// Only in builds with CUDA.
std::unique_ptr<LowLatencyBackend> make_low_latency_cuda(std::shared_ptr<Transport> transport,
                                                         const LowLatencyConfig& config);

}  // namespace winnow::expert_parallel
