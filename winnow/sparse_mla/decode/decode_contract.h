// What decode() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/sparse_mla/decode/decode.h"
#include "winnow/sparse_mla/decode/decode_impl.h"
#include "winnow/sparse_mla/lse_contract.h"

namespace winnow::sparse_mla {

// Rules. What they find they leave in `params`.
void check_chosen_rows(const Check& check, const DecodeArgs& args, DecodeParams& params);
void check_extra_rows(const Check& check, const DecodeArgs& args, DecodeParams& params);
void check_tensor_scales(const Check& check, const DecodeArgs& args);
void check_decode_scale(const Check& check, const DecodeArgs& args, DecodeParams& params);

struct DecodeTable {
  using Args = DecodeArgs;
  static constexpr const char* kOperation = "sparse_mla::decode";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple(
        ranks<&Args::q>,
        input<&Args::q>("[b, s_q, h_q=64, d_qk=576]", any_of(bf16),
                        "d_qk is that of a cache row: 576 for \"fp8_656\" and \"fp8_576\", 512 for "
                        "\"fp8_584\", for \"bf16\" the cache's own")
            .by_rule(),
        input<&Args::cache>("[blocks, block_size, 1, row]", any_of(u8, f8_e4m3, bf16).asked(),
                            "as the format says")
            .asked("[blocks, block_size=64, 1, d_qk]")
            .by_rule(),
        input<&Args::indices>("[b, s_q, topk=64]", any_of(i32),
                              "slots; outside of the cache means absent; None with block_tables")
            .described()
            .by_rule(),
        optional_input<&Args::topk_length>("[b]", any_of(i32),
                                           "entries of each row that count; clamped to [0, topk]")
            .or_as("[b, s_q]")
            .by_rule(),
        optional_input<&Args::block_tables>(
            "[b, n]", any_of(i32),
            "in place of indices, for attention over all rows of each sequence: its blocks in the "
            "cache; those outside of it are ignored")
            .by_rule(),
        optional_input<&Args::context_lens>(
            "[b]", any_of(i32),
            "required with block_tables: cached rows, including those of the step's own queries; "
            "or, [b, s_q], the rows that each query sees")
            .or_as("[b, s_q]")
            .by_rule(),
        value<&Args::causal>(
            "of context_lens [b]: whether each query sees the rows up to its own, or otherwise all "
            "of them. With [b, s_q] both mean the same; without context_lens it must be True"),
        rule<check_chosen_rows>,
        optional_input<&Args::extra_cache>(
            "[extra_blocks, extra_block_size, 1, row]", any_of(u8, f8_e4m3, bf16),
            "a second cache of the same format with a block size of its own, attended in the same "
            "softmax")
            .by_rule(),
        optional_input<&Args::extra_indices>("[b, s_q, extra_topk]", any_of(i32), "its slots")
            .by_rule(),
        optional_input<&Args::extra_topk_length>("[b]", any_of(i32), "its lengths")
            .or_as("[b, s_q]")
            .by_rule(),
        rule<check_extra_rows>,
        optional_input<&Args::attn_sink>("[h_q]", any_of(f32), "a logit per head without a value"),
        optional_input<&Args::q_scale>(
            "[1]", any_of(f32), "of \"fp8_576\": what all queries are multiplied by; 1 if None"),
        optional_input<&Args::kv_scale>(
            "[1]", any_of(f32), "of \"fp8_576\": what all rows are multiplied by; 1 if None"),
        rule<check_tensor_scales>,
        value<&Args::format>(
            "\"fp8_656\" (DeepSeek-V3.2): rows of 512 float8_e4m3fn, 4 float32 scales and 64 "
            "bfloat16; \"fp8_584\" (DeepSeek-V4): in each block rows of 448 float8_e4m3fn and 64 "
            "bfloat16, then for each row 7 scales in ue8m0 and a byte of padding, the stride "
            "between blocks at least block_size * 584 rounded up to a multiple of 576; "
            "\"fp8_576\": "
            "rows of 576 float8_e4m3fn; \"bf16\": rows of 576 or 512"),
        value<&Args::scale>("of the logits; 1 / sqrt(d_qk) if None"),
        value<&Args::batch_invariant>(
            "the result of a query does not depend on the rest of the batch, bit for bit, which "
            "always holds on the CPU. Without it a GPU may be faster"),
        value<&Args::in_list_order>(
            "every sum of a query is formed in one go in the order of its entries, those of the "
            "second cache behind the others, as in forward() with the same argument, which gives "
            "the same bits of the same rows in bf16"),
        flash_mla_lse<Args>(), rule<check_decode_scale>,
        output<&Args::out>("[b, s_q, h_q, d_v:512]", any_of(bf16)),
        optional_output<&Args::lse>("[b, s_q, h_q]", any_of(f32)), scratch<&Args::workspace>());
  }
};
inline constexpr contract::Contract<DecodeTable> kDecode;

}  // namespace winnow::sparse_mla
