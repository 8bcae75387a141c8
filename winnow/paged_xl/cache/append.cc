#include "winnow/paged_xl/cache/append.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/paged_xl/cache/append_impl.h"

namespace winnow::paged_xl {
namespace {

constexpr std::string_view kOperation = "paged_xl::append";

AppendParams check_args(const Check& check, const AppendArgs& args) {
  check.rank("key", args.key, 3, "[num_tokens, num_kv_heads, head_size]");
  check.dtype("key", args.key, {DType::f32, DType::f16, DType::bf16, DType::f64});
  const Device device = args.key.device();
  AppendParams params;
  params.cache = check_cache(check, args.key_cache, args.value_cache, args.key.dtype(), device);
  check.distinct_elements("key_cache", args.key_cache);
  check.distinct_elements("value_cache", args.value_cache);
  params.num_tokens = args.key.size(0);
  const Dim num_tokens{"num_tokens", params.num_tokens};
  const Dim num_kv_heads{"num_kv_heads", params.cache.num_kv_heads};
  const Dim head_size{"head_size", params.cache.head_size};
  check.input("key", args.key, {num_tokens, num_kv_heads, head_size}, {args.key.dtype()}, device);
  check.input("value", args.value, {num_tokens, num_kv_heads, head_size}, {args.key.dtype()},
              device);
  check.input("slot_mapping", args.slot_mapping, {num_tokens}, {DType::i64, DType::i32}, device);

  params.key = rows_of<const void*>(args.key, 0, 1);
  params.value = rows_of<const void*>(args.value, 0, 1);
  params.slot_mapping = args.slot_mapping.data();
  params.wide_slots = args.slot_mapping.dtype() == DType::i64;
  params.key_cache = rows_of<void*>(args.key_cache, 0, 1);
  params.value_cache = rows_of<void*>(args.value_cache, 0, 1);
  return params;
}

// What the kernel holds in a grid dimension.
void check_for_cuda(const Check& check, const AppendParams& params) {
  check_dtype_for_cuda(check, "key", params.cache.dtype);
  constexpr std::int64_t kMostHeads = 65535, kMostTokens = std::int64_t{INT32_MAX} * 32;
  if (params.cache.num_kv_heads <= kMostHeads && params.num_tokens <= kMostTokens) return;
  check.unsupported("cuda: want num_kv_heads up to 65535 and num_tokens up to 2^36 - 32, got " +
                    std::to_string(params.cache.num_kv_heads) + " and " +
                    std::to_string(params.num_tokens));
}

void check_distinct_slots(const Check& check, const AppendParams& params) {
  std::vector<std::pair<std::int64_t, std::int64_t>> written;  // slot, token
  written.reserve(static_cast<std::size_t>(params.num_tokens));
  for (std::int64_t token = 0; token < params.num_tokens; ++token) {
    const std::int64_t slot = params.slot(token);
    if (slot >= 0) written.emplace_back(slot, token);
  }
  std::sort(written.begin(), written.end());
  const auto twice =
      std::adjacent_find(written.begin(), written.end(),
                         [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice == written.end()) return;
  check.that(false, "slot_mapping", "each slot at most once",
             "slot " + std::to_string(twice->first) + " for token " +
                 std::to_string(twice->second) + " and token " +
                 std::to_string((twice + 1)->second));
}

// The contents of `params` are where the host can read them.
void check_contents(const Check& check, const AppendParams& params) {
  const std::int64_t block_size = params.cache.block_size;
  bool ascending = true;  // as in a prompt's slots: needs no sorting to be seen distinct
  std::int64_t last = -1;
  for (std::int64_t token = 0; token < params.num_tokens; ++token) {
    const std::int64_t slot = params.slot(token);
    if (slot < 0) continue;
    if (slot / block_size >= params.cache.num_blocks) {
      check.that(false, "slot_mapping",
                 "slots below " + std::to_string(params.cache.num_blocks) + " blocks * " +
                     std::to_string(block_size) + " slots",
                 "slot " + std::to_string(slot) + " for token " + std::to_string(token));
    }
    ascending = ascending && slot > last;
    last = slot;
  }
  if (ascending) return;
  try {
    check_distinct_slots(check, params);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::resource, std::string(kOperation),
                "out of memory for the comparison of the slots");
  }
}

}  // namespace

Backend append(const AppendArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  const AppendParams params = check_args(check, args);
  const Device device = args.key.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (backend == Backend::cuda) check_for_cuda(check, params);
  if (options.dry_run) return backend;
  check.apart({{"key_cache", args.key_cache}, {"value_cache", args.value_cache}},
              {{"key", args.key}, {"value", args.value}, {"slot_mapping", args.slot_mapping}});
  if (args.key.numel() == 0) return backend;
  if (checks_contents(kOperation, device, options)) {
    const OnHost<char> slots(static_cast<const char*>(params.slot_mapping),
                             params.num_tokens * size_of(args.slot_mapping.dtype()), device,
                             options.stream);
    AppendParams readable = params;
    readable.slot_mapping = slots.data();
    check_contents(check, readable);
  }
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().paged_xl_append, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(device);
    append_cuda(params, options.stream.handle);
  }
  return backend;
}

}  // namespace winnow::paged_xl
