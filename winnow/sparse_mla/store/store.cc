#include "winnow/sparse_mla/store/store.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/sparse_mla/store/store_contract.h"
#include "winnow/sparse_mla/store/store_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr std::string_view kOperation = kStore.operation;

}  // namespace

void check_rows_and_cache(const Check& check, const StoreArgs& args, StoreParams& params) {
  const Device device = args.rows.device();
  params.cache = check_cache_output(check, "cache", args.cache, args.format, device);
  check.input("rows", args.rows, {{"n", args.rows.size(0)}, {"columns", params.cache.columns}},
              {DType::bf16}, device);
}

namespace {

StoreParams check_args(const StoreArgs& args) {
  StoreParams params;
  kStore.check(args, params);
  params.n = args.rows.size(0);
  params.rows = rows_of<const void*>(args.rows, 0);
  params.slots = Slots(args.slots);
  return params;
}

constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};

// What `workspace` must hold.
std::int64_t workspace_bytes(const StoreParams& params, Backend backend) {
  if (backend == Backend::cpu || params.n == 0) return 0;
  if constexpr (kBuiltWithCuda) return store_cuda_workspace_bytes(params);
  return 0;
}

void check_args_for_gpu(const Check& check, const StoreArgs& args) {
  constexpr std::int64_t kAlignment = 16, kMostRows = std::int64_t{1} << 31;
  check.aligned("rows", args.rows, kAlignment);
  check_cache_for_gpu(check, "cache", args.cache, args.format);
  check.that(args.rows.size(0) < kMostRows, "rows", "fewer than 2^31 rows",
             std::to_string(args.rows.size(0)));
}

Backend run(const StoreArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  const StoreParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.rows.device(), options, kImplemented);
  const std::int64_t scratch = workspace_bytes(params, backend);
  if (backend == Backend::cuda) {
    check_args_for_gpu(check, args);
    if (scratch > 0 && !options.dry_run) {
      check.workspace(args.workspace, scratch, args.rows.device());
    }
  }
  if (options.dry_run) return backend;
  const TensorView workspace = scratch > 0 ? args.workspace : TensorView{};
  kStore.apart(args, workspace);
  if (params.n == 0) return backend;
  // A cache without rows has no slots either, whatever its block_size is.
  const std::int64_t block_size = params.cache.block_size;
  const SlotSpace space{block_size == 0 ? 0 : params.cache.blocks, block_size == 0 ? 1 : block_size,
                        "blocks", "row"};
  check_slots(kOperation, "slots", args.slots, space, options);
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().sparse_mla_store, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.rows.device());
    store_cuda(params, args.workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend store(const StoreArgs& args, const RunOptions& options) {
  return recorded(kStore, args, options, run);
}

std::int64_t store_workspace_bytes(const StoreArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  const StoreParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.rows.device(), options, kImplemented);
  if (backend == Backend::cuda) check_args_for_gpu(check, args);
  return workspace_bytes(params, backend);
}

}  // namespace winnow::sparse_mla
