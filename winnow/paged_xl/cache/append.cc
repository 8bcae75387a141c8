#include "winnow/paged_xl/cache/append.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/paged_xl/cache/append_contract.h"
#include "winnow/paged_xl/cache/append_impl.h"

namespace winnow::paged_xl {
namespace {

constexpr std::string_view kOperation = kAppend.operation;

}  // namespace

void check_key_and_caches(const Check& check, const AppendArgs& args, AppendParams& params) {
  check.dtype("key", args.key, {DType::f32, DType::f16, DType::bf16, DType::f64},
              {DType::f32, DType::f16, DType::bf16});
  const DType dtype = args.key.dtype();
  const Device device = args.key.device();
  params.cache = check_cache(check, args.key_cache, args.value_cache, dtype, device);
  check.distinct_elements("key_cache", args.key_cache);
  check.distinct_elements("value_cache", args.value_cache);
  check.input("key", args.key,
              {{"num_tokens", args.key.size(0)},
               {"num_kv_heads", params.cache.num_kv_heads},
               {"head_size", params.cache.head_size}},
              {dtype}, device);
}

namespace {

AppendParams check_args(const AppendArgs& args) {
  AppendParams params;
  kAppend.check(args, params);
  params.num_tokens = args.key.size(0);
  params.key = rows_of<const void*>(args.key, 0, 1);
  params.value = rows_of<const void*>(args.value, 0, 1);
  params.slots = Slots(args.slot_mapping);
  params.key_cache = rows_of<void*>(args.key_cache, 0, 1);
  params.value_cache = rows_of<void*>(args.value_cache, 0, 1);
  return params;
}

// What the kernel holds in a grid dimension.
void check_for_cuda(const Check& check, const AppendParams& params) {
  constexpr std::int64_t kMostHeads = 65535, kMostTokens = std::int64_t{INT32_MAX} * 32;
  if (params.cache.num_kv_heads <= kMostHeads && params.num_tokens <= kMostTokens) return;
  check.unsupported("cuda: want num_kv_heads up to 65535 and num_tokens up to 2^36 - 32, got " +
                    std::to_string(params.cache.num_kv_heads) + " and " +
                    std::to_string(params.num_tokens));
}

Backend run(const AppendArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  const AppendParams params = check_args(args);
  const Device device = args.key.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (backend == Backend::cuda) check_for_cuda(check, params);
  if (options.dry_run) return backend;
  kAppend.apart(args);
  if (args.key.numel() == 0) return backend;
  check_slots(kOperation, "slot_mapping", args.slot_mapping,
              {params.cache.num_blocks, params.cache.block_size, "blocks", "token"}, options);
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().paged_xl_append, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(device);
    append_cuda(params, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend append(const AppendArgs& args, const RunOptions& options) {
  return recorded(kAppend, args, options, run);
}

}  // namespace winnow::paged_xl
