// The entry point of an operation: enter() does what every call does, in one order. What differs
// between operations is a struct like the one below. This header is in winnow/cpu because it knows
// the kernels of the CPU. Internal.
//
//   struct Topk {
//     using Args = TopkArgs;
//     using Params = TopkParams;  // what the backends get
//     static constexpr const auto& kContract = kTopk;
//     static constexpr auto kCpu = &CpuKernels::indexer_topk;
//     static Params check_args(const Args&);
//     static std::span<const Backend> backends(const Args&);  // that implement it
//     // What the kernels of GPUs want beyond the contract.
//     static void check_for_gpu(const Check&, const Args&, const Params&, Backend);
//     static bool empty(const Args&, const Params&);  // there is nothing to compute
//     static void run_on_gpu(const Params&, Backend, void* workspace, void* stream);
//
//     // Only with a workspace: what a GPU needs of it, and whether the caller has to pass it.
//     static std::int64_t workspace_bytes(const Params&, Backend);
//     static constexpr bool kNeedsWorkspace = false;
//     // Only with numbers of rows or blocks in tensors.
//     static void check_contents(const Check&, const Args&, const Params&, const RunOptions&);
//   };
#pragma once

#include <cstdint>
#include <span>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"

namespace winnow {

// The backends of an operation that has no kernels of its own for Hopper.
inline constexpr Backend kPortable[] = {Backend::cuda, Backend::cpu};
// Those of one that has: sm90 does not take f16.
inline std::span<const Backend> with_sm90(DType dtype) {
  static constexpr Backend kAll[] = {Backend::sm90, Backend::cuda, Backend::cpu};
  return std::span(kAll).subspan(dtype == DType::f16 ? 1 : 0);
}

namespace detail {

// What the workspace must hold. Call it after check_for_gpu(), whose limits it counts on.
template <class Op>
std::int64_t workspace_bytes(const typename Op::Args& args, const typename Op::Params& params,
                             Backend backend) {
  if (backend == Backend::cpu || Op::empty(args, params)) return 0;
  if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(Op::kContract.device(args));
    return Op::workspace_bytes(params, backend);
  }
  return 0;
}

template <class Op>
Backend run(const typename Op::Args& args, const RunOptions& options) {
  const Check check(Op::kContract.operation);
  const typename Op::Params params = Op::check_args(args);
  const Device device = Op::kContract.device(args);
  const Backend backend =
      choose_backend(Op::kContract.operation, device, options, Op::backends(args));
  TensorView workspace;  // what the call uses of it
  if (backend != Backend::cpu) {
    Op::check_for_gpu(check, args, params, backend);
    if constexpr (requires { Op::kNeedsWorkspace; }) {
      const bool given = args.workspace.present();
      const bool asked = given || (Op::kNeedsWorkspace && !options.dry_run);
      const std::int64_t bytes = asked ? workspace_bytes<Op>(args, params, backend) : 0;
      if (given || bytes > 0) check.workspace(args.workspace, bytes, device);
      if (bytes > 0) workspace = args.workspace;
    }
  }
  if (options.dry_run) return backend;
  Op::kContract.apart(args, workspace);
  if (Op::empty(args, params)) return backend;
  if constexpr (requires { Op::check_contents(check, args, params, options); }) {
    Op::check_contents(check, args, params, options);
  }
  if (backend == Backend::cpu) {
    run_on_cpu(Op::kContract.operation, cpu_kernels().*Op::kCpu, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(device);
    Op::run_on_gpu(params, backend, workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace detail

// Checks the arguments, chooses the backend and runs the operation.
template <class Op>
Backend enter(const typename Op::Args& args, const RunOptions& options) {
  return recorded(Op::kContract, args, options, detail::run<Op>);
}

// What the workspace of such a call must hold.
template <class Op>
std::int64_t workspace_bytes_of(const typename Op::Args& args, const RunOptions& options) {
  const typename Op::Params params = Op::check_args(args);
  const Backend backend = choose_backend(Op::kContract.operation, Op::kContract.device(args),
                                         options, Op::backends(args));
  if (backend != Backend::cpu) {
    Op::check_for_gpu(Check(Op::kContract.operation), args, params, backend);
  }
  return detail::workspace_bytes<Op>(args, params, backend);
}

}  // namespace winnow
