#include "winnow/compressor/backward/backward.h"

#include "winnow/compressor/backward/backward_contract.h"
#include "winnow/compressor/backward/backward_impl.h"
#include "winnow/core/check.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"

namespace winnow::compressor {
namespace {

constexpr std::string_view kOperation = kBackward.operation;

Backend run(const BackwardArgs& args, const RunOptions& options) {
  kBackward.check(args);
  constexpr Backend kImplemented[] = {Backend::cpu};
  const Backend backend = choose_backend(kOperation, args.kv.device(), options, kImplemented);
  if (options.dry_run) return backend;
  kBackward.apart(args);
  const Problem problem = problem_of(args);
  const std::vector<Sequence> sequences = read_sequences(
      kOperation,
      {args.cu_seqlens, args.cu_rows, args.first_position, problem.tokens, problem.ratio});
  check_rows(Check(kOperation), sequences, problem.ratio, "d_rows", args.d_rows.size(0), args.cos);
  run_on_cpu(kOperation, cpu_kernels().compressor_backward,
             BackwardParams{problem, sequences, args.d_rows.dtype(), args.d_kv.dtype(),
                            args.d_gate.dtype(), rows_of<const void*>(args.d_rows, 0),
                            rows_of<void*>(args.d_kv, 0), rows_of<void*>(args.d_gate, 0),
                            rows_of<void*>(args.d_position_bias, 0), args.d_norm_weight.data()});
  return backend;
}

}  // namespace

Backend backward(const BackwardArgs& args, const RunOptions& options) {
  return recorded(kBackward, args, options, run);
}

}  // namespace winnow::compressor
