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

void check_args_for_gpu(const DistributionArgs& args, Backend backend, const Problem& problem) {
  const Check check(kOperation);
  check_for_gpu(check, "q", args.q);
  check_for_gpu(check, "kv", args.kv);
  check_for_gpu(check, "extra_kv", args.extra_kv);
  check_sizes_for_gpu(check, backend, problem);
}

Backend run(const DistributionArgs& args, const RunOptions& options) {
  const DistributionParams params = check_args(args);
  const Backend backend =
      choose_backend(kOperation, args.q.device(), options, backends_for(args.q.dtype()));
  if (backend != Backend::cpu) check_args_for_gpu(args, backend, params.problem);
  if (options.dry_run) return backend;
  kDistribution.apart(args);
  if (args.attn_sum.numel() == 0 && args.extra_attn_sum.numel() == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().sparse_mla_distribution, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    const auto function = backend == Backend::sm90 ? distribution_sm90 : distribution_cuda;
    function(params, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend distribution(const DistributionArgs& args, const RunOptions& options) {
  return recorded(kDistribution, args, options, run);
}

}  // namespace winnow::sparse_mla
