// What only a GPU can show of the operations on a paged cache, beyond the case tables: traps of
// their kind, ragged batches, odd addresses, sizes past 2^31, repeats, refusals. Skipped without a
// GPU.
#include <cmath>
#include <utility>
#include <vector>

#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/test_paged_gpu.h"

namespace winnow::paged_xl {
namespace {

// A tensor on the GPU at the end of memory of its own, so that memcheck sees what reads on.
Tensor alone_on_gpu(const ConstTensorView& dense) {
  Tensor copy(dense.dtype(), dense.shape(), kGpu);
  copy_between(copy.data(), kGpu, dense.data(), {},
               static_cast<std::size_t>(dense.numel() * size_of(dense.dtype())));
  return copy;
}

// --- The traps ---

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
  const std::string no_f64 =
      ": want dtype f32 or f16 or bf16 on a GPU (the CPU takes f64), got f64";
  const Step f64 = make_step({.name = "f64", .dtype = DType::f64, .mode = Mode::fused}).on(kGpu);
  Tensor wide(DType::f64, f64.query.view.shape(), kGpu);
  AttentionArgs f64_args = f64.attention_args();
  f64_args.out = wide;
  expect_refusal([&] { attention(f64_args); }, "paged_xl::attention: query" + no_f64);
  PositionTermArgs term = f64.position_term_args();
  term.matrix_bd = f64.matrix_bd.view;
  expect_refusal([&] { position_term(term); }, "paged_xl::position_term: query" + no_f64);
  const Tensor key(DType::f64, {1, 2, 64}, kGpu), slot(DType::i32, {1}, kGpu);
  expect_refusal([&] { append({key, key, slot, f64.key_cache.view, f64.value_cache.view}); },
                 "paged_xl::append: key" + no_f64);
  AttentionArgs args = there.attention_args();
  args.out = out;
  expect_refusal([&] { attention(args, {.backend = Backend::cpu}); },
                 "paged_xl::attention: backend: want one that supports tensors on cuda:0, got cpu");
  expect_same(step);
}

}  // namespace
}  // namespace winnow::paged_xl
