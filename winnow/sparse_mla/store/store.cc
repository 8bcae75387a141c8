#include "winnow/sparse_mla/store/store.h"

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/sparse_mla/store/store_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr std::string_view kOperation = "sparse_mla::store";

StoreParams check_args(const Check& check, const StoreArgs& args) {
  check.rank("rows", args.rows, 2, "[n, columns]");
  const Device device = args.rows.device();
  StoreParams params;
  params.n = args.rows.size(0);
  params.cache = check_cache_output(check, "cache", args.cache, args.format, device);
  const Dim n{"n", params.n};
  check.input("rows", args.rows, {n, {"columns", params.cache.columns}}, {DType::bf16}, device);
  check.input("slots", args.slots, {n}, {DType::i64, DType::i32}, device);
  params.rows = rows_of<const void*>(args.rows, 0);
  params.slots = Slots(args.slots);
  return params;
}

constexpr Backend kImplemented[] = {Backend::cpu};

}  // namespace

Backend store(const StoreArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  const StoreParams params = check_args(check, args);
  const Backend backend = choose_backend(kOperation, args.rows.device(), options, kImplemented);
  if (options.dry_run) return backend;
  check.apart({{"cache", args.cache}}, {{"rows", args.rows}, {"slots", args.slots}});
  if (params.n == 0) return backend;
  // A cache without rows has no slots either, whatever its block_size is.
  const std::int64_t block_size = params.cache.block_size;
  const SlotSpace space{block_size == 0 ? 0 : params.cache.blocks, block_size == 0 ? 1 : block_size,
                        "blocks", "row"};
  check_slots(kOperation, "slots", args.slots, space, options);
  run_on_cpu(kOperation, cpu_kernels().sparse_mla_store, params);
  return backend;
}

std::int64_t store_workspace_bytes(const StoreArgs& args, const RunOptions& options) {
  check_args(Check(kOperation), args);
  choose_backend(kOperation, args.rows.device(), options, kImplemented);
  return 0;
}

}  // namespace winnow::sparse_mla
