#include "winnow/compressor/backward/backward.h"

#include "winnow/compressor/backward/backward_contract.h"
#include "winnow/compressor/backward/backward_impl.h"
#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"

namespace winnow::compressor {
namespace {

constexpr std::string_view kOperation = kBackward.operation;

constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};

BackwardParams params_of(const BackwardArgs& args, std::span<const Sequence> sequences = {}) {
  return {problem_of(args),
          sequences,
          args.d_rows.size(0),
          args.rows.dtype(),
          args.d_rows.dtype(),
          args.d_kv.dtype(),
          args.d_gate.dtype(),
          rows_of<const void*>(args.rows, 0),
          rows_of<const void*>(args.d_rows, 0),
          args.rstd.data(),
          rows_of<void*>(args.d_kv, 0),
          rows_of<void*>(args.d_gate, 0),
          rows_of<void*>(args.d_position_bias, 0),
          args.d_norm_weight.data()};
}

Backend checked(const BackwardArgs& args, const RunOptions& options) {
  kBackward.check(args);
  const Backend backend = choose_backend(kOperation, args.kv.device(), options, kImplemented);
  if (backend == Backend::cuda) {
    check_for_cuda(Check(kOperation), args.kv, args.d_rows.size(0));
  }
  return backend;
}

// What `workspace` must hold.
std::int64_t workspace_bytes(const BackwardArgs& args, Backend backend) {
  if constexpr (kBuiltWithCuda) {
    if (backend == Backend::cuda) {
      const DeviceGuard guard(args.kv.device());
      return backward_cuda_workspace_bytes(params_of(args));
    }
  }
  return 0;
}

Backend run(const BackwardArgs& args, const RunOptions& options) {
  const Backend backend = checked(args, options);
  const Check check(kOperation);
  const Device device = args.kv.device();
  const TensorView workspace = backend == Backend::cpu ? TensorView{} : args.workspace;
  if (workspace.present()) {
    check.workspace(workspace, workspace_bytes(args, backend), device);
  }
  if (options.dry_run) return backend;
  kBackward.apart(args, workspace);
  const Packed packed{args.cu_seqlens, args.cu_rows, args.first_position, args.kv.size(0),
                      args.position_bias.size(0)};
  std::vector<Sequence> sequences;
  if (checks_contents(kOperation, device, options)) {
    sequences = read_sequences(kOperation, packed, options);
    check_rows(check, sequences, packed.ratio, "d_rows", args.d_rows.size(0), args.cos);
  }
  const BackwardParams params = params_of(args, sequences);
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().compressor_backward, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(device);
    backward_cuda(params, packed, workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend backward(const BackwardArgs& args, const RunOptions& options) {
  return recorded(kBackward, args, options, run);
}

std::int64_t backward_workspace_bytes(const BackwardArgs& args, const RunOptions& options) {
  return workspace_bytes(args, checked(args, options));
}

}  // namespace winnow::compressor
