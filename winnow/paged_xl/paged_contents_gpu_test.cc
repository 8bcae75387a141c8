// Bad contents of lengths, blocks and slots on a GPU, with and without checking mode. Skipped
// without a GPU.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/test_paged_gpu.h"

namespace winnow::paged_xl {
namespace {

// Without checking mode a length counts as far as the tensors go, and a block that the cache does
// not have as tokens that are masked.
TEST_F(PagedGpu, BadContentsAreClampedAndSkipped) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Step bad = make_step({.name = "bad", .dtype = dtype, .context_lens = {70, 33, 40}, .spare = 6});
    // Sequence 0 claims more than matrix_bd holds; sequence 1 a negative length.
    bad.context_lens.view().at<std::int32_t>(0) = std::numeric_limits<std::int32_t>::max();
    bad.context_lens.view().at<std::int32_t>(1) = -5;
    Step good =
        make_step({.name = "bad", .dtype = dtype, .context_lens = {70, 33, 40}, .spare = 6});
    good.context_lens.view().at<std::int32_t>(1) = 0;
    const AttentionArgs good_args = good.attention_args();
    // Blocks of sequence 2 that are none; in the good step they are masked.
    const std::int32_t none[] = {-1, std::numeric_limits<std::int32_t>::min(),
                                 std::numeric_limits<std::int32_t>::max()};
    for (const std::int32_t block : none) {
      bad.block_tables.view().at<std::int32_t>(2, 1) = block;
      testing::fill(good.matrix_bd.view.slice(0, 2, 3).slice(2, 16, 32),
                    -std::numeric_limits<double>::infinity());
      const Step bad_there = bad.on(kGpu);
      AttentionArgs there = bad_there.attention_args();
      there.matrix_bd = there.matrix_bd.slice(2, 0, 70);
      expect_same(run_there(there), run_there(good_args));
    }
    bad.block_tables.view().at<std::int32_t>(2, 1) =
        static_cast<std::int32_t>(bad.key_cache.view.size(0));
    const Step bad_there = bad.on(kGpu);
    AttentionArgs there = bad_there.attention_args();
    there.matrix_bd = there.matrix_bd.slice(2, 0, 70);
    expect_same(run_there(there), run_there(good_args));
  }
}

// The kernels for one sequence do the same.
TEST_F(PagedGpu, BadContentsOfOneSequence) {
  const StepCase shape{
      .name = "bad", .num_heads = 16, .num_kv_heads = 16, .context_lens = {700}, .spare = 6};
  const Step good = make_step(shape);
  for (const std::int32_t length : {-1, std::numeric_limits<std::int32_t>::max()}) {
    Step bad = make_step(shape);
    bad.context_lens.view().at<std::int32_t>(0) = length;
    const Step there = bad.on(kGpu);
    AttentionArgs args = there.attention_args();
    args.matrix_bd = args.matrix_bd.slice(2, 0, 700);
    Step same = make_step(shape);
    same.context_lens.view().at<std::int32_t>(0) = length < 0 ? 0 : 700;
    expect_same(run_there(args), run_there(same.attention_args()));
  }
  for (const std::int32_t block : {-1, static_cast<std::int32_t>(good.key_cache.view.size(0))}) {
    Step bad = make_step(shape);
    bad.block_tables.view().at<std::int32_t>(0, 3) = block;
    Step masked = make_step(shape);
    testing::fill(masked.matrix_bd.view.slice(2, 48, 64), -std::numeric_limits<double>::infinity());
    expect_same(run_there(bad.on(kGpu).attention_args()), run_there(masked.attention_args()));
  }
}

TEST_F(PagedGpu, LengthsBeyondRAreClamped) {
  const Step step = make_step({.name = "r-end", .mode = Mode::fused, .context_lens = {20, 33}});
  Step bad = make_step({.name = "r-end", .mode = Mode::fused, .context_lens = {20, 33}});
  bad.context_lens.view().at<std::int32_t>(1) = 1000;
  const Step there = bad.on(kGpu);
  AttentionArgs args = there.attention_args();
  args.r = args.r.slice(1, 0, 33);
  expect_same(run_there(args), run_there(step.attention_args()));

  Tensor term(DType::f32, {2, 4, 33});
  testing::fill(term, -7);
  Tensor term_there = term.to(kGpu);
  PositionTermArgs term_args = there.position_term_args();
  term_args.r = args.r;
  term_args.matrix_bd = term_there;
  position_term(term_args);
  PositionTermArgs good = step.position_term_args();
  good.matrix_bd = term;
  position_term(good);
  testing::expect_passed(testing::compare("matrix_bd", term_there.to({}),
                                          testing::read(term.view()),
                                          tolerance(Quantity::matrix_bd, DType::f32, 0)));
}

TEST_F(PagedGpu, SlotsBeyondTheCacheAreSkipped) {
  Tensor key(DType::bf16, {4, 2, 32}), slots(DType::i64, {4});
  testing::Random random(1);
  testing::fill_normal(key, random);
  const std::int64_t list[] = {4 * 8, -1, std::numeric_limits<std::int64_t>::max(),
                               std::numeric_limits<std::int64_t>::min()};
  std::ranges::copy(list, slots.values<std::int64_t>().begin());
  Tensor key_cache(DType::bf16, {4, 2, 4, 8, 8}), value_cache(DType::bf16, {4, 2, 32, 8});
  testing::fill_unwritten(key_cache);
  testing::fill_unwritten(value_cache);
  const Tensor key_there = key.to(kGpu), slots_there = slots.to(kGpu);
  Tensor keys = key_cache.to(kGpu), values = value_cache.to(kGpu);
  append({key_there, key_there, slots_there, keys, values});
  EXPECT_TRUE(testing::same_bytes(keys.to({}), key_cache));
  EXPECT_TRUE(testing::same_bytes(values.to({}), value_cache));
}

// Checking mode names what the CPU backend names, writes nothing, and leaves the GPU usable.
class PagedGpuChecks : public PagedGpu {
 protected:
  PagedGpuChecks() : step_(make_step({.name = "check", .context_lens = {20, 33, 0}})) {}
  void TearDown() override { unsetenv("WINNOW_CHECK"); }

  void expect_attention_error(const std::string& message) {
    const Step there = step_.on(kGpu);
    Tensor out(DType::f32, {3, 4, 64});
    testing::fill_unwritten(out);
    Tensor out_there = out.to(kGpu);
    AttentionArgs args = there.attention_args();
    args.out = out_there;
    expect_refusal([&] { attention(args, {.check = true}); }, "paged_xl::attention: " + message);
    setenv("WINNOW_CHECK", "1", 1);
    expect_refusal([&] { attention(args); }, "paged_xl::attention: " + message);
    EXPECT_TRUE(testing::same_bytes(out_there.to({}), out));
    setenv("WINNOW_CHECK", "0", 1);
    attention(args);
  }
  Step step_;
};

TEST_F(PagedGpuChecks, GoodStepsPass) {
  const Step there = step_.on(kGpu);
  EXPECT_TRUE(same_bytes(run_there(there.attention_args(), {.check = true}),
                         run_there(there.attention_args())));
}

TEST_F(PagedGpuChecks, LengthsAreNamed) {
  step_.context_lens.view().at<std::int32_t>(1) = 97;
  expect_attention_error(
      "context_lens: want 0 to 96 (block_tables holds 6 blocks of 16 slots), got 97 for sequence "
      "1");
  step_.context_lens.view().at<std::int32_t>(1) = -1;
  expect_attention_error(
      "context_lens: want 0 to 96 (block_tables holds 6 blocks of 16 slots), got -1 for sequence "
      "1");
  step_.context_lens.view().at<std::int32_t>(1) = 43;
  expect_attention_error(
      "context_lens: want 0 to 42 (matrix_bd has that many columns), got 43 for sequence 1");
}

TEST_F(PagedGpuChecks, BlocksAreNamed) {
  step_.block_tables.view().at<std::int32_t>(1, 2) = 1234;
  expect_attention_error(
      "block_tables: want a block of [0, " + std::to_string(step_.key_cache.view.size(0)) +
      ") for each of the 3 blocks that sequence 1 needs, got 1234 at position 2");
}

TEST_F(PagedGpuChecks, LengthsOfPositionTermAreNamed) {
  step_.context_lens.view().at<std::int32_t>(0) = 41;
  const Step there = step_.on(kGpu);
  Tensor term(DType::f32, {3, 4, 40}, kGpu);
  PositionTermArgs args = there.position_term_args();
  args.matrix_bd = term;
  expect_refusal([&] { position_term(args, {.check = true}); },
                 "paged_xl::position_term: context_lens: want 0 to 40 (matrix_bd has that many "
                 "columns), got 41 for sequence 0");
}

TEST_F(PagedGpuChecks, SlotsAreNamed) {
  Tensor key(DType::bf16, {3, 2, 32}, kGpu), slots(DType::i32, {3});
  Tensor keys(DType::bf16, {4, 2, 4, 8, 8}, kGpu), values(DType::bf16, {4, 2, 32, 8}, kGpu);
  const auto expect_error = [&](std::initializer_list<std::int32_t> list, const std::string& text) {
    std::ranges::copy(list, slots.values<std::int32_t>().begin());
    const Tensor there = slots.to(kGpu);
    expect_refusal([&] { append({key, key, there, keys, values}, {.check = true}); },
                   "paged_xl::append: slot_mapping: " + text);
  };
  expect_error({1, 32, 2}, "want slots below 4 blocks * 8 slots, got slot 32 for token 1");
  expect_error({17, 4, 17}, "want each slot at most once, got slot 17 for token 0 and token 2");
}

}  // namespace
}  // namespace winnow::paged_xl
