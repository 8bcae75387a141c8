// What notify on the CPU and on GPUs have in common. Internal.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "winnow/core/check.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/exchange/count_finding.h"
#include "winnow/expert_parallel/layer/backend.h"
#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/routing/topology.h"
#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::expert_parallel {

class Transport;

inline constexpr const char* kNotifyOperation = "expert_parallel::notify";
inline constexpr const char* kNotifierOperation = "expert_parallel::Notifier";
inline constexpr std::int64_t kMostCounts = std::numeric_limits<std::int32_t>::max();

class NotifierBackend : public CollectiveBackend {
 public:
  // `config` is checked and its defaults are resolved.
  NotifierBackend(Backend backend, const NotifierConfig& config, const Transport& transport);

  virtual void notify(const NotifyArgs& args) = 0;

  const NotifierConfig& config() const { return config_; }
  const Topology& topology() const { return topology_; }
  const NotifyTotals& totals() const { return totals_; }
  int rank() const { return rank_; }
  int experts_per_rank() const { return config_.experts / topology_.world_size; }

 protected:
  void forget_totals();
  // Throws what is wrong with options, tensors and queue buffers; looks at no count.
  void check_args(const NotifyArgs& args) const;

  NotifierConfig config_;
  Topology topology_;
  NotifyTotals totals_;
  int rank_;

 private:
  void check_tensors(const Check& check, const NotifyArgs& args) const;
  void check_queues(const Check& check, const NotifyArgs& args) const;
};

[[noreturn]] void throw_too_many(std::int64_t count, const char* what);

// As every rank says it.
Error error_of(const CountFinding& finding);

std::unique_ptr<NotifierBackend> make_cpu_notifier(std::shared_ptr<Transport> transport,
                                                   const NotifierConfig& config,
                                                   const Deadline& deadline);
// Only in builds with CUDA.
std::unique_ptr<NotifierBackend> make_cuda_notifier(std::shared_ptr<Transport> transport,
                                                    const NotifierConfig& config,
                                                    const Deadline& deadline);

}  // namespace winnow::expert_parallel
