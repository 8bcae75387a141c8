// What only a GPU can show of the operations on a paged cache, beyond the case tables: each trap of
// their kind, ragged batches, bad contents with and without checking mode, odd addresses, sizes
// past 2^31, repeats, graph capture. The CPU backend is the reference. Skipped without a GPU.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "winnow/core/device_memory.h"
#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/cases.h"
#include "winnow/paged_xl/test_step.h"
#include "winnow/testing/gpu_test.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::paged_xl {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr Mode kModes[] = {Mode::plain, Mode::fused};

using PagedGpu = testing::GpuTest<Backend::cuda>;

struct Result {
  Tensor out, lse;  // on the host
};

// Runs on the device of the inputs; the outputs hold NaN before.
Result run_there(const AttentionArgs& inputs, const RunOptions& options = {}) {
  const Device device = inputs.query.device();
  Tensor out(inputs.query.dtype(), inputs.query.shape());
  Tensor lse(DType::f32, {inputs.query.size(0), inputs.query.size(1)});
  testing::fill_unwritten(out);
  testing::fill_unwritten(lse);
  out = out.to(device);
  lse = lse.to(device);
  AttentionArgs args = inputs;
  args.out = out;
  args.lse = lse;
  attention(args, options);
  return {out.to({}), lse.to({})};
}

void expect_same(const Result& gpu, const Result& cpu) {
  constexpr double kLargestLogit = 12;  // of unit-variance queries and keys
  testing::expect_passed(
      testing::compare("out", gpu.out, testing::read(cpu.out.view()),
                       tolerance(Quantity::out, cpu.out.dtype(), kLargestLogit)));
  testing::expect_passed(testing::compare("lse", gpu.lse, testing::read(cpu.lse.view()),
                                          tolerance(Quantity::lse, DType::f32, kLargestLogit)));
}

// The same step on the GPU and on the CPU.
void expect_same(const Step& step) {
  expect_same(run_there(step.on(kGpu).attention_args()), run_there(step.attention_args()));
}

bool same_bytes(const Result& a, const Result& b) {
  return testing::same_bytes(a.out, b.out) && testing::same_bytes(a.lse, b.lse);
}

// A tensor on the GPU at the end of memory of its own, so that memcheck sees what reads on.
Tensor alone_on_gpu(const ConstTensorView& dense) {
  Tensor copy(dense.dtype(), dense.shape(), kGpu);
  copy_between(copy.data(), kGpu, dense.data(), {},
               static_cast<std::size_t>(dense.numel() * size_of(dense.dtype())));
  return copy;
}

// --- The traps ---

TEST_F(PagedGpu, BlockTableIsIndexedByBlock) {
  Step step = make_step({.name = "by-block", .context_lens = {40, 17}, .spare = 20});
  for (std::int64_t s = 0; s < 2; ++s) {
    for (std::int64_t b = s == 0 ? 3 : 2; b < step.block_tables.size(1); ++b) {
      step.block_tables.view().at<std::int32_t>(s, b) =
          step.block_tables.view().at<std::int32_t>(1 - s, 0);
    }
  }
  expect_same(step);
}

TEST_F(PagedGpu, BlockTableIsNotReadPastTheLastBlock) {
  for (const auto& [mode, heads] :
       {std::pair{Mode::plain, 4}, {Mode::fused, 4}, {Mode::plain, 16}, {Mode::fused, 16}}) {
    const Step step = make_step({.name = "table-end",
                                 .mode = mode,
                                 .num_heads = heads,
                                 .num_kv_heads = heads,
                                 .context_lens = {48}});
    const Step there = step.on(kGpu);
    const Tensor table =
        alone_on_gpu(ConstTensorView(step.block_tables.data(), DType::i32, {1, 3}));
    AttentionArgs args = there.attention_args();
    // What it claims beyond its memory belongs to no other tensor: allocations have 512 bytes.
    args.block_tables = ConstTensorView(table.data(), DType::i32, {1, 100}, kGpu);
    expect_same(run_there(args), run_there(step.attention_args()));
  }
}

TEST_F(PagedGpu, BlocksPastTheContextAreNotRead) {
  // The caches claim blocks that are not theirs, and the table names one of them. They stand at the
  // end of allocations that are large, so that outputs are elsewhere.
  const Step step =
      make_step({.name = "blocks-end", .head_size = 32, .context_lens = {48}, .spare = 0});
  ASSERT_EQ(step.key_cache.view.size(0), 3);
  const Step there = step.on(kGpu);
  Tensor tables(DType::i32, {1, 4});
  for (std::int64_t b = 0; b < 4; ++b) {
    tables.view().at<std::int32_t>(0, b) =
        b < 3 ? step.block_tables.view().at<std::int32_t>(0, b) : 99;
  }
  const Tensor tables_there = tables.to(kGpu);
  AttentionArgs args = there.attention_args();
  constexpr std::int64_t kLarge = 8 << 20;
  const auto at_the_end = [&](const Tensor& memory, const TensorView& cache) {
    const std::int64_t bytes = cache.numel() * size_of(DType::f32);
    void* const place = static_cast<char*>(const_cast<void*>(memory.data())) + kLarge - bytes;
    copy_between(place, kGpu, cache.data(), kGpu, static_cast<std::size_t>(bytes));
    return place;
  };
  const Tensor keys(DType::u8, {kLarge}, kGpu), values(DType::u8, {kLarge}, kGpu);
  args.key_cache =
      ConstTensorView(at_the_end(keys, there.key_cache.view), DType::f32, {100, 2, 8, 16, 4}, kGpu);
  args.value_cache = ConstTensorView(at_the_end(values, there.value_cache.view), DType::f32,
                                     {100, 2, 32, 16}, kGpu);
  args.block_tables = tables_there;
  expect_same(run_there(args), run_there(step.attention_args()));
}

TEST_F(PagedGpu, UnusedSlotsOfTheTailMayHoldNaN) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t block_size : {8, 16, 128}) {
      for (const std::int32_t length : {1, 7, 9, 15, 17, 31, 127}) {
        const Step step = make_step({.name = "tail",
                                     .dtype = dtype,
                                     .block_size = block_size,
                                     .context_lens = {length, 2 * length}});
        expect_same(step);
      }
    }
  }
}

TEST_F(PagedGpu, MatrixBdHasItsOwnRowStride) {
  for (const std::int64_t spare : {0, 1, 41}) {
    expect_same(make_step({.name = "bd-stride", .context_lens = {5, 40, 23}, .spare = spare}));
  }
}

TEST_F(PagedGpu, BiasPerHeadIsNotReadPerSequence) {
  for (const Mode mode : kModes) {
    const Step step = make_step({.name = "bias", .mode = mode, .context_lens = {5, 6, 7}});
    const Step there = step.on(kGpu);
    // Anything past one bias of 4 heads is outside of its memory.
    const Tensor u = alone_on_gpu(step.pos_bias_u.storage),
                 v = alone_on_gpu(step.pos_bias_v.storage);
    AttentionArgs args = there.attention_args();
    args.pos_bias_u = u;
    if (mode == Mode::fused) args.pos_bias_v = v;
    expect_same(run_there(args), run_there(step.attention_args()));
  }
}

TEST_F(PagedGpu, BiasPerSequenceIsNotReadPerHeadOnly) {
  for (const Mode mode : kModes) {
    const Step step = make_step({.name = "bias-seq", .mode = mode, .bias_per_sequence = true});
    const Step there = step.on(kGpu);
    expect_same(step);
    AttentionArgs args = there.attention_args();
    args.pos_bias_u = ConstTensorView(args.pos_bias_u.data(), DType::f32, {4, 64}, kGpu);
    EXPECT_FALSE(same_bytes(run_there(args), run_there(there.attention_args())));
  }
}

TEST_F(PagedGpu, LongContextsWork) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Mode mode : kModes) {
      expect_same(make_step({.name = "long",
                             .dtype = dtype,
                             .mode = mode,
                             .num_heads = 2,
                             .num_kv_heads = 1,
                             .head_size = 32,
                             .context_lens = {131072 + 7, 3}}));
    }
  }
}

// The cache spans 16 GB; block 40,000 begins past 2^31 bytes, block 80,000 past 2^32.
TEST_F(PagedGpu, BlocksMayLieBeyondTwoToTheThirtyOneBytes) {
  constexpr std::int64_t kBlocks = 130001, kHeads = 8, kBlockElements = kHeads * 128 * 16;
  const Step step = make_step({.name = "far",
                               .num_heads = kHeads,
                               .num_kv_heads = kHeads,
                               .head_size = 128,
                               .context_lens = {40, 16},
                               .spare = 0});
  Step there = step.on(kGpu);
  const Tensor keys(DType::f32, {kBlocks, kHeads, 32, 16, 4}, kGpu);
  const Tensor values(DType::f32, {kBlocks, kHeads, 128, 16}, kGpu);
  const std::int32_t far[] = {40000, 80000, 32768, 130000};
  ASSERT_EQ(step.key_cache.view.size(0), 4);
  for (std::int64_t b = 0; b < 4; ++b) {
    for (const auto& [to, from] :
         {std::pair{&keys, &step.key_cache}, {&values, &step.value_cache}}) {
      copy_between(static_cast<char*>(const_cast<void*>(to->data())) + far[b] * kBlockElements * 4,
                   kGpu, static_cast<const char*>(from->view.data()) + b * kBlockElements * 4, {},
                   kBlockElements * 4);
    }
  }
  Tensor tables = step.block_tables.clone();
  for (std::int32_t& block : tables.values<std::int32_t>()) {
    if (block >= 0 && block < 4) block = far[block];
  }
  const Tensor tables_there = tables.to(kGpu);
  AttentionArgs args = there.attention_args();
  args.key_cache = keys;
  args.value_cache = values;
  args.block_tables = tables_there;
  expect_same(run_there(args), run_there(step.attention_args()));

  // append() writes there too.
  Tensor token(DType::f32, {2, kHeads, 128}), slots(DType::i64, {2});
  testing::Random random(1);
  testing::fill_normal(token, random);
  slots.view().at<std::int64_t>(0) = 40000 * 16 + 3;
  slots.view().at<std::int64_t>(1) = (kBlocks - 1) * 16 + 15;
  const Tensor token_there = token.to(kGpu), slots_there = slots.to(kGpu);
  const auto writable = [](const Tensor& tensor) {
    return TensorView(const_cast<void*>(tensor.data()), DType::f32, tensor.view().shape(), kGpu);
  };
  append({token_there, token_there, slots_there, writable(keys), writable(values)});
  for (const auto& [t, block, offset] :
       {std::array<std::int64_t, 3>{0, 40000, 3}, {1, kBlocks - 1, 15}}) {
    Tensor written(DType::f32, {kHeads, 128, 16});
    copy_between(written.data(), {},
                 static_cast<const char*>(values.data()) + block * kBlockElements * 4, kGpu,
                 kBlockElements * 4);
    for (std::int64_t d = 0; d < 128; ++d) {
      ASSERT_EQ(written.view().at<float>(7, d, offset), token.view().at<float>(t, 7, d));
    }
  }
}

// --- Batches ---

TEST_F(PagedGpu, RaggedLengthsWithZerosAmongThem) {
  testing::Random random(4);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Mode mode : kModes) {
      for (const std::int64_t num_seqs : {2, 33, 300}) {
        StepCase shape{.name = "ragged", .dtype = dtype, .mode = mode, .head_size = 32};
        shape.context_lens.clear();
        for (std::int64_t s = 0; s < num_seqs; ++s) {
          const std::int64_t length =
              random.below(3) == 0 ? 0 : random.below(s % 50 == 0 ? 3000 : 90);
          shape.context_lens.push_back(static_cast<std::int32_t>(length));
        }
        expect_same(make_step(shape));
      }
    }
  }
}

// One sequence alone takes kernels of its own where it has enough heads for them.
TEST_F(PagedGpu, OneSequenceAlone) {
  struct Heads {
    std::int64_t num_heads, num_kv_heads, head_size, block_size;
  };
  for (const Heads& heads : {Heads{16, 16, 128, 16},
                             {7, 7, 256, 8},
                             {32, 8, 80, 32},
                             {24, 4, 64, 128},
                             {66, 66, 32, 16},
                             {2, 2, 112, 16}}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const Mode mode : kModes) {
        for (const std::int32_t length : {0, 1, 15, 16, 17, 300, 2500}) {
          expect_same(make_step({.name = "alone",
                                 .dtype = dtype,
                                 .mode = mode,
                                 .num_heads = heads.num_heads,
                                 .num_kv_heads = heads.num_kv_heads,
                                 .head_size = heads.head_size,
                                 .block_size = heads.block_size,
                                 .context_lens = {length}}));
        }
      }
    }
  }
}

// What counts as its length, and blocks that are none.
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

// Parts of all lengths, and query heads that take more than one pass.
TEST_F(PagedGpu, ManyPartsAndPasses) {
  expect_same(make_step({.name = "parts",
                         .dtype = DType::f32,
                         .mode = Mode::fused,
                         .num_heads = 7,
                         .num_kv_heads = 7,
                         .head_size = 256,
                         .context_lens = {12000, 5, 0, 7000}}));
  expect_same(make_step({.name = "passes",
                         .dtype = DType::bf16,
                         .mode = Mode::fused,
                         .num_heads = 18,
                         .num_kv_heads = 3,
                         .head_size = 128,
                         .context_lens = {9000, 11000, 100}}));
}

TEST_F(PagedGpu, TwentyRepeatsAreBitwiseEqual) {
  for (const Mode mode : kModes) {
    for (const std::vector<std::int32_t>& lens :
         {std::vector<std::int32_t>{5000, 1300, 3, 0, 777}, {5003}}) {
      const Step there = make_step({.name = "repeats",
                                    .dtype = DType::bf16,
                                    .mode = mode,
                                    .num_heads = 8,
                                    .num_kv_heads = 4,
                                    .head_size = 128,
                                    .context_lens = lens})
                             .on(kGpu);
      const Result first = run_there(there.attention_args());
      for (int repeat = 0; repeat < 20; ++repeat) {
        ASSERT_TRUE(same_bytes(first, run_there(there.attention_args()))) << "repeat " << repeat;
      }
    }
  }
}

TEST_F(PagedGpu, NaNInACachedTokenReachesOnlyTheSequencesThatUseIt) {
  for (const bool in_key : {true, false}) {
    const Step step = make_step({.name = "nan", .context_lens = {20, 30}});
    const std::int64_t block = step.block_tables.view().at<std::int32_t>(0, 0);
    const TensorView cache = in_key ? step.key_cache.view : step.value_cache.view;
    testing::fill(cache.slice(0, block, block + 1).slice(3, 2, 3), std::nan(""));
    const Result result = run_there(step.on(kGpu).attention_args());
    for (const float value : result.out.values<float>().first(4 * 64)) {
      ASSERT_TRUE(std::isnan(value));
    }
    for (const float value : result.out.values<float>().last(4 * 64)) {
      ASSERT_TRUE(std::isfinite(value));
    }
  }
}

TEST_F(PagedGpu, AddressesNeedOnlyNaturalAlignment) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Mode mode : kModes) {
      const Step step =
          make_step({.name = "odd", .dtype = dtype, .mode = mode, .context_lens = {40, 9}});
      const Step there = step.on(kGpu);
      AttentionArgs args = there.attention_args();
      // Base pointers one element beyond any alignment.
      const auto shift = [&](const Tensor& from, Tensor& to) {
        to = Tensor(dtype, {from.numel() + 1}, kGpu);
        char* data = static_cast<char*>(to.data()) + size_of(dtype);
        copy_between(data, kGpu, from.data(), kGpu,
                     static_cast<std::size_t>(from.numel() * size_of(dtype)));
        return TensorView(data, dtype, from.view().shape(), kGpu);
      };
      Tensor key, value, query, u, r;
      args.key_cache = shift(there.key_cache.storage, key);
      args.value_cache = shift(there.value_cache.storage, value);
      args.query = shift(there.query.storage, query);
      args.pos_bias_u = shift(there.pos_bias_u.storage, u);
      if (mode == Mode::fused) args.r = shift(there.r.storage, r);
      expect_same(run_there(args), run_there(step.attention_args()));
    }
  }
}

// --- Bad contents ---

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

// --- Arguments ---

TEST_F(PagedGpu, RefusesAndWorksOn) {
  const Step step = make_step({.name = "refuse", .context_lens = {20, 33, 0}});
  const Step there = step.on(kGpu);
  Tensor out(DType::f32, {3, 4, 64}, kGpu);
  const auto expect_error = [&](auto change, const std::string& message) {
    AttentionArgs args = there.attention_args();
    args.out = out;
    change(args);
    expect_refusal([&] { attention(args); }, "paged_xl::attention: " + message);
  };
  expect_error([&](AttentionArgs& args) { args.key_cache = step.key_cache.view; },
               "key_cache: want device cuda:0, got cpu");
  expect_error([&](AttentionArgs& args) { args.context_lens = step.context_lens; },
               "context_lens: want device cuda:0, got cpu");
  Tensor on_host(DType::f32, {3, 4, 64});
  expect_error([&](AttentionArgs& args) { args.out = on_host; },
               "out: want device cuda:0, got cpu");
  const Tensor half(DType::f16, {3, 4, 64}, kGpu);
  expect_error([&](AttentionArgs& args) { args.query = half; },
               "key_cache: want dtype f16, got f32");
  AttentionArgs args = there.attention_args();
  args.out = out;
  expect_refusal([&] { attention(args, {.backend = Backend::cpu}); },
                 "paged_xl::attention: backend: want one that supports tensors on cuda:0, got cpu");
  expect_same(step);
}

TEST_F(PagedGpu, EmptyProblemsSucceed) {
  for (const Mode mode : kModes) {
    expect_same(make_step({.name = "empty", .mode = mode, .context_lens = {}}));
    expect_same(make_step({.name = "empty", .mode = mode, .context_lens = {0, 0, 0}}));
  }
  const Step step = make_step({.name = "empty", .context_lens = {0, 0}, .spare = 0});
  expect_same(step);  // no block, no column
  Tensor none(DType::bf16, {0, 2, 32}, kGpu), slots(DType::i64, {0}, kGpu);
  Tensor keys(DType::bf16, {4, 2, 4, 8, 8}, kGpu), values(DType::bf16, {4, 2, 32, 8}, kGpu);
  append({none, none, slots, keys, values});
}

#if WINNOW_WITH_CUDA

using testing::CudaStream;
using testing::Graph;

// A decode loop in GPU memory whose lengths, slots and tokens change between steps.
struct Loop {
  static constexpr std::int64_t kHeads = 8, kKvHeads = 4, kDim = 64, kBlockSize = 16;
  static constexpr std::int64_t kBlocksEach = 70, kColumns = kBlocksEach * kBlockSize;
  std::int64_t num_seqs;
  Tensor key_cache, value_cache, key, value, query, bias, r, term;
  Tensor slots, lens, tables, plain, fused, lse;

  explicit Loop(std::int64_t sequences = 3) : num_seqs(sequences) {
    testing::Random random(5);
    const auto random_tensor = [&](std::initializer_list<std::int64_t> shape) {
      Tensor tensor(DType::bf16, shape);
      testing::fill_normal(tensor, random);
      return tensor.to(kGpu);
    };
    key_cache = random_tensor({num_seqs * kBlocksEach, kKvHeads, kDim / 8, kBlockSize, 8});
    value_cache = random_tensor({num_seqs * kBlocksEach, kKvHeads, kDim, kBlockSize});
    key = random_tensor({num_seqs, kKvHeads, kDim});
    value = random_tensor({num_seqs, kKvHeads, kDim});
    query = random_tensor({num_seqs, kHeads, kDim});
    bias = random_tensor({kHeads, kDim});
    r = random_tensor({kHeads, kColumns, kDim});
    term = Tensor(DType::f32, {num_seqs, kHeads, kColumns}, kGpu);
    plain = Tensor(DType::bf16, {num_seqs, kHeads, kDim}, kGpu);
    fused = Tensor(DType::bf16, {num_seqs, kHeads, kDim}, kGpu);
    lse = Tensor(DType::f32, {num_seqs, kHeads}, kGpu);
    Tensor table(DType::i32, {num_seqs, kBlocksEach});
    testing::fill_distinct(TensorView(table.data(), DType::i32, {num_seqs * kBlocksEach}), random,
                           num_seqs * kBlocksEach);
    tables = table.to(kGpu);
    slots = Tensor(DType::i64, {num_seqs}, kGpu);
    lens = Tensor(DType::i32, {num_seqs}, kGpu);
  }

  // New lengths and the slots that belong to them.
  void set_step(testing::Random& random) {
    const Tensor table = tables.to({});
    Tensor next_lens(DType::i32, {num_seqs}), next_slots(DType::i64, {num_seqs});
    for (std::int64_t s = 0; s < num_seqs; ++s) {
      const std::int64_t length = random.below(kColumns + 1);
      next_lens.view().at<std::int32_t>(s) = static_cast<std::int32_t>(length);
      const std::int64_t last = length - 1;
      next_slots.view().at<std::int64_t>(s) =
          length == 0 ? -1
                      : table.view().at<std::int32_t>(s, last / kBlockSize) * kBlockSize +
                            last % kBlockSize;
    }
    copy_between(lens.data(), kGpu, next_lens.data(), {}, num_seqs * 4);
    copy_between(slots.data(), kGpu, next_slots.data(), {}, num_seqs * 8);
  }

  void run(const RunOptions& options) {
    append({key, value, slots, key_cache, value_cache}, options);
    position_term({query, bias, r, lens, term}, options);
    AttentionArgs args = fused_args();
    args.pos_bias_v = args.r = {};
    args.matrix_bd = term;
    args.out = plain;
    attention(args, options);
    args = fused_args();
    args.out = fused;
    args.lse = lse;
    attention(args, options);
  }

  // Without outputs.
  AttentionArgs fused_args() const {
    AttentionArgs args;
    args.query = query;
    args.key_cache = key_cache;
    args.value_cache = value_cache;
    args.pos_bias_u = bias;
    args.pos_bias_v = bias;
    args.r = r;
    args.block_tables = tables;
    args.context_lens = lens;
    return args;
  }

  std::vector<Tensor> results() const {
    std::vector<Tensor> list;
    for (const Tensor* one : {&plain, &fused, &lse, &key_cache}) list.push_back(one->to({}));
    return list;
  }
};

bool same_bytes(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::ranges::equal(
      a, b, [](const Tensor& x, const Tensor& y) { return testing::same_bytes(x, y); });
}

// Whatever the first call loads, it loads under capture too. `make test-gpu` runs this test in a
// process of its own, so that it is the first call.
TEST_F(PagedGpu, TheFirstCallMayBeCaptured) {
  Loop captured, eager;
  CudaStream stream;
  testing::Random random(6), same(6);
  captured.set_step(random);
  eager.set_step(same);
  const Graph graph(stream.stream, [&] { captured.run(stream.options()); });
  graph.launch(stream.stream);
  stream.wait();
  eager.run({});
  EXPECT_TRUE(same_bytes(captured.results(), eager.results()));
}

// One capture of a whole step, replayed with new lengths in the same memory.
TEST_F(PagedGpu, GraphReplaysWithNewLengths) {
  for (const std::int64_t num_seqs : {3, 1}) {
    Loop captured(num_seqs), eager(num_seqs);
    CudaStream stream;
    testing::Random random(7), same(7);
    const Graph graph(stream.stream, [&] { captured.run(stream.options()); });
    for (int replay = 0; replay < 1000; ++replay) {
      captured.set_step(random);
      graph.launch(stream.stream);
      stream.wait();
      eager.set_step(same);
      eager.run({});
      if (replay % 50 != 0 && replay != 999) continue;
      ASSERT_TRUE(same_bytes(captured.results(), eager.results()))
          << num_seqs << " sequences, replay " << replay;
    }
  }
}

// Two graphs on the same inputs, at the same time on two streams.
TEST_F(PagedGpu, GraphsShareTheirInputs) {
  Loop loop;
  testing::Random random(8);
  loop.set_step(random);
  loop.run({});
  const AttentionArgs args = loop.fused_args();
  const Result expected = run_there(args);
  CudaStream streams[2];
  Tensor outs[2];
  AttentionArgs own[2] = {args, args};
  for (int i = 0; i < 2; ++i) {
    outs[i] = Tensor(DType::bf16, {loop.num_seqs, Loop::kHeads, Loop::kDim}, kGpu);
    own[i].out = outs[i];
  }
  const Graph first(streams[0].stream, [&] { attention(own[0], streams[0].options()); });
  const Graph second(streams[1].stream, [&] { attention(own[1], streams[1].options()); });
  for (int replay = 0; replay < 200; ++replay) {
    first.launch(streams[0].stream);
    second.launch(streams[1].stream);
  }
  for (int i = 0; i < 2; ++i) {
    streams[i].wait();
    EXPECT_TRUE(testing::same_bytes(outs[i].to({}), expected.out));
  }
}

// One sequence alone uses memory that stays with a stream: threads share a stream's, and there are
// more streams than may have some.
TEST_F(PagedGpu, OneSequenceOnManyThreadsAndStreams) {
  Loop loop(1);
  testing::Random random(9);
  loop.set_step(random);
  loop.run({});
  const AttentionArgs args = loop.fused_args();
  const Result expected = run_there(args);
  const auto calls = [&](const std::vector<CudaStream>& streams, int count) {
    std::vector<Tensor> outs;
    for (int i = 0; i < count; ++i) {
      outs.emplace_back(DType::bf16, expected.out.view().shape(), kGpu);
      AttentionArgs own = args;
      own.out = outs.back();
      attention(own, streams[static_cast<std::size_t>(i) % streams.size()].options());
    }
    for (const CudaStream& stream : streams) stream.wait();
    for (const Tensor& out : outs) EXPECT_TRUE(testing::same_bytes(out.to({}), expected.out));
  };
  const std::vector<CudaStream> one(1), many(70);
  calls(many, 210);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { calls(one, 100); });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(PagedGpu, CheckingModeRefusesACapture) {
  Loop loop;
  CudaStream stream;
  RunOptions options = stream.options();
  options.check = true;
  ASSERT_EQ(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeGlobal), 0);
  try {
    position_term({loop.query, loop.bias, loop.r, loop.lens, loop.term}, options);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_STREQ(error.what(),
                 "paged_xl::position_term: checking mode waits for the stream, which a stream in "
                 "capture does not allow");
  }
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream.stream, &graph), 0);
  cudaGraphDestroy(graph);
}

// The current device of the caller stays as it was, and the tensors' device is used.
TEST_F(PagedGpu, RunsOnTheDeviceOfTheTensors) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), 0);
  if (count < 2) GTEST_SKIP() << "one GPU only";
  const Step step = make_step({.name = "second-gpu", .context_lens = {20, 33, 0}});
  ASSERT_EQ(cudaSetDevice(0), 0);
  expect_same(run_there(step.on({DeviceType::cuda, 1}).attention_args()),
              run_there(step.attention_args()));
  int current = -1;
  ASSERT_EQ(cudaGetDevice(&current), 0);
  EXPECT_EQ(current, 0);
}

#endif

}  // namespace
}  // namespace winnow::paged_xl
