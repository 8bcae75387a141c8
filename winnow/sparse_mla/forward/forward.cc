#include "winnow/sparse_mla/forward/forward.h"

#include "winnow/cpu/entry.h"
#include "winnow/sparse_mla/forward/forward_contract.h"
#include "winnow/sparse_mla/forward/forward_impl.h"

namespace winnow::sparse_mla {
namespace {

struct Forward {
  using Args = ForwardArgs;
  using Params = ForwardParams;
  static constexpr const auto& kContract = kForward;
  static constexpr auto kCpu = &CpuKernels::sparse_mla_forward;
  static constexpr bool kNeedsWorkspace = false;

  static Params check_args(const Args& args) {
    kForward.check(args);
    return {.problem = problem_of(args),
            .in_list_order = args.in_list_order,
            .lse_of_nothing = lse_of_nothing(args),
            .out = rows_of<void*>(args.out, 0, 1),
            .attn_sink = rows_of<const void*>(args.attn_sink, 0),
            .max_logits = rows_of<void*>(args.max_logits, 0, 1),
            .lse = rows_of<void*>(args.lse, 0, 1)};
  }
  static std::span<const Backend> backends(const Args& args) { return with_sm90(args.q.dtype()); }
  static void check_for_gpu(const Check& check, const Args& args, const Params& params,
                            Backend backend) {
    sparse_mla::check_for_gpu(check, "q", args.q);
    sparse_mla::check_for_gpu(check, "kv", args.kv);
    sparse_mla::check_for_gpu(check, "extra_kv", args.extra_kv);
    sparse_mla::check_for_gpu(check, "out", args.out);
    check_sizes_for_gpu(check, backend, params.problem);
  }
  static bool empty(const Args& args, const Params&) { return args.out.numel() == 0; }
  static std::int64_t workspace_bytes(const Params& params, Backend backend) {
    return backend == Backend::sm90 ? forward_sm90_workspace_bytes(params) : 0;
  }
  static void run_on_gpu(const Params& params, Backend backend, void* workspace, void* stream) {
    if (backend == Backend::sm90) return forward_sm90(params, workspace, stream);
    forward_cuda(params, stream);
  }
};

}  // namespace

Backend forward(const ForwardArgs& args, const RunOptions& options) {
  return enter<Forward>(args, options);
}

std::int64_t forward_workspace_bytes(const ForwardArgs& args, const RunOptions& options) {
  return workspace_bytes_of<Forward>(args, options);
}

}  // namespace winnow::sparse_mla
