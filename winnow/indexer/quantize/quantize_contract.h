// What quantize() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/quantize/quantize_impl.h"

namespace winnow::indexer {

// Rows with their scales, or pages with slots. Leaves what it finds in `params`.
void check_all(const Check& check, const QuantizeArgs& args, QuantizeParams& params);

struct QuantizeTable {
  using Args = QuantizeArgs;
  static constexpr const char* kOperation = "indexer::quantize";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple(
        input<&Args::x>("[n, d=128]", any_of(f32, f16, bf16).asked(),
                        "d is 128 or 64; pages take [n, d]")
            .or_as("[n, h, d]")
            .by_rule(),
        value<&Args::power_of_two>("round the scale up to a power of two"),
        output<&Args::rows>("[n, d]", any_of(f8_e4m3, u8)).or_as("[n, h, d]").described().by_rule(),
        output<&Args::scale>("[n]", any_of(f32)).or_as("[n, h]").described().by_rule(),
        optional_output<&Args::pages>("[num_pages, 64 * (d + 4)]", any_of(u8),
                                      "to write into: 64 rows of d bytes, then their 64 scales as "
                                      "float32, the layout of DeepGEMM and vLLM. With slots")
            .by_rule(),
        optional_input<&Args::slots>("[n]", any_of(i64, i32),
                                     "page * 64 + row of the page; a negative one is skipped")
            .by_rule(),
        rule<check_all>);
  }
};
inline constexpr contract::Contract<QuantizeTable> kQuantize;

}  // namespace winnow::indexer
