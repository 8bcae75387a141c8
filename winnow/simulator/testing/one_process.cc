// What a simulated all-to-all has in place of the CPU backends, and of worlds of processes.
#include "winnow/core/error.h"
#include "winnow/expert_parallel/all_to_all/all_to_all_impl.h"
#include "winnow/expert_parallel/low_latency/low_latency_impl.h"
#include "winnow/expert_parallel/notify/notify_impl.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/testing/all_to_all_check.h"

namespace winnow::expert_parallel {
namespace {

[[noreturn]] void not_here(const char* what) {
  throw Error(ErrorCode::unsupported, what, "a simulated library has no CPU backend");
}

}  // namespace

std::unique_ptr<AllToAllBackend> make_all_to_all_cpu(std::shared_ptr<Transport>, const Config&) {
  not_here("make_all_to_all_cpu");
}
std::unique_ptr<LowLatencyBackend> make_low_latency_cpu(std::shared_ptr<Transport>,
                                                        const LowLatencyConfig&) {
  not_here("make_low_latency_cpu");
}
std::unique_ptr<NotifierBackend> make_cpu_notifier(std::shared_ptr<Transport>,
                                                   const NotifierConfig&, const Deadline&) {
  not_here("make_cpu_notifier");
}

std::optional<LaunchEnvironment> launch_environment() { return {}; }
Comparisons run_launched(DeviceType, const RankPart&) { not_here("run_launched"); }

}  // namespace winnow::expert_parallel
