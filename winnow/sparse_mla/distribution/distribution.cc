#include "winnow/sparse_mla/distribution/distribution.h"

#include "winnow/cpu/entry.h"
#include "winnow/sparse_mla/distribution/distribution_contract.h"
#include "winnow/sparse_mla/distribution/distribution_impl.h"

namespace winnow::sparse_mla {
namespace {

struct Distribution {
  using Args = DistributionArgs;
  using Params = DistributionParams;
  static constexpr const auto& kContract = kDistribution;
  static constexpr auto kCpu = &CpuKernels::sparse_mla_distribution;

  static Params check_args(const Args& args) {
    kDistribution.check(args);
    return {.problem = problem_of(args),
            .lse = rows_of<const void*>(args.lse, 0),
            .attn_sum = rows_of<void*>(args.attn_sum, 0),
            .extra_attn_sum = rows_of<void*>(args.extra_attn_sum, 0)};
  }
  static std::span<const Backend> backends(const Args& args) { return with_sm90(args.q.dtype()); }
  static void check_for_gpu(const Check& check, const Args& args, const Params& params,
                            Backend backend) {
    sparse_mla::check_for_gpu(check, "q", args.q);
    sparse_mla::check_for_gpu(check, "kv", args.kv);
    sparse_mla::check_for_gpu(check, "extra_kv", args.extra_kv);
    check_sizes_for_gpu(check, backend, params.problem);
  }
  static bool empty(const Args& args, const Params&) {
    return args.attn_sum.numel() == 0 && args.extra_attn_sum.numel() == 0;
  }
  static void run_on_gpu(const Params& params, Backend backend, void*, void* stream) {
    (backend == Backend::sm90 ? distribution_sm90 : distribution_cuda)(params, stream);
  }
};

}  // namespace

Backend distribution(const DistributionArgs& args, const RunOptions& options) {
  return enter<Distribution>(args, options);
}

}  // namespace winnow::sparse_mla
