// Lengths, block tables, slots and indices that another thread rewrites during a call, after they
// were checked: the numbers may be wrong then, but nothing outside the tensors is read or written.
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/executor.h"
#include "winnow/cpu/kernels.h"
#include "winnow/cpu/test_modules.h"
#include "winnow/indexer/backward/backward.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/scores_paged/scores_paged.h"
#include "winnow/indexer/topk/topk.h"
#include "winnow/indexer/topk_paged/topk_paged.h"
#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/cache/append_impl.h"
#include "winnow/paged_xl/cases.h"
#include "winnow/paged_xl/position_term/position_term_impl.h"
#include "winnow/sparse_mla/decode/decode.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/sparse_mla/store/store_impl.h"
#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/expect.h"

namespace winnow {
namespace {

using paged_xl::make_step;
using paged_xl::Step;

// Block numbers, lengths and slots that no tensor of these tests has.
constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();

TEST(RewrittenContents, AttentionTakesTokensOfBlocksThatAreNoneForMasked) {
  Step step = make_step({.name = "blocks", .context_lens = {100, 40}});
  const paged_xl::AttentionArgs args = step.attention_args();
  Tensor masked(DType::f32, args.query.shape()), out(DType::f32, args.query.shape());
  // Expected: the tokens of the second and third block of sequence 0 masked by the position term.
  for (std::int64_t h = 0; h < args.query.size(1); ++h) {
    for (std::int64_t j = 16; j < 48; ++j) {
      step.matrix_bd.view.at<float>(0, h, j) = -std::numeric_limits<float>::infinity();
    }
  }
  const Tensor tables = step.block_tables.clone();
  for_each_module([&](const CpuKernels& kernels) {
    std::copy_n(static_cast<const std::int32_t*>(tables.data()), tables.numel(),
                static_cast<std::int32_t*>(step.block_tables.data()));
    kernels.paged_xl_attention(attention_params(args, masked), ThreadExecutor());
    const auto num_blocks = static_cast<std::int32_t>(args.value_cache.size(0));
    for (const auto& [second, third] : {std::pair{kMost, kLeast}, {num_blocks, -1}}) {
      step.block_tables.view().at<std::int32_t>(0, 1) = second;
      step.block_tables.view().at<std::int32_t>(0, 2) = third;
      testing::fill_unwritten(out);
      kernels.paged_xl_attention(attention_params(args, out), ThreadExecutor());
      EXPECT_TRUE(testing::same_bytes(masked, out));
    }
  });
}

TEST(RewrittenContents, AttentionClampsLengths) {
  Step step = make_step({.name = "lengths", .context_lens = {100, 40}, .spare = 0});
  const paged_xl::AttentionArgs args = step.attention_args();
  Tensor wanted(DType::f32, args.query.shape()), out(DType::f32, args.query.shape());
  auto lengths = step.context_lens.values<std::int32_t>();
  for_each_module([&](const CpuKernels& kernels) {
    lengths[0] = 100;
    lengths[1] = 0;
    kernels.paged_xl_attention(attention_params(args, wanted), ThreadExecutor());
    lengths[0] = kMost;
    lengths[1] = kLeast;
    kernels.paged_xl_attention(attention_params(args, out), ThreadExecutor());
    EXPECT_TRUE(testing::same_bytes(wanted, out));
  });
}

TEST(RewrittenContents, PositionTermClampsLengths) {
  const Step step = make_step({.name = "term", .context_lens = {8, 8}});
  const paged_xl::PositionTermArgs args = step.position_term_args();
  constexpr std::int64_t kColumns = 24, kClaimed = 8;
  Tensor wide(DType::f32, {2, args.query.size(1), kColumns});
  Tensor lengths(DType::i32, {2});
  lengths.values<std::int32_t>()[0] = kMost;
  lengths.values<std::int32_t>()[1] = -1;
  ASSERT_GE(args.r.size(1), kClaimed);
  for_each_module([&](const CpuKernels& kernels) {
    testing::fill_unwritten(wide);
    paged_xl::PositionTermParams params;
    params.num_seqs = 2;
    params.num_heads = args.query.size(1);
    params.head_size = args.query.size(2);
    params.query = rows_of<const void*>(args.query, 0, 1);
    params.pos_bias_v = {args.pos_bias_v.data(), 0, args.pos_bias_v.stride(0)};
    params.r = rows_of<const void*>(args.r, 0, 1);
    params.context_lens = lengths.values<std::int32_t>().data();
    params.max_context = kClaimed;
    params.matrix_bd = rows_of<void*>(wide.view(), 0, 1);
    kernels.paged_xl_position_term(params, ThreadExecutor());
    // All that was claimed of sequence 0, and nothing else.
    EXPECT_EQ(testing::count_unwritten(wide.view()), wide.numel() - args.query.size(1) * kClaimed);
  });
}

TEST(RewrittenContents, StoreSkipsSlotsBeyondTheCache) {
  constexpr std::int64_t kBlocks = 4, kClaimed = 2, kBlock = 8, kRow = 656;
  Tensor rows(DType::bf16, {4, 576}), cache(DType::u8, {kBlocks, kBlock, 1, kRow});
  Tensor slots(DType::i64, {4});
  auto slot = slots.values<std::int64_t>();
  slot[0] = 3;
  slot[1] = kClaimed * kBlock;
  slot[2] = std::numeric_limits<std::int64_t>::max();
  slot[3] = std::numeric_limits<std::int64_t>::min();
  sparse_mla::StoreParams params;
  params.n = 4;
  params.rows = rows_of<const void*>(rows.view(), 0);
  params.slots = Slots(slots.view());
  params.cache = {.format = sparse_mla::CacheFormat::fp8_656,
                  .data = cache.values<std::uint8_t>().data(),
                  .blocks = kClaimed,
                  .block_size = kBlock,
                  .columns = 576,
                  .block_stride = kBlock * kRow,
                  .row_stride = kRow};
  for_each_module([&](const CpuKernels& kernels) {
    testing::fill_unwritten(cache);
    kernels.sparse_mla_store(params, ThreadExecutor());
    // One row was written, of zeros and no byte with all bits set.
    EXPECT_EQ(testing::count_unwritten(cache.view()), cache.numel() - kRow);
  });
}

TEST(RewrittenContents, AppendSkipsSlotsBeyondTheCache) {
  constexpr std::int64_t kBlocks = 4, kClaimed = 2, kHeads = 2, kSize = 32, kBlock = 8;
  Tensor key(DType::f32, {4, kHeads, kSize}), value(DType::f32, {4, kHeads, kSize});
  Tensor key_cache(DType::f32, {kBlocks, kHeads, kSize / 4, kBlock, 4});
  Tensor value_cache(DType::f32, {kBlocks, kHeads, kSize, kBlock});
  Tensor slots(DType::i64, {4});
  testing::Random random(1);
  testing::fill_normal(key, random);
  testing::fill_normal(value, random);
  auto slot = slots.values<std::int64_t>();
  slot[0] = 3;
  slot[1] = kClaimed * kBlock;
  slot[2] = std::numeric_limits<std::int64_t>::max();
  slot[3] = std::numeric_limits<std::int64_t>::min();
  for_each_module([&](const CpuKernels& kernels) {
    testing::fill_unwritten(key_cache);
    testing::fill_unwritten(value_cache);
    paged_xl::AppendParams params;
    params.cache = {DType::f32, kClaimed, kHeads, kSize, kBlock};
    params.num_tokens = 4;
    params.key = rows_of<const void*>(key.view(), 0, 1);
    params.value = rows_of<const void*>(value.view(), 0, 1);
    params.slots = Slots(slots.view());
    params.key_cache = rows_of<void*>(key_cache.view(), 0, 1);
    params.value_cache = rows_of<void*>(value_cache.view(), 0, 1);
    kernels.paged_xl_append(params, ThreadExecutor());
    const std::int64_t written = kHeads * kSize;  // of one token
    EXPECT_EQ(testing::count_unwritten(key_cache.view()), key_cache.numel() - written);
    EXPECT_EQ(testing::count_unwritten(value_cache.view()), value_cache.numel() - written);
  });
}

// Calls `call` for a while as another thread writes `odd` and `good` in turn over every number.
// Errors are right; a crash, or a report of the address sanitizer, is what this looks for.
template <class T>
void rewrite_during(Tensor& numbers, T odd, const std::function<void()>& call) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "this is a data race of the caller";
#endif
  const std::vector<T> good(numbers.values<T>().begin(), numbers.values<T>().end());
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    const auto values = numbers.values<T>();
    for (bool bad = true; !stop; bad = !bad) {
      for (std::size_t n = 0; n < values.size(); ++n) {
        *static_cast<volatile T*>(&values[n]) = bad ? odd : good[n];
      }
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  while (std::chrono::steady_clock::now() < end) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    }
  }
  stop = true;
  writer.join();
  std::copy(good.begin(), good.end(), numbers.values<T>().begin());
}

TEST(RewrittenContents, PagedCallsSurviveAnotherThread) {
  Step step = make_step({.name = "race", .context_lens = {100, 40, 700}});
  paged_xl::AttentionArgs args = step.attention_args();
  Tensor out(DType::f32, args.query.shape());
  args.out = out;
  const auto attend = [&] { paged_xl::attention(args); };
  for (const std::int32_t odd : {kMost, kLeast}) {
    rewrite_during(step.block_tables, odd, attend);
    rewrite_during(step.context_lens, odd, attend);
  }
  Tensor key(DType::f32, {64, 2, 64}), slots(DType::i64, {64});
  std::int64_t next = 0;
  for (std::int64_t& slot : slots.values<std::int64_t>()) slot = next++;
  rewrite_during(slots, std::int64_t{1} << 40, [&] {
    paged_xl::append({.key = key,
                      .value = key,
                      .slot_mapping = slots,
                      .key_cache = step.key_cache.view,
                      .value_cache = step.value_cache.view});
  });
}

TEST(RewrittenContents, SparseCallsSurviveAnotherThread) {
  sparse_mla::TestProblem problem({.s_q = 8, .h_q = 2, .s_kv = 40, .topk = 64});
  for (const std::int32_t odd : {kMost, kLeast}) {
    for (Tensor* numbers : {&problem.indices, &problem.topk_length}) {
      rewrite_during(*numbers, odd, [&] {
        sparse_mla::forward(sparse_mla::ForwardOp::args(problem));
        sparse_mla::distribution(sparse_mla::DistributionOp::args(problem));
        sparse_mla::backward(sparse_mla::BackwardOp::args(problem));
      });
    }
  }
}

TEST(RewrittenContents, SparseDecodeSurvivesAnotherThread) {
  Tensor rows(DType::bf16, {32, 576}), cache(DType::u8, {4, 8, 1, 656}), slots(DType::i32, {32});
  std::int32_t next = 0;
  for (std::int32_t& slot : slots.values<std::int32_t>()) slot = next++;
  const auto fill_cache = [&] {
    sparse_mla::store({.rows = rows, .slots = slots, .cache = cache});
  };
  Tensor q(DType::bf16, {2, 1, 4, 576}), indices(DType::i32, {2, 1, 20}), length(DType::i32, {2});
  Tensor out(DType::bf16, {2, 1, 4, 512});
  for (std::int32_t& index : indices.values<std::int32_t>()) index = next++ % 32;
  for (std::int32_t& entries : length.values<std::int32_t>()) entries = 15;
  const auto attend = [&] {
    sparse_mla::decode(
        {.q = q, .cache = cache, .indices = indices, .topk_length = length, .out = out});
  };
  Tensor block_tables(DType::i32, {2, 3}), contexts(DType::i32, {2});
  for (std::int32_t& block : block_tables.values<std::int32_t>()) block = next++ % 4;
  for (std::int32_t& rows_of_sequence : contexts.values<std::int32_t>()) rows_of_sequence = 24;
  const auto attend_all = [&] {
    sparse_mla::decode({.q = q,
                        .cache = cache,
                        .block_tables = block_tables,
                        .context_lens = contexts,
                        .out = out});
  };
  Tensor index_q(DType::f8_e4m3, {2, 1, 4, 64}), pages(DType::u8, {3, indexer::page_bytes(64)});
  Tensor weights(DType::f32, {2, 1, 4}), tables(DType::i32, {2, 8}), lengths(DType::i32, {2});
  Tensor chosen(DType::i32, {2, 1, 20}), count(DType::i32, {2, 1});
  for (std::int32_t& page : tables.values<std::int32_t>()) page = next++ % 3;
  for (std::int32_t& rows_of_sequence : lengths.values<std::int32_t>()) rows_of_sequence = 300;
  const auto choose = [&] {
    indexer::topk_paged({.q = index_q,
                         .pages = pages,
                         .weights = weights,
                         .block_tables = tables,
                         .context_lens = lengths,
                         .indices = chosen,
                         .length = count});
    for (const std::int32_t slot : chosen.values<std::int32_t>()) {
      EXPECT_TRUE(slot >= -1 && slot < 3 * 64) << slot;
    }
  };
  Tensor scores(DType::f32, {2, 1, 500});
  const auto score = [&] {
    indexer::scores_paged({.q = index_q,
                           .pages = pages,
                           .weights = weights,
                           .block_tables = tables,
                           .context_lens = lengths,
                           .scores = scores});
  };
  for (const std::int32_t odd : {kMost, kLeast}) {
    rewrite_during(tables, odd, score);
    rewrite_during(lengths, odd, score);
    rewrite_during(slots, odd, fill_cache);
    rewrite_during(indices, odd, attend);
    rewrite_during(length, odd, attend);
    rewrite_during(block_tables, odd, attend_all);
    rewrite_during(contexts, odd, attend_all);
    rewrite_during(tables, odd, choose);
    rewrite_during(lengths, odd, choose);
  }
}

TEST(RewrittenContents, IndexerCallsSurviveAnotherThread) {
  constexpr std::int64_t kRows = 40000, kFew = 300;
  Tensor q(DType::f32, {2, 1, 64}), k(DType::f32, {kRows, 64}), weights(DType::f32, {2, 1});
  Tensor start(DType::i32, {2}), end(DType::i32, {2}), indices(DType::i32, {2, kFew});
  testing::fill(q, 1);
  testing::fill(weights, 1);
  std::int64_t row = 0;
  for (float& element : k.values<float>()) element = static_cast<float>(row++ / 64);
  for (std::int32_t& rows : end.values<std::int32_t>()) rows = 10;
  for (std::int32_t& index : indices.values<std::int32_t>()) index = 7;
  // A choice from a buffer, and one by passes over the scores, which are other ones in each pass.
  // The columns behind it belong to others.
  for (const std::int64_t topk : {kFew, std::int64_t{33000}}) {
    Tensor chosen(DType::i32, {2, 2 * topk}), length(DType::i32, {2});
    for (std::int32_t& other : chosen.values<std::int32_t>()) other = 77;
    const auto choose = [&](const ConstTensorView& key_end) {
      indexer::topk({.q = q,
                     .k = k,
                     .weights = weights,
                     .key_start = start,
                     .key_end = key_end,
                     .indices = chosen.view().slice(1, 0, topk),
                     .length = length});
    };
    for (const std::int32_t odd : {kMost, kLeast}) {
      rewrite_during(start, odd, [&] { choose(end); });
      rewrite_during(end, odd, [&] { choose(end); });
    }
    rewrite_during(q, -1.0f, [&] { choose({}); });
    for (const double other : testing::read(chosen.view().slice(1, topk, 2 * topk))) {
      ASSERT_EQ(other, 77);
    }
  }
  Tensor scores(DType::f32, {2, kFew}), dq(DType::f32, {2, 1, 64}), dk(DType::f32, {kRows, 64});
  const auto score = [&] {
    const ConstTensorView rows = indices.view(), keys = k.view();
    indexer::scores(
        {.q = q, .k = keys, .weights = weights, .indices = rows, .key_end = end, .scores = scores});
    indexer::backward({.q = q,
                       .k = keys,
                       .weights = weights,
                       .indices = rows,
                       .d_scores = scores,
                       .key_end = end,
                       .dq = dq,
                       .dk = dk,
                       .d_weights = weights.clone()});
  };
  Tensor wide(DType::f32, {2, 2 * kFew});  // the columns behind belong to others
  testing::fill(wide, 77);
  const auto score_from_start = [&] {
    indexer::scores({.q = q,
                     .k = k,
                     .weights = weights,
                     .key_start = start,
                     .key_end = end,
                     .width = kFew,
                     .scores = wide.view().slice(1, 0, kFew)});
  };
  Tensor x(DType::f32, {32, 64}), pages(DType::u8, {2, indexer::page_bytes(64)});
  Tensor slots(DType::i32, {32});
  std::int32_t next = 0;
  for (std::int32_t& slot : slots.values<std::int32_t>()) slot = next++;
  for (const std::int32_t odd : {kMost, kLeast}) {
    rewrite_during(indices, odd, score);
    rewrite_during(end, odd, score);
    rewrite_during(start, odd, score_from_start);
    rewrite_during(end, odd, score_from_start);
    rewrite_during(slots, odd,
                   [&] { indexer::quantize({.x = x, .pages = pages, .slots = slots}); });
  }
  for (const double other : testing::read(wide.view().slice(1, kFew, 2 * kFew))) {
    ASSERT_EQ(other, 77);
  }
}

}  // namespace
}  // namespace winnow
