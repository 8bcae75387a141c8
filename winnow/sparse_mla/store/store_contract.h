// What store() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/sparse_mla/store/store_impl.h"

namespace winnow::sparse_mla {

// Leaves the cache in `params`.
void check_rows_and_cache(const Check& check, const StoreArgs& args, StoreParams& params);

struct StoreTable {
  using Args = StoreArgs;
  static constexpr const char* kOperation = "sparse_mla::store";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple(
        ranks<&Args::rows>,
        input<&Args::rows>("[n, columns]", any_of(bf16),
                           "576 columns for \"fp8_656\", 512 for \"fp8_584\", for \"bf16\" as the "
                           "cache")
            .asked("[n, d_qk=576]")
            .by_rule(),
        output<&Args::cache>("[blocks, block_size, 1, row]", any_of(u8, f8_e4m3, bf16).asked(),
                             "to write into; formats as in decode()")
            .asked("[blocks, block_size=64, 1, d_qk]")
            .by_rule(),
        rule<check_rows_and_cache>,
        input<&Args::slots>("[n]", any_of(i64, i32),
                            "block * block_size + offset; a negative one is skipped"),
        value<&Args::format>("\"fp8_656\", \"fp8_584\" or \"bf16\""), scratch<&Args::workspace>());
  }
};
inline constexpr contract::Contract<StoreTable> kStore;

}  // namespace winnow::sparse_mla
