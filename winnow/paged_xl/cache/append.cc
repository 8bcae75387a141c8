#include "winnow/paged_xl/cache/append.h"

#include <string>

#include "winnow/cpu/entry.h"
#include "winnow/paged_xl/cache/append_contract.h"
#include "winnow/paged_xl/cache/append_impl.h"

namespace winnow::paged_xl {

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

struct Append {
  using Args = AppendArgs;
  using Params = AppendParams;
  static constexpr const auto& kContract = kAppend;
  static constexpr auto kCpu = &CpuKernels::paged_xl_append;

  static Params check_args(const Args& args) {
    Params params;
    kAppend.check(args, params);
    params.num_tokens = args.key.size(0);
    params.key = rows_of<const void*>(args.key, 0, 1);
    params.value = rows_of<const void*>(args.value, 0, 1);
    params.slots = Slots(args.slot_mapping);
    params.key_cache = rows_of<void*>(args.key_cache, 0, 1);
    params.value_cache = rows_of<void*>(args.value_cache, 0, 1);
    return params;
  }
  static std::span<const Backend> backends(const Args&) { return kPortable; }
  // What the kernel holds in a grid dimension.
  static void check_for_gpu(const Check& check, const Args&, const Params& params, Backend) {
    constexpr std::int64_t kMostHeads = 65535, kMostTokens = std::int64_t{INT32_MAX} * 32;
    if (params.cache.num_kv_heads <= kMostHeads && params.num_tokens <= kMostTokens) return;
    check.unsupported("cuda: want num_kv_heads up to 65535 and num_tokens up to 2^36 - 32, got " +
                      std::to_string(params.cache.num_kv_heads) + " and " +
                      std::to_string(params.num_tokens));
  }
  static bool empty(const Args& args, const Params&) { return args.key.numel() == 0; }
  static void check_contents(const Check&, const Args& args, const Params& params,
                             const RunOptions& options) {
    check_slots(kAppend.operation, "slot_mapping", args.slot_mapping,
                {params.cache.num_blocks, params.cache.block_size, "blocks", "token"}, options);
  }
  static void run_on_gpu(const Params& params, Backend, void*, void* stream) {
    append_cuda(params, stream);
  }
};

}  // namespace

Backend append(const AppendArgs& args, const RunOptions& options) {
  return enter<Append>(args, options);
}

}  // namespace winnow::paged_xl
