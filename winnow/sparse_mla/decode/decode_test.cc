// sparse_mla::decode: the case table, steps worked by hand, bits that do not depend on the batch,
// and what it refuses.
#include "winnow/sparse_mla/decode/decode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/core/parallel.h"
#include "winnow/sparse_mla/decode/decode_split_sm90.h"
#include "winnow/sparse_mla/decode/decode_step_cases.h"
#include "winnow/sparse_mla/decode/test_beside_forward.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/testing/expect.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::expect_error;

WINNOW_CASE_TABLE(DecodeCases, "sparse_mla::decode");

// Two rows with logits 0 and log 3 * ..., stored and attended: weights 1/4 and 3/4.
TEST(Decode, ByHand) {
  Tensor rows(DType::bf16, {2, 576}), slots(DType::i32, {2}), cache(DType::u8, {2, 2, 1, 656});
  rows.view().at<BFloat16>(0, 0) = BFloat16(8.0f);
  rows.view().at<BFloat16>(1, 0) = BFloat16(-4.0f);
  rows.view().at<BFloat16>(1, 575) = BFloat16(1.0f);
  slots.values<std::int32_t>()[0] = 1;
  slots.values<std::int32_t>()[1] = 2;
  store({.rows = rows, .slots = slots, .cache = cache});
  Tensor q(DType::bf16, {1, 1, 1, 576}), indices(DType::i32, {1, 1, 2});
  q.view().at<BFloat16>(0, 0, 0, 575) = BFloat16(1.0f);
  indices.values<std::int32_t>()[0] = 2;
  indices.values<std::int32_t>()[1] = 1;
  Tensor out(DType::bf16, {1, 1, 1, 512}), lse(DType::f32, {1, 1, 1});
  EXPECT_EQ(to_string(decode({.q = q,
                              .cache = cache,
                              .indices = indices,
                              .scale = std::log(3.0),
                              .out = out,
                              .lse = lse})),
            "cpu");
  EXPECT_NEAR(lse.values<float>()[0], std::log(4.0), 1e-6);
  EXPECT_EQ(static_cast<float>(out.view().at<BFloat16>(0, 0, 0, 0)), -1.0f);  // 8/4 - 4 * 3/4
  EXPECT_EQ(static_cast<float>(out.view().at<BFloat16>(0, 0, 0, 511)), 0.0f);
}

TEST(Decode, GivesTheBitsOfForward) {
  for (const DecodeCase& shape : steps_beside_forward()) expect_bits_of_forward(shape, {});
}

// A sequence of a batch alone gives the bits that it has in the batch, with any number of threads.
TEST(Decode, HasTheSameBitsWhateverTheBatch) {
  for (const CacheFormat format :
       {CacheFormat::fp8_656, CacheFormat::fp8_584, CacheFormat::fp8_576, CacheFormat::bf16}) {
    const DecodeStep step({.name = "batch",
                           .format = format,
                           .columns = row_columns(format),
                           .b = 5,
                           .s_q = 2,
                           .h_q = 40,
                           .topk = 300,
                           .lengths = Lengths::ragged,
                           .length_per_query = true,
                           .extra_topk = 70,
                           .sink = Sink::finite});
    const int threads = num_threads();
    set_num_threads(4);
    decode(step.args());
    set_num_threads(1);
    const auto expect_same = [&](std::int64_t first, std::int64_t end) {
      Tensor out(DType::bf16, {end - first, 2, 40, 512}), lse(DType::f32, {end - first, 2, 40});
      DecodeArgs args = step.args();
      for (ConstTensorView* view : {&args.q, &args.indices, &args.topk_length, &args.extra_indices,
                                    &args.extra_topk_length}) {
        *view = view->slice(0, first, end);
      }
      args.out = out;
      args.lse = lse;
      decode(args);
      const TensorView whole = step.out.view.slice(0, first, end);
      EXPECT_EQ(std::memcmp(out.data(), whole.data(), std::size_t(out.numel() * 2)), 0) << first;
      const TensorView whole_lse = step.lse.view.slice(0, first, end);
      EXPECT_EQ(std::memcmp(lse.data(), whole_lse.data(), std::size_t(lse.numel() * 4)), 0);
    };
    for (std::int64_t i = 0; i < 5; ++i) expect_same(i, i + 1);
    expect_same(1, 4);
    set_num_threads(threads);
  }
}

// most_parts() chooses the kernel that merges: none of the shares may be forgotten.
TEST(DecodeSplit, KnowsTheMostPartsOfAQuery) {
  for (const std::int64_t tiles : {2, 9, 16, 32, 33, 256}) {
    for (std::int64_t queries = 1; queries < 140; ++queries) {
      for (const std::int64_t groups : {1, 2, 5, 66, 132}) {
        const auto split = decode_sm90_detail::fastest_split(tiles, queries, groups);
        if (split.cut_tiles == 0) continue;
        std::int64_t most = 0;
        for (std::int64_t query = 0; query < queries - split.groups * split.group_queries;
             ++query) {
          const std::int64_t begin = query * tiles, last = begin + tiles - 1;
          most = std::max(most, last / split.cut_tiles - begin / split.cut_tiles + 1);
        }
        EXPECT_LE(most, split.most_parts()) << tiles << ", " << queries << ", " << groups;
        EXPECT_GE(most + 1, split.most_parts()) << tiles << ", " << queries << ", " << groups;
      }
    }
  }
}

// Blocks side by side have every tile once, and no call needs a larger workspace than one with more
// entries or queries.
TEST(DecodeSplit, OfAChainLeavesNoTile) {
  using namespace decode_sm90_detail;
  for (const std::int64_t multiprocessors : {1, 2, 7, 132}) {
    for (const std::int64_t head_blocks : {1, 2, 5}) {
      for (std::int64_t queries = 1; queries < 140; ++queries) {
        std::int64_t before = 0;
        for (const std::int64_t tiles : {1, 4, 5, 32, 33, 37, 64, 129, 1000, 9000}) {
          const std::string what = testing::numbered("tiles ", tiles) +
                                   testing::numbered(", queries ", queries) +
                                   testing::numbered(", head blocks ", head_blocks) +
                                   testing::numbered(", multiprocessors ", multiprocessors);
          const std::int64_t items = queries * head_blocks;
          const std::int64_t room = chain_tiles_for(tiles, items, multiprocessors);
          EXPECT_GE(room, before) << what;
          EXPECT_GE(room, chain_tiles_for(tiles, items - 1, multiprocessors)) << what;
          EXPECT_LE(room, kMostChainTiles) << what;
          before = room;
          if (!works_side_by_side(tiles, items, multiprocessors)) continue;
          EXPECT_GE(room, items * tiles) << what;
          const ChainSplit split = chain_split(tiles, queries, head_blocks, multiprocessors);
          EXPECT_GE(split.segments * split.segment_tiles, tiles) << what;
          EXPECT_LT((split.segments - 1) * split.segment_tiles, tiles) << what;
          EXPECT_GE(split.run_tiles, 1) << what;
          EXPECT_TRUE(split.column_blocks == 4 || split.column_blocks == 8) << what;
        }
      }
    }
  }
}

// Caches of bytes may begin anywhere on the CPU, and scales in them.
TEST(Decode, TakesACacheAtAnyAddress) {
  for (const CacheFormat format :
       {CacheFormat::fp8_656, CacheFormat::fp8_584, CacheFormat::fp8_576}) {
    const DecodeStep step({.name = "address", .format = format});
    decode(step.args());
    const Tensor& storage = step.chosen.cache.storage;
    Tensor moved(DType::u8, {storage.numel() + 1});
    std::memcpy(&moved.values<std::uint8_t>()[1], storage.data(), std::size_t(storage.numel()));
    Tensor out(DType::bf16, step.out.view.shape()), lse(DType::f32, step.lse.view.shape());
    DecodeArgs args = step.args();
    args.cache = ConstTensorView(&moved.values<std::uint8_t>()[1], DType::u8, args.cache.shape(),
                                 args.cache.strides());
    args.out = out;
    args.lse = lse;
    decode(args);
    EXPECT_TRUE(winnow::testing::same_bytes(out, step.out.storage));
    EXPECT_TRUE(winnow::testing::same_bytes(lse, step.lse.storage));
  }
}

// Rows that nobody chose are NaN in the case table; one that a query chose is its own affair.
TEST(Decode, ANanReachesOnlyTheQueriesThatSeeIt) {
  const DecodeStep step({.name = "nan", .b = 2, .topk = 1, .blocks = 1, .block_size = 2});
  step.chosen.indices.view.at<std::int32_t>(0, 0, 0) = 0;
  step.chosen.indices.view.at<std::int32_t>(1, 0, 0) = 1;
  std::uint8_t* bytes = static_cast<std::uint8_t*>(step.chosen.cache.view.data());
  std::memset(bytes, 0xff, 656);
  std::memset(bytes + 656, 0, 656);
  decode(step.args());
  for (std::int64_t h = 0; h < 8; ++h) {
    EXPECT_TRUE(std::isnan(step.lse.view.at<float>(0, 0, h)));
    EXPECT_TRUE(std::isnan(static_cast<float>(step.out.view.at<BFloat16>(0, 0, h, 7))));
    EXPECT_EQ(step.lse.view.at<float>(1, 0, h), 0.0f);
    EXPECT_EQ(static_cast<float>(step.out.view.at<BFloat16>(1, 0, h, 7)), 0.0f);
  }
}

// With block tables the bits are those of a call with the slots of all positions as indices.
TEST(Decode, BlockTablesAreAllIndices) {
  for (const CacheFormat format :
       {CacheFormat::fp8_656, CacheFormat::fp8_584, CacheFormat::fp8_576, CacheFormat::bf16}) {
    const DecodeStep step({.name = "tables",
                           .format = format,
                           .columns = row_columns(format),
                           .b = 3,
                           .s_q = 3,
                           .h_q = 40,
                           .blocks = 9,
                           .block_size = 30,
                           .choice = Choice::scattered,
                           .lengths = Lengths::ragged,
                           .table = 7});
    decode(step.args());
    Tensor indices(DType::i32, {3, 3, 210}), length(DType::i32, {3, 3});
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t s = 0; s < 3; ++s) {
        for (std::int32_t t = 0; t < 210; ++t) {
          const std::int32_t block = step.chosen.block_tables.view.at<std::int32_t>(i, t / 30);
          const bool there = block >= 0 && block < 9;
          indices.view().at<std::int32_t>(i, s, t) = there ? 30 * block + t % 30 : -1;
        }
        const std::int32_t context = step.chosen.context_lens.view.at<std::int32_t>(i);
        length.view().at<std::int32_t>(i, s) = context - 2 + static_cast<std::int32_t>(s);
      }
    }
    Tensor out(DType::bf16, {3, 3, 40, 512}), lse(DType::f32, {3, 3, 40});
    DecodeArgs args = step.args();
    args.block_tables = args.context_lens = {};
    args.indices = indices;
    args.topk_length = length;
    args.out = out;
    args.lse = lse;
    decode(args);
    EXPECT_TRUE(winnow::testing::same_bytes(out, step.out.storage));
    EXPECT_TRUE(winnow::testing::same_bytes(lse, step.lse.storage));
  }
}

// Without `causal` the bits are those of lengths [b, s_q] with a stride of 0, of which it says
// nothing.
TEST(Decode, QueriesThatAreNotCausalShareALength) {
  for (const CacheFormat format :
       {CacheFormat::fp8_656, CacheFormat::fp8_584, CacheFormat::fp8_576, CacheFormat::bf16}) {
    for (const std::int64_t s_q : {1, 3}) {
      const DecodeStep step({.name = "not-causal",
                             .format = format,
                             .columns = row_columns(format),
                             .b = 3,
                             .s_q = s_q,
                             .blocks = 9,
                             .lengths = Lengths::ragged,
                             .table = 4,
                             .causal = false});
      decode(step.args());
      const ConstTensorView lens = step.chosen.context_lens.view;
      const ConstTensorView of_queries(lens.data(), DType::i32, {3, s_q}, {lens.stride(0), 0});
      for (const bool causal : {false, true}) {
        Tensor out(DType::bf16, {3, s_q, 8, 512}), lse(DType::f32, {3, s_q, 8});
        DecodeArgs args = step.args();
        args.context_lens = of_queries;
        args.causal = causal;
        args.out = out;
        args.lse = lse;
        decode(args);
        EXPECT_TRUE(winnow::testing::same_bytes(out, step.out.storage)) << causal;
        EXPECT_TRUE(winnow::testing::same_bytes(lse, step.lse.storage)) << causal;
      }
    }
  }
}

TEST(Decode, RefusesTablesBesideIndices) {
  const DecodeStep step({.name = "refused", .table = 4}), chosen({.name = "refused-indices"});
  Tensor wide(DType::i64, {2, 4}), three(DType::i32, {3, 4}), flat(DType::i32, {8});
  Tensor many(DType::i32, {2, 1});
  const auto reject = [&](const auto& bend, const std::string& text) {
    DecodeArgs args = step.args();
    bend(args);
    for (const bool dry_run : {false, true}) {
      expect_error([&] { decode(args, {.dry_run = dry_run}); }, ErrorCode::invalid_argument,
                   "sparse_mla::decode: " + text);
    }
    EXPECT_EQ(winnow::testing::count_unwritten(step.out.view), step.out.view.numel()) << text;
  };
  using Args = DecodeArgs;
  const ConstTensorView indices = chosen.chosen.indices.view;
  reject([&](Args& a) { a.indices = indices; },
         "indices: want none, with block_tables and context_lens, got a tensor");
  reject([&](Args& a) { a.topk_length = many; },
         "topk_length: want none, with block_tables and context_lens, got a tensor");
  reject([&](Args& a) { a.extra_cache = a.cache; },
         "extra_cache: want none, with block_tables and context_lens, got a tensor");
  reject([](Args& a) { a.block_tables = {}; }, "block_tables: want a tensor [b, n], got none");
  reject([&](Args& a) { a.block_tables = flat; },
         "block_tables: want 2 dimensions [b, n], got shape [8]");
  reject([&](Args& a) { a.block_tables = wide; }, "block_tables: want dtype i32, got i64");
  reject([&](Args& a) { a.block_tables = three; },
         "block_tables: want shape [b=2, n=4], got [3, 4]");
  reject(
      [&](Args& a) {
        a.block_tables = ConstTensorView(flat.data(), DType::i32, {2, 1 << 25}, {0, 1});
      },
      "block_tables: want n * block_size up to 2^31 - 1, got 33554432 blocks of 64");
  reject([](Args& a) { a.context_lens = {}; },
         "context_lens: want a tensor [b], or 2 dimensions [b, s_q], got none");
  reject([&](Args& a) { a.context_lens = flat; }, "context_lens: want shape [b=2], got [8]");
  reject([&](Args& a) { a.context_lens = wide; },
         "context_lens: want shape [b=2, s_q=1], got [2, 4]");
}

TEST(Decode, Refuses) {
  Tensor q512(DType::bf16, {2, 1, 8, 512}), f32(DType::f32, {2, 1, 8, 576});
  Tensor flat(DType::i32, {2, 64}), wide(DType::i64, {2, 1, 64}), three(DType::i32, {3});
  Tensor sink(DType::f32, {9}), bytes(DType::u8, {6, 64, 1, 600}), lse(DType::f32, {2, 8});
  Tensor lengths(DType::i32, {2, 3}), cube(DType::i32, {2, 1, 1});
  Tensor brain576(DType::bf16, {1, 2, 1, 576}), brain512(DType::bf16, {1, 2, 1, 512});
  const auto reject = [](const auto& bend, const std::string& text) {
    const DecodeStep step({.name = "refused", .extra_topk = 5});
    DecodeArgs args = step.args();
    bend(args);
    for (const bool dry_run : {false, true}) {
      expect_error([&] { decode(args, {.dry_run = dry_run}); }, ErrorCode::invalid_argument,
                   "sparse_mla::decode: " + text);
    }
    expect_error([&] { decode_workspace_bytes(args); }, ErrorCode::invalid_argument,
                 "sparse_mla::decode: " + text);
    EXPECT_EQ(winnow::testing::count_unwritten(step.out.view), step.out.view.numel()) << text;
    EXPECT_EQ(winnow::testing::count_unwritten(step.lse.view), step.lse.view.numel()) << text;
  };
  using Args = DecodeArgs;
  reject([](Args& a) { a.q = {}; }, "q: want a tensor [b, s_q, h_q, d_qk], got none");
  reject([&](Args& a) { a.q = q512; },
         "q: want shape [b=2, s_q=1, h_q=8, d_qk=576], got [2, 1, 8, 512]");
  reject([&](Args& a) { a.q = f32; }, "q: want dtype bf16, got f32");
  reject([](Args& a) { a.cache = {}; },
         "cache: want a tensor [blocks, block_size, 1, 656], got none");
  reject(
      [&](Args& a) { a.cache = bytes; },
      "cache: want [blocks, block_size, 1, 656] for the format fp8_656 (fp8_656 has rows of 656 "
      "bytes, fp8_584 of 584, fp8_576 of 576, bf16 of 576 or 512 elements), got a last dimension "
      "of 600");
  reject([](Args& a) { a.indices = {}; }, "indices: want a tensor [b, s_q, topk], got none");
  reject([&](Args& a) { a.indices = flat; },
         "indices: want 3 dimensions [b, s_q, topk], got shape [2, 64]");
  reject([&](Args& a) { a.indices = wide; }, "indices: want dtype i32, got i64");
  reject([&](Args& a) { a.topk_length = three; }, "topk_length: want shape [b=2], got [3]");
  reject([&](Args& a) { a.topk_length = lengths; },
         "topk_length: want shape [b=2, s_q=1], got [2, 3]");
  reject([&](Args& a) { a.topk_length = cube; },
         "topk_length: want 1 dimensions [b], or 2 dimensions [b, s_q], got shape [2, 1, 1]");
  reject([&](Args& a) { a.attn_sink = sink; }, "attn_sink: want shape [h_q=8], got [9]");
  reject([](Args& a) { a.extra_indices = {}; },
         "extra_indices: want a tensor [b, s_q, topk], got none");
  reject([](Args& a) { a.extra_cache = {}; },
         "extra_cache: want a tensor [blocks, block_size, 1, 656], got none");
  reject(
      [&](Args& a) {
        a.extra_topk_length = three.view().slice(0, 0, 2);
        a.extra_cache = {};
        a.extra_indices = {};
      },
      "extra_topk_length: want none, without extra_cache, got a tensor");
  reject([&](Args& a) { a.extra_topk_length = three; },
         "extra_topk_length: want shape [b=2], got [3]");
  reject(
      [&](Args& a) {
        a.format = CacheFormat::bf16;
        a.q = q512;
        a.cache = brain512;
        a.extra_cache = brain576;
      },
      "extra_cache: want rows of 512 columns as in cache, got 576");
  reject([](Args& a) { a.causal = false; }, "causal: want true, without context_lens, got false");
  reject([](Args& a) { a.scale = std::numeric_limits<double>::infinity(); },
         "scale: want a finite number, got inf");
  reject([](Args& a) { a.scale = 1e300; },
         "scale: want a finite number, got " + std::to_string(1e300));
  reject([&](Args& a) { a.out = {}; },
         "out: want a tensor of shape [b=2, s_q=1, h_q=8, d_v=512], got none");
  reject([&](Args& a) { a.lse = lse; }, "lse: want shape [b=2, s_q=1, h_q=8], got [2, 8]");
}

// The scales are read when the call runs; they belong to fp8_576, which store() does not write.
TEST(Decode, ScalesOfATensorAreForTheirFormatAlone) {
  const DecodeStep step({.name = "scales",
                         .format = CacheFormat::fp8_576,
                         .h_q = 2,
                         .table = 4,
                         .q_scale = 2,
                         .kv_scale = 3});
  DecodeArgs args = step.args();
  const auto reject = [&](const auto& bend, const std::string& text) {
    DecodeArgs bent = args;
    bend(bent);
    expect_error([&] { decode(bent); }, ErrorCode::invalid_argument, "sparse_mla::decode: " + text);
    EXPECT_EQ(winnow::testing::count_unwritten(step.out.view), step.out.view.numel()) << text;
  };
  Tensor two(DType::f32, {2}), wide(DType::f64, {1}), rows(DType::bf16, {1, 576});
  Tensor flat(DType::f32, {1, 1});
  using Args = DecodeArgs;
  reject([&](Args& a) { a.q_scale = two; }, "q_scale: want shape [1], got [2]");
  reject([&](Args& a) { a.kv_scale = flat; }, "kv_scale: want shape [1], got [1, 1]");
  reject([&](Args& a) { a.kv_scale = wide; }, "kv_scale: want dtype f32, got f64");
  const DecodeStep other({.name = "scales-of-656", .h_q = 2, .table = 4});
  const auto reject_other = [&](Args bent, const std::string& name) {
    bent.cache = other.args().cache;
    bent.format = CacheFormat::fp8_656;
    expect_error(
        [&] { decode(bent); }, ErrorCode::invalid_argument,
        "sparse_mla::decode: " + name + ": want none, but for the format fp8_576, got a tensor");
  };
  reject_other(args, "q_scale");
  args.q_scale = {};
  reject_other(args, "kv_scale");
  args = step.args();

  Tensor slots(DType::i32, {1});
  expect_error(
      [&] {
        store({.rows = rows,
               .slots = slots,
               .format = CacheFormat::fp8_576,
               .cache = step.chosen.cache.view});
      },
      ErrorCode::invalid_argument,
      "sparse_mla::store: format: want fp8_656, fp8_584 or bf16, got fp8_576");

  Tensor twice(DType::bf16, step.out.view.shape());
  decode(args);
  step.q_scale.view.at<float>(0) = 1;
  step.kv_scale.view.at<float>(0) = 6;
  args.out = twice;
  decode(args);
  for (std::int64_t c = 0; c < 512; ++c) {
    EXPECT_EQ(static_cast<float>(twice.view().at<BFloat16>(1, 0, 1, c)),
              2 * static_cast<float>(step.out.view.at<BFloat16>(1, 0, 1, c)));
  }
}

TEST(Decode, RefusesOverlapAndOtherBackends) {
  const DecodeStep step({.name = "refused"});
  DecodeArgs args = step.args();
  args.out = TensorView(step.q.view.data(), DType::bf16, {2, 1, 8, 512});
  expect_error([&] { decode(args); }, ErrorCode::invalid_argument,
               "sparse_mla::decode: out: want memory apart from q, got memory that both use");
  try {
    decode(step.args(), winnow::testing::forced(Backend::sm90));
    ADD_FAILURE() << "sm90 took tensors of the host";
  } catch (const Error& error) {
    EXPECT_EQ(winnow::testing::count_unwritten(step.out.view), step.out.view.numel());
  }
  EXPECT_EQ(decode_workspace_bytes(step.args()), 0);
}

}  // namespace
}  // namespace winnow::sparse_mla
