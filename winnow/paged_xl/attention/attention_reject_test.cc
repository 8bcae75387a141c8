// paged_xl::attention: what it refuses, and that nothing is written then.
#include <limits>

#include "winnow/paged_xl/test_step.h"

namespace winnow::paged_xl {
namespace {

// Rejections: nothing is written, and the next good call works.
class AttentionRejects : public ::testing::Test {
 protected:
  AttentionRejects()
      : step_(make_step({.name = "reject", .context_lens = {20, 33, 0}})),
        fused_(make_step({.name = "reject", .mode = Mode::fused, .context_lens = {20, 33, 0}})),
        out_(DType::f32, {3, 4, 64}),
        good_(step_.attention_args()),
        fused_args_(fused_.attention_args()) {
    testing::fill_unwritten(out_);
    good_.out = out_;
    fused_args_.out = out_;
    args_ = good_;
  }
  ~AttentionRejects() override {
    EXPECT_EQ(testing::count_unwritten(out_.view()), out_.numel());
    run_checked(make_step({.name = "after"}).attention_args());
  }

  // A call with args_ is refused so. Afterwards they are good again.
  void expect_error(const std::string& message) {
    expect_refusal([&] { attention(args_); }, "paged_xl::attention: " + message);
    args_ = good_;
  }

  Step step_, fused_;
  Tensor out_;
  AttentionArgs good_, fused_args_, args_;
};

TEST_F(AttentionRejects, BlocksOutsideTheCache) {
  for (const std::int32_t block : {-1, 9999, std::numeric_limits<std::int32_t>::min()}) {
    step_.block_tables.view().at<std::int32_t>(1, 2) = block;
    expect_error(
        "block_tables: want a block of [0, 14) for each of the 3 blocks that "
        "sequence 1 needs, got " +
        std::to_string(block) + " at position 2");
  }
}

TEST_F(AttentionRejects, LengthsNegativeOrBeyondTheTable) {
  step_.context_lens.view().at<std::int32_t>(1) = -2;
  expect_error(
      "context_lens: want 0 to 96 (block_tables holds 6 blocks of 16 slots), got "
      "-2 for sequence 1");
  step_.context_lens.view().at<std::int32_t>(1) = 97;
  expect_error(
      "context_lens: want 0 to 96 (block_tables holds 6 blocks of 16 slots), got "
      "97 for sequence 1");
}

TEST_F(AttentionRejects, LengthsBeyondMatrixBd) {
  args_.matrix_bd = args_.matrix_bd.slice(2, 0, 32);
  expect_error(
      "context_lens: want 0 to 32 (matrix_bd has that many columns), got 33 for "
      "sequence 1");
}

TEST_F(AttentionRejects, LengthsBeyondR) {
  args_ = fused_args_;
  args_.r = args_.r.slice(1, 0, 32);
  expect_error("context_lens: want 0 to 32 (r holds that many distances), got 33 for sequence 1");
}

TEST_F(AttentionRejects, WrongLayouts) {
  args_.key_cache = args_.value_cache;
  expect_error(
      "key_cache: want 5 dimensions [num_blocks, num_kv_heads, head_size/x, "
      "block_size, x], got shape");
  args_.key_cache = args_.key_cache.transpose(2, 3);
  expect_error("key_cache: want each block of a head without gaps");
  args_.value_cache = args_.value_cache.transpose(2, 3);
  expect_error("value_cache: want ");
  args_.query = ConstTensorView(args_.query.data(), DType::f32, {3, 4, 64}, {512, 2, 8});
  expect_error("query: want stride 1 in the last dimension");
  args_.out = TensorView(out_.data(), DType::f32, {3, 4, 64}, {0, 64, 1});
  expect_error("out: want an output whose elements do not share memory");
}

TEST_F(AttentionRejects, OutputsThatOverlap) {
  args_.out = TensorView(const_cast<void*>(args_.query.data()), DType::f32, {3, 4, 64});
  expect_error("out: want memory apart from query, got memory that both use");
  args_.lse = TensorView(out_.data(), DType::f32, {3, 4});
  expect_error("lse: want memory apart from out, got memory that both use");
}

TEST_F(AttentionRejects, WrongSizes) {
  args_.query = args_.query.slice(2, 0, 48);
  expect_error("query: want head_size one of 32, 64, 80, 96, 112, 128, 160, 192, 256, got 48");
  const Tensor small(DType::f32, {2, 2, 64, 12});
  args_.value_cache = small;
  expect_error("value_cache: want block_size one of 8, 16, 32, 64, 128, got 12");
  args_.query = args_.query.slice(1, 0, 3);
  expect_error("key_cache: want num_kv_heads that divides num_heads = 3, got 2");
  args_.context_lens = args_.context_lens.slice(0, 0, 2);
  expect_error("context_lens: want shape [num_seqs=3], got [2]");
  args_.pos_bias_u = args_.pos_bias_u.slice(0, 0, 2);
  expect_error("pos_bias_u: want shape [num_heads=4, head_size=64], got [2, 64]");
}

TEST_F(AttentionRejects, WrongDtypes) {
  const Tensor half(DType::f16, {3, 4, 64}), wide(DType::i64, {3}), ints(DType::i32, {3, 4, 64});
  args_.query = half;
  expect_error("key_cache: want dtype f16, got f32");
  args_.query = ints;
  expect_error("query: want dtype f32 or f16 or bf16 or f64, got i32");
  args_.context_lens = wide;
  expect_error("context_lens: want dtype i32, got i64");
}

TEST_F(AttentionRejects, F64BesideF32) {
  const Step f64 = make_step({.name = "f64", .dtype = DType::f64, .context_lens = {20, 33, 0}});
  Tensor out(DType::f64, {3, 4, 64}), lse(DType::f64, {3, 4});
  AttentionArgs good = f64.attention_args();
  good.out = out;
  good.lse = lse;
  args_ = good;
  args_.lse = TensorView(lse.data(), DType::f32, {3, 4});
  expect_error("lse: want dtype f64, got f32");
  args_ = good;
  args_.matrix_bd = good_.matrix_bd;
  expect_error("matrix_bd: want dtype f64, got f32");
  args_ = good;
  args_.key_cache = good_.key_cache;
  expect_error("key_cache: want dtype f64, got f32");
  args_.lse = lse;
  expect_error("lse: want dtype f32, got f64");
  EXPECT_EQ(attention(good), Backend::cpu);
}

TEST_F(AttentionRejects, PositionTermMissingOrTwice) {
  args_.matrix_bd = {};
  expect_error("matrix_bd: want either matrix_bd or pos_bias_v with r, got neither");
  args_ = fused_args_;
  args_.matrix_bd = good_.matrix_bd;
  expect_error("matrix_bd: want either matrix_bd or pos_bias_v with r, got both");
  args_ = fused_args_;
  args_.r = {};
  expect_error("r: want a tensor [num_heads, max_distance, head_size], got none");
  args_ = fused_args_;
  args_.pos_bias_v = {};
  expect_error("pos_bias_v: want a tensor");
}

TEST_F(AttentionRejects, AbsentTensorsAndOddArguments) {
  args_ = {};
  expect_error("query: want a tensor [num_seqs, num_heads, head_size], got none");
  args_.out = {};
  expect_error("out: want a tensor of shape [num_seqs=3, num_heads=4, head_size=64]");
  args_.scale = std::nan("");
  expect_error("scale: want a finite number");
  args_.query =
      ConstTensorView(static_cast<const char*>(args_.query.data()) + 1, DType::f32, {3, 4, 64});
  expect_error("query: want memory aligned to 4 bytes");
  args_.key_cache = ConstTensorView(args_.key_cache.data(), DType::f32, args_.key_cache.shape(),
                                    args_.key_cache.strides(), {DeviceType::cuda, 0});
  expect_error("key_cache: want device cpu, got cuda:0");
}

TEST_F(AttentionRejects, ADryRunLooksAtNoContents) {
  for (AttentionArgs args : {args_, fused_args_}) {
    for (auto* view :
         {&args.query, &args.key_cache, &args.value_cache, &args.pos_bias_u, &args.matrix_bd,
          &args.pos_bias_v, &args.r, &args.block_tables, &args.context_lens}) {
      *view = testing::without_memory(*view);
    }
    args.out = testing::without_memory(args.out);
    EXPECT_EQ(attention(args, {.dry_run = true}), Backend::cpu);
    args.pos_bias_u = {};
    expect_refusal([&] { attention(args, {.dry_run = true}); },
                   "paged_xl::attention: pos_bias_u: want a tensor");
  }
}

}  // namespace
}  // namespace winnow::paged_xl
