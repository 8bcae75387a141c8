// What append() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/cache/append_impl.h"

namespace winnow::paged_xl {

// Leaves the cache in `params`.
void check_key_and_caches(const Check& check, const AppendArgs& args, AppendParams& params);

struct AppendTable {
  using Args = AppendArgs;
  static constexpr const char* kOperation = "paged_xl::append";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple(
        ranks<&Args::key>,
        input<&Args::key>("[num_tokens, num_kv_heads=16, head_size=128]",
                          any_of(f32, f16, bf16, f64).on_gpu(f32, f16, bf16).asked(),
                          "the keys of new tokens")
            .by_rule(),
        output<&Args::key_cache>("[num_blocks, num_kv_heads, head_size/x, block_size=16, x]",
                                 as("key"), "x = 16 bytes / size of an element")
            .by_rule(),
        output<&Args::value_cache>("[num_blocks, num_kv_heads, head_size, block_size]", as("key"),
                                   "neither cache may overlap another tensor")
            .by_rule(),
        rule<check_key_and_caches>,
        input<&Args::value>("[num_tokens, num_kv_heads, head_size]", as("key"), "their values"),
        input<&Args::slot_mapping>("[num_tokens]", any_of(i64, i32), "the slot of each token"));
  }
};
inline constexpr contract::Contract<AppendTable> kAppend;

}  // namespace winnow::paged_xl
