#include "winnow/compressor/forward/forward.h"

#include "winnow/compressor/forward/forward_contract.h"
#include "winnow/compressor/forward/forward_impl.h"
#include "winnow/core/check.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"

namespace winnow::compressor {
namespace {

constexpr std::string_view kOperation = kForward.operation;

Backend run(const ForwardArgs& args, const RunOptions& options) {
  kForward.check(args);
  constexpr Backend kImplemented[] = {Backend::cpu};
  const Backend backend = choose_backend(kOperation, args.kv.device(), options, kImplemented);
  if (options.dry_run) return backend;
  kForward.apart(args);
  const Problem problem = problem_of(args);
  const std::vector<Sequence> sequences = read_sequences(
      kOperation,
      {args.cu_seqlens, args.cu_rows, args.first_position, problem.tokens, problem.ratio});
  check_rows(Check(kOperation), sequences, problem.ratio, "rows", args.rows.size(0), args.cos);
  if (args.rows.size(0) == 0) return backend;
  run_on_cpu(kOperation, cpu_kernels().compressor_forward,
             ForwardParams{problem, sequences, args.rows.dtype(), rows_of<void*>(args.rows, 0)});
  return backend;
}

}  // namespace

Backend forward(const ForwardArgs& args, const RunOptions& options) {
  return recorded(kForward, args, options, run);
}

}  // namespace winnow::compressor
