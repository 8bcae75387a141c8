#include "winnow/paged_xl/position_term/position_term.h"

#include <algorithm>
#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/on_host.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/paged_xl/position_term/position_term_contract.h"
#include "winnow/paged_xl/position_term/position_term_impl.h"

namespace winnow::paged_xl {
namespace {

constexpr std::string_view kOperation = kPositionTerm.operation;

PositionTermParams check_args(const PositionTermArgs& args) {
  kPositionTerm.check(args);
  PositionTermParams params;
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

// What the kernel holds in a grid dimension or goes through in every warp.
void check_for_cuda(const Check& check, const PositionTermParams& params) {
  constexpr std::int64_t kMostSeqs = 1 << 20, kMostHeads = 65535;
  if (params.num_seqs <= kMostSeqs && params.num_heads <= kMostHeads) return;
  check.unsupported("cuda: want num_seqs up to 2^20 and num_heads up to 65535, got " +
                    std::to_string(params.num_seqs) + " and " + std::to_string(params.num_heads));
}

void check_contents(const Check& check, const PositionTermArgs& args,
                    const PositionTermParams& params, Stream stream) {
  const OnHost<std::int32_t> context_lens(params.context_lens, params.num_seqs, args.query.device(),
                                          stream);
  check_lengths(check, context_lens.data(), params.num_seqs, args.matrix_bd.size(2),
                "matrix_bd has that many columns");
  check_lengths(check, context_lens.data(), params.num_seqs, args.r.size(1),
                "r holds that many distances");
}

Backend run(const PositionTermArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  const PositionTermParams params = check_args(args);
  const Device device = args.query.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (backend == Backend::cuda) check_for_cuda(check, params);
  if (options.dry_run) return backend;
  kPositionTerm.apart(args);
  if (args.query.numel() == 0) return backend;
  if (checks_contents(kOperation, device, options)) {
    check_contents(check, args, params, options.stream);
  }
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().paged_xl_position_term, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(device);
    position_term_cuda(params, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend position_term(const PositionTermArgs& args, const RunOptions& options) {
  return recorded(kPositionTerm, args, options, run);
}

}  // namespace winnow::paged_xl
