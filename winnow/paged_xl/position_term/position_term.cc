#include "winnow/paged_xl/position_term/position_term.h"

#include <algorithm>
#include <string>

#include "winnow/core/on_host.h"
#include "winnow/cpu/entry.h"
#include "winnow/paged_xl/position_term/position_term_contract.h"
#include "winnow/paged_xl/position_term/position_term_impl.h"

namespace winnow::paged_xl {
namespace {

struct PositionTerm {
  using Args = PositionTermArgs;
  using Params = PositionTermParams;
  static constexpr const auto& kContract = kPositionTerm;
  static constexpr auto kCpu = &CpuKernels::paged_xl_position_term;

  static Params check_args(const Args& args) {
    kPositionTerm.check(args);
    Params params;
    params.dtype = args.query.dtype();
    params.num_seqs = args.query.size(0);
    params.num_heads = args.query.size(1);
    params.head_size = args.query.size(2);
    params.pos_bias_v = pos_bias_of(args.pos_bias_v);
    params.r = rows_of<const void*>(args.r, 0, 1);
    params.context_lens = static_cast<const std::int32_t*>(args.context_lens.data());
    params.query = rows_of<const void*>(args.query, 0, 1);
    params.matrix_bd = rows_of<void*>(args.matrix_bd, 0, 1);
    params.matrix_bd_dtype = args.matrix_bd.dtype();
    params.max_context = std::min(args.matrix_bd.size(2), args.r.size(1));
    return params;
  }
  static std::span<const Backend> backends(const Args&) { return kPortable; }
  // What the kernel holds in a grid dimension or goes through in every warp.
  static void check_for_gpu(const Check& check, const Args&, const Params& params, Backend) {
    constexpr std::int64_t kMostSeqs = 1 << 20, kMostHeads = 65535;
    if (params.num_seqs <= kMostSeqs && params.num_heads <= kMostHeads) return;
    check.unsupported("cuda: want num_seqs up to 2^20 and num_heads up to 65535, got " +
                      std::to_string(params.num_seqs) + " and " + std::to_string(params.num_heads));
  }
  static bool empty(const Args& args, const Params&) { return args.query.numel() == 0; }
  static void check_contents(const Check& check, const Args& args, const Params& params,
                             const RunOptions& options) {
    const Device device = args.query.device();
    if (!checks_contents(kPositionTerm.operation, device, options)) return;
    const OnHost<std::int32_t> context_lens(params.context_lens, params.num_seqs, device,
                                            options.stream);
    check_lengths(check, context_lens.data(), params.num_seqs, args.matrix_bd.size(2),
                  "matrix_bd has that many columns");
    check_lengths(check, context_lens.data(), params.num_seqs, args.r.size(1),
                  "r holds that many distances");
  }
  static void run_on_gpu(const Params& params, Backend, void*, void* stream) {
    position_term_cuda(params, stream);
  }
};

}  // namespace

Backend position_term(const PositionTermArgs& args, const RunOptions& options) {
  return enter<PositionTerm>(args, options);
}

}  // namespace winnow::paged_xl
