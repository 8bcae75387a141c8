#include "winnow/sparse_mla/distribution/distribution.h"

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/sparse_mla/distribution/distribution_fields.h"
#include "winnow/sparse_mla/distribution/distribution_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr std::string_view kOperation = "sparse_mla::distribution";

DistributionParams check_args(const DistributionArgs& args) {
  const Check check(kOperation);
  DistributionParams params;
  params.problem = check_problem(check, args);
  const Dim s_q{"s_q", params.problem.s_q}, h_q{"h_q", params.problem.h_q};
  const Device device = args.q.device();
  const DType real = accumulator_of(args.q.dtype());
  check.input("lse", args.lse, {s_q, h_q}, {real}, device);
  const Dim entries{params.problem.dense ? "s_kv" : "topk", params.problem.topk};
  check.output("attn_sum", args.attn_sum, {s_q, entries}, {real}, device);

  params.lse = rows_of<const void*>(args.lse, 0);
  params.attn_sum = rows_of<void*>(args.attn_sum, 0);
  return params;
}

void check_args_for_sm90(const DistributionArgs& args, const Problem& problem) {
  const Check check(kOperation);
  check_for_sm90(check, "q", args.q);
  check_for_sm90(check, "kv", args.kv);
  check_sizes_for_sm90(check, problem);
}

Backend run(const DistributionArgs& args, const RunOptions& options) {
  const DistributionParams params = check_args(args);
  constexpr Backend kImplemented[] = {Backend::sm90, Backend::cpu};
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) check_args_for_sm90(args, params.problem);
  if (options.dry_run) return backend;
  Check(kOperation)
      .apart({{"attn_sum", args.attn_sum}}, {{"q", args.q},
                                             {"kv", args.kv},
                                             {"indices", args.indices},
                                             {"topk_length", args.topk_length},
                                             {"key_start", args.key_start},
                                             {"key_end", args.key_end},
                                             {"lse", args.lse}});
  if (args.attn_sum.numel() == 0) return backend;
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
  return recorded(kOperation, args, options, run);
}

}  // namespace winnow::sparse_mla
