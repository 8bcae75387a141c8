// Tests of paged_xl::attention: the case table, NaN, independence of threads and batch, alignment.
#include <cmath>
#include <cstring>

#include "winnow/paged_xl/test_step.h"

namespace winnow::paged_xl {
namespace {

WINNOW_CASE_TABLE(AttentionCase, "paged_xl::attention");

TEST(Attention, NaNInACachedTokenReachesOnlyTheSequencesThatUseIt) {
  for (const bool in_key : {true, false}) {
    const Step step = make_step({.name = "nan", .context_lens = {20, 30}});
    const std::int64_t block = step.block_tables.view().at<std::int32_t>(0, 0);
    const TensorView cache = in_key ? step.key_cache.view : step.value_cache.view;
    const int slots = 3;
    testing::fill(cache.slice(0, block, block + 1).slice(slots, 2, 3), std::nan(""));
    const Tensor out = run(step.attention_args());
    for (const float value : out.values<float>().first(4 * 64)) ASSERT_TRUE(std::isnan(value));
    for (const float value : out.values<float>().last(4 * 64)) ASSERT_TRUE(std::isfinite(value));
  }
}

TEST(Attention, SameBitsForAnyThreadsBatchAndPlace) {
  for (const Mode mode : {Mode::plain, Mode::fused}) {
    const Step step = make_step(
        {.name = "bits", .dtype = DType::bf16, .mode = mode, .context_lens = {700, 1300, 3}});
    const Tensor first = run(step.attention_args());
    for (const int threads : {1, 2, 3, 7}) {
      const testing::Threads number(threads);
      for (int repeat = 0; repeat < 5; ++repeat) {
        ASSERT_TRUE(testing::same_bytes(first, run(step.attention_args())));
      }
    }
    // The second sequence alone.
    AttentionArgs args = step.attention_args();
    args.query = args.query.slice(0, 1, 2);
    if (mode == Mode::plain) args.matrix_bd = args.matrix_bd.slice(0, 1, 2);
    args.block_tables = args.block_tables.slice(0, 1, 2);
    args.context_lens = args.context_lens.slice(0, 1, 2);
    const Tensor alone = run(args);
    EXPECT_EQ(std::memcmp(alone.data(), static_cast<const char*>(first.data()) + alone.numel() * 2,
                          static_cast<std::size_t>(alone.numel() * 2)),
              0);
  }
}

TEST(Attention, AddressesNeedOnlyNaturalAlignment) {
  // Base pointers one element beyond any alignment.
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Step step = make_step({.name = "odd", .dtype = dtype, .context_lens = {40, 9}});
    AttentionArgs args = step.attention_args();
    const auto shift = [&](const Tensor& from, Tensor& to) {
      to = Tensor(dtype, {from.numel() + 1});
      char* data = static_cast<char*>(to.data()) + size_of(dtype);
      std::memcpy(data, from.data(), static_cast<std::size_t>(from.numel() * size_of(dtype)));
      return TensorView(data, dtype, from.view().shape());
    };
    Tensor key, value, query;
    args.key_cache = shift(step.key_cache.storage, key);
    args.value_cache = shift(step.value_cache.storage, value);
    args.query = shift(step.query.storage, query);
    run_checked(args);
  }
}

}  // namespace
}  // namespace winnow::paged_xl
