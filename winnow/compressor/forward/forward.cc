#include "winnow/compressor/forward/forward.h"

#include "winnow/compressor/forward/forward_contract.h"
#include "winnow/compressor/forward/forward_impl.h"
#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"

namespace winnow::compressor {
namespace {

constexpr std::string_view kOperation = kForward.operation;

Backend run(const ForwardArgs& args, const RunOptions& options) {
  kForward.check(args);
  const Check check(kOperation);
  const Device device = args.kv.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (backend == Backend::cuda) check_for_cuda(check, args.kv, args.rows.size(0));
  if (options.dry_run) return backend;
  kForward.apart(args);
  const Problem problem = problem_of(args);
  const Packed packed{args.cu_seqlens, args.cu_rows, args.first_position, problem.tokens,
                      problem.ratio};
  std::vector<Sequence> sequences;
  if (checks_contents(kOperation, device, options)) {
    sequences = read_sequences(kOperation, packed, options);
    check_rows(check, sequences, problem.ratio, "rows", args.rows.size(0), args.cos);
  }
  if (args.rows.size(0) == 0) return backend;
  const ForwardParams params{problem,
                             sequences,
                             args.rows.size(0),
                             args.rows.dtype(),
                             rows_of<void*>(args.rows, 0),
                             args.rstd.data()};
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().compressor_forward, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(device);
    forward_cuda(params, packed, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend forward(const ForwardArgs& args, const RunOptions& options) {
  return recorded(kForward, args, options, run);
}

}  // namespace winnow::compressor
