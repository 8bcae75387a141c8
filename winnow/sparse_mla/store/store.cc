#include "winnow/sparse_mla/store/store.h"

#include <string>

#include "winnow/cpu/entry.h"
#include "winnow/sparse_mla/store/store_contract.h"
#include "winnow/sparse_mla/store/store_impl.h"

namespace winnow::sparse_mla {

void check_rows_and_cache(const Check& check, const StoreArgs& args, StoreParams& params) {
  const Device device = args.rows.device();
  check.that(args.format != CacheFormat::fp8_576, "format", "fp8_656, fp8_584 or bf16", "fp8_576");
  params.cache = check_cache_output(check, "cache", args.cache, args.format, device);
  check.input("rows", args.rows, {{"n", args.rows.size(0)}, {"columns", params.cache.columns}},
              {DType::bf16}, device);
}

namespace {

struct Store {
  using Args = StoreArgs;
  using Params = StoreParams;
  static constexpr const auto& kContract = kStore;
  static constexpr auto kCpu = &CpuKernels::sparse_mla_store;
  static constexpr bool kNeedsWorkspace = true;

  static Params check_args(const Args& args) {
    Params params;
    kStore.check(args, params);
    params.n = args.rows.size(0);
    params.rows = rows_of<const void*>(args.rows, 0);
    params.slots = Slots(args.slots);
    return params;
  }
  static std::span<const Backend> backends(const Args&) { return kPortable; }
  static void check_for_gpu(const Check& check, const Args& args, const Params& params, Backend) {
    constexpr std::int64_t kAlignment = 16, kMostRows = std::int64_t{1} << 31;
    check.aligned("rows", args.rows, kAlignment);
    check_cache_for_gpu(check, "cache", args.cache, args.format);
    check.that(params.n < kMostRows, "rows", "fewer than 2^31 rows", std::to_string(params.n));
  }
  static bool empty(const Args&, const Params& params) { return params.n == 0; }
  static std::int64_t workspace_bytes(const Params& params, Backend) {
    return store_cuda_workspace_bytes(params);
  }
  static void check_contents(const Check&, const Args& args, const Params& params,
                             const RunOptions& options) {
    check_slots(kStore.operation, "slots", args.slots, slot_space(params.cache, "row"), options);
  }
  static void run_on_gpu(const Params& params, Backend, void* workspace, void* stream) {
    store_cuda(params, workspace, stream);
  }
};

}  // namespace

Backend store(const StoreArgs& args, const RunOptions& options) {
  return enter<Store>(args, options);
}

std::int64_t store_workspace_bytes(const StoreArgs& args, const RunOptions& options) {
  return workspace_bytes_of<Store>(args, options);
}

}  // namespace winnow::sparse_mla
