#include "winnow/sparse_mla/distribution/distribution.h"

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/sparse_mla/distribution/distribution_contract.h"
#include "winnow/sparse_mla/distribution/distribution_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr std::string_view kOperation = kDistribution.operation;

DistributionParams check_args(const DistributionArgs& args) {
  kDistribution.check(args);
  return {.problem = problem_of(args),
          .lse = rows_of<const void*>(args.lse, 0),
          .attn_sum = rows_of<void*>(args.attn_sum, 0),
          .extra_attn_sum = rows_of<void*>(args.extra_attn_sum, 0)};
}

void check_args_for_sm90(const DistributionArgs& args, const Problem& problem) {
  const Check check(kOperation);
  check_for_gpu(check, "q", args.q);
  check_for_gpu(check, "kv", args.kv);
  check_for_gpu(check, "extra_kv", args.extra_kv);
  check_sizes_for_gpu(check, Backend::sm90, problem);
}

Backend run(const DistributionArgs& args, const RunOptions& options) {
  const DistributionParams params = check_args(args);
  constexpr Backend kImplemented[] = {Backend::sm90, Backend::cpu};
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) check_args_for_sm90(args, params.problem);
  if (options.dry_run) return backend;
  kDistribution.apart(args);
  if (args.attn_sum.numel() == 0 && args.extra_attn_sum.numel() == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().sparse_mla_distribution, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    distribution_sm90(params, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend distribution(const DistributionArgs& args, const RunOptions& options) {
  return recorded(kDistribution, args, options, run);
}

}  // namespace winnow::sparse_mla
