// What only a GPU can show of sparse_mla::decode and store, beyond the case tables: batches and
// heads that do not change a result, graphs with new contents, repeats, slots named twice. Skipped
// without a GPU.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/sparse_mla/decode/decode_step_cases.h"
#include "winnow/sparse_mla/decode/test_beside_forward.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/sparse_mla/test_gpu.h"
#include "winnow/testing/generate.h"

namespace winnow::sparse_mla {
namespace {

class DecodeGpu : public GpuTest {};

constexpr CacheFormat kFormats[] = {CacheFormat::fp8_656, CacheFormat::fp8_584, CacheFormat::bf16};

Tensor workspace_for(const DecodeArgs& args) {
  // NaN wherever it is read before it is written.
  Tensor scratch(DType::u8, {decode_workspace_bytes(args)});
  std::memset(scratch.data(), 0xff, static_cast<std::size_t>(scratch.view().numel()));
  return scratch.to(args.q.device());
}

struct Results {
  Tensor out, lse;
  bool operator==(const Results& other) const {
    return same_bytes(out, other.out) && same_bytes(lse, other.lse);
  }
};

Results outputs_for(const DecodeArgs& args) {
  const std::int64_t b = args.q.size(0), s_q = args.q.size(1), h_q = args.q.size(2);
  const Device device = args.q.device();
  return {Tensor(DType::bf16, {b, s_q, h_q, 512}, device),
          Tensor(DType::f32, {b, s_q, h_q}, device)};
}

Results run(DecodeArgs args, const RunOptions& options = {}) {
  Results results = outputs_for(args);
  args.out = results.out;
  args.lse = results.lse;
  Tensor workspace = workspace_for(args);
  args.workspace = workspace;
  decode(args, options);
  synchronize(args.q.device());
  return results;
}

// The step of `sequences` sequences from `first` on.
DecodeArgs some_of(DecodeArgs args, std::int64_t first, std::int64_t sequences) {
  const auto cut = [&](ConstTensorView& view) {
    if (view.present()) view = view.slice(0, first, first + sequences);
  };
  cut(args.q);
  cut(args.indices);
  cut(args.topk_length);
  cut(args.block_tables);
  cut(args.context_lens);
  cut(args.extra_indices);
  cut(args.extra_topk_length);
  return args;
}

DecodeCase large(CacheFormat format, std::int64_t b, std::int64_t h_q) {
  return {.name = "large",
          .format = format,
          .b = b,
          .s_q = 2,
          .h_q = h_q,
          .topk = 2048,
          .blocks = 40,
          .lengths = Lengths::ragged,
          .length_per_query = true,
          .extra_topk = 90,
          .sink = Sink::finite};
}

Results slice_of(const Results& all, std::int64_t first, std::int64_t sequences) {
  const auto cut = [&](const Tensor& tensor) {
    const Tensor here = tensor.to({});
    const ConstTensorView view = here.view().slice(0, first, first + sequences);
    Tensor part(view.dtype(), view.shape());
    std::memcpy(part.data(), view.data(),
                static_cast<std::size_t>(view.numel() * size_of(view.dtype())));
    return part;
  };
  return {cut(all.out), cut(all.lse)};
}

TEST_F(DecodeGpu, AResultHasTheSameBitsInEveryBatch) {
  for (const CacheFormat format : kFormats) {
    const DecodeStep step = DecodeStep(large(format, 9, 128)).on(kGpu);
    const Results all = run(step.args());
    for (const auto& [first, sequences] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {0, 1}, {4, 1}, {8, 1}, {2, 3}, {1, 8}}) {
      EXPECT_TRUE(run(some_of(step.args(), first, sequences)) == slice_of(all, first, sequences))
          << to_string(format) << ", sequences " << first << " to " << first + sequences;
    }
  }
}

TEST_F(DecodeGpu, BatchesFrom1To256AgreeWithEachOther) {
  const DecodeStep step = DecodeStep(large(CacheFormat::fp8_656, 256, 16)).on(kGpu);
  const Results all = run(step.args());
  for (const std::int64_t b : {1, 2, 3, 7, 16, 33, 64, 66, 67, 128, 200}) {
    EXPECT_TRUE(run(some_of(step.args(), 0, b)) == slice_of(all, 0, b)) << "b " << b;
  }
}

// With many heads and all of a model's entries: from many blocks side by side on a query to one
// block for each 64 heads, and with in_list_order too.
TEST_F(DecodeGpu, EveryWayToShareOutAChainGivesTheSameBits) {
  for (const CacheFormat format : kFormats) {
    for (const std::int64_t extra : {-1, 700}) {
      DecodeCase shape = large(format, 70, 128);
      shape.extra_topk = extra;
      shape.extra_blocks = 30;
      shape.logits = 20;  // references are raised in many tiles
      const DecodeStep step = DecodeStep(shape).on(kGpu);
      const Results all = run(step.args());
      for (const std::int64_t b : {1, 2, 3, 4, 5, 8, 11, 16, 17, 32, 33, 66, 67}) {
        DecodeArgs args = some_of(step.args(), 70 - b, b);
        const Results expected = slice_of(all, 70 - b, b);
        EXPECT_TRUE(run(args) == expected) << to_string(format) << ", b " << b;
        args.batch_invariant = false;
        args.in_list_order = true;
        EXPECT_TRUE(run(args) == expected) << to_string(format) << ", in list order, b " << b;
      }
    }
  }
}

TEST_F(DecodeGpu, BlockTablesGiveTheSameBitsInEveryBatch) {
  for (const CacheFormat format : {CacheFormat::fp8_656, CacheFormat::fp8_576, CacheFormat::bf16}) {
    const bool scaled = format == CacheFormat::fp8_576;
    const DecodeStep step = DecodeStep({.name = "tables",
                                        .format = format,
                                        .b = 50,
                                        .s_q = 2,
                                        .h_q = 128,
                                        .blocks = 200,
                                        .lengths = Lengths::ragged,
                                        .table = 40,
                                        .q_scale = scaled ? 0.7 : 0,
                                        .kv_scale = scaled ? 1.3 : 0})
                                .on(kGpu);
    const Results all = run(step.args());
    for (const std::int64_t b : {1, 2, 7, 16, 17, 49}) {
      EXPECT_TRUE(run(some_of(step.args(), 50 - b, b)) == slice_of(all, 50 - b, b))
          << to_string(format) << ", b " << b;
    }
  }
}

TEST_F(DecodeGpu, GivesTheBitsOfForward) {
  std::vector<DecodeCase> shapes = steps_beside_forward();
  // As many entries as a model has, of queries that fill the GPU and leave some over.
  shapes.push_back({.name = "many",
                    .format = CacheFormat::bf16,
                    .b = 150,
                    .h_q = 128,
                    .topk = 2048,
                    .blocks = 60,
                    .lengths = Lengths::ragged});
  // The same of few, whose blocks work side by side.
  for (const std::int64_t b : {1, 5, 16}) {
    shapes.push_back({.name = testing::numbered("few ", b),
                      .format = CacheFormat::bf16,
                      .b = b,
                      .h_q = 128,
                      .topk = 2048,
                      .blocks = 60,
                      .lengths = Lengths::ragged,
                      .extra_topk = 90,
                      .logits = 20});
  }
  // A cache that forward() would read in the order of its rows.
  shapes.push_back({.name = "large",
                    .format = CacheFormat::bf16,
                    .b = 9,
                    .h_q = 16,
                    .topk = 2048,
                    .blocks = 1000,
                    .poison = false});
  for (const DecodeCase& shape : shapes) expect_bits_of_forward(shape, kGpu);
}

TEST_F(DecodeGpu, AHeadHasTheSameBitsWhateverTheOthers) {
  for (const CacheFormat format : kFormats) {
    const DecodeStep step = DecodeStep(large(format, 3, 300)).on(kGpu);
    const Results all = run(step.args());
    for (const auto& [first, end] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {0, 128}, {0, 129}, {64, 300}, {256, 300}}) {
      DecodeArgs args = step.args();
      args.q = args.q.slice(2, first, end);
      args.attn_sink = args.attn_sink.slice(0, first, end);
      const Results some = run(args);
      const auto expect_same = [&](const Tensor& alone, const Tensor& among) {
        EXPECT_EQ(numbers(alone), testing::read(among.to({}).view().slice(2, first, end)))
            << to_string(format) << ", heads " << first << " to " << end;
      };
      expect_same(some.out, all.out);
      expect_same(some.lse, all.lse);
    }
  }
}

TEST_F(DecodeGpu, EverySplitAgreesWithTheCpu) {
  for (const CacheFormat format : kFormats) {
    for (const auto& [b, heads] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {1, 64}, {1, 128}, {2, 128}, {2, 300}, {3, 1}, {5, 64}, {67, 64}}) {
      const DecodeStep step(large(format, b, heads));
      decode(step.args());
      const DecodeStep there = step.on(kGpu);
      for (const bool invariant : {true, false}) {
        DecodeArgs args = there.args();
        args.batch_invariant = invariant;
        const Results got = run(args);
        testing::expect_passed(testing::compare("out", got.out.to({}).view(),
                                                testing::read(step.out.view),
                                                {1e-2, testing::RelativeTo::tensor, 1e-5}));
        testing::expect_passed(testing::compare("lse", got.lse.to({}).view(),
                                                testing::read(step.lse.view),
                                                {1e-4, testing::RelativeTo::nothing}));
      }
    }
  }
}

TEST_F(DecodeGpu, TwentyRepeatsAreBitwiseEqual) {
  for (const CacheFormat format : kFormats) {
    for (const bool invariant : {true, false}) {
      const DecodeStep step = DecodeStep(large(format, 33, 128)).on(kGpu);
      DecodeArgs args = step.args();
      args.batch_invariant = invariant;
      const Results first = run(args);
      for (int repeat = 0; repeat < 20; ++repeat) {
        ASSERT_TRUE(run(args) == first) << to_string(format) << ", repeat " << repeat;
      }
    }
  }
}

#if WINNOW_WITH_CUDA

using testing::CudaStream;
using testing::Graph;

// A store and the decode over its cache in one capture, replayed with other rows, slots, indices
// and lengths in the same memory.
TEST_F(DecodeGpu, GraphReplaysWithNewContents) {
  testing::Random random(3);
  const auto put = [](const ConstTensorView& there, const Tensor& contents) {
    copy_between(const_cast<void*>(there.data()), there.device(), contents.data(), {},
                 static_cast<std::size_t>(contents.numel() * size_of(contents.dtype())));
  };
  // Some are below 0, and some not below `end`.
  const auto put_numbers = [&](const ConstTensorView& there, std::int64_t end) {
    Tensor numbers(DType::i32, there.shape());
    testing::fill_below(numbers, random, end + 200);
    for (std::int32_t& number : numbers.values<std::int32_t>()) number -= 100;
    put(there, numbers);
  };
  const auto slots_of = [](const ConstTensorView& cache) { return cache.size(0) * cache.size(1); };
  const auto expect_replays = [&](const DecodeCase& shape, const std::string& name) {
    const DecodeStep host(shape), step = host.on(kGpu);
    const DecodeArgs args = step.args();
    const StridedTensor& cache = host.chosen.cache;
    Tensor rows(DType::bf16, {100, row_columns(shape.format)}), slots(DType::i32, {100});
    const Tensor rows_there = rows.to(kGpu), slots_there = slots.to(kGpu);
    StoreArgs stored{.rows = rows_there,
                     .slots = slots_there,
                     .format = shape.format,
                     .cache = step.chosen.cache.view};
    Tensor store_workspace(DType::u8, {store_workspace_bytes(stored)}, kGpu);
    stored.workspace = store_workspace;
    Results captured = outputs_for(args);
    Tensor workspace = workspace_for(args);
    DecodeArgs own = args;
    own.out = captured.out;
    own.lse = captured.lse;
    own.workspace = workspace;
    const CudaStream stream;
    const Graph graph(stream.stream, [&] {
      store(stored, stream.options());
      decode(own, stream.options());
    });
    for (int replay = 0; replay < 10; ++replay) {
      testing::fill_normal(rows, random);
      testing::fill_distinct(slots, random, slots_of(cache.view));
      put(rows_there, rows);
      put(slots_there, slots);
      put_numbers(args.indices, slots_of(args.cache));
      put_numbers(args.topk_length, shape.topk);
      put_numbers(args.extra_indices, slots_of(args.extra_cache));
      put_numbers(args.extra_topk_length, shape.extra_topk);
      graph.launch(stream.stream);
      stream.wait();
      store({.rows = rows, .slots = slots, .format = shape.format, .cache = cache.view});
      ASSERT_TRUE(same_bytes(step.chosen.cache.storage, cache.storage))
          << name << ", replay " << replay;
      ASSERT_TRUE(captured == run(args)) << name << ", replay " << replay;
    }
  };
  for (const CacheFormat format : kFormats) {
    DecodeCase shape = large(format, 7, 64);
    shape.poison = false;
    for (const bool invariant : {true, false}) {
      for (const bool per_query : {true, false}) {
        shape.batch_invariant = invariant;
        shape.length_per_query = per_query;
        expect_replays(shape, std::string(to_string(format)) +
                                  (invariant ? ", batch-invariant" : "") +
                                  (per_query ? ", lengths [b, s_q]" : ", lengths [b]"));
      }
    }
  }
}

// The current device of the caller stays as it was, and the tensors' device is used: of a call that
// merges parts, and of rows that are stored.
TEST_F(DecodeGpu, RunsOnTheDeviceOfTheTensors) {
  testing::expect_runs_on_second_gpu([&](Device second) {
    for (const CacheFormat format : kFormats) {
      const DecodeStep step(large(format, 2, 128));
      const DecodeStep here = step.on(kGpu), there = step.on(second);
      Tensor rows(DType::bf16, {3, row_columns(format)}), slots(DType::i64, {3});
      testing::Random random(5);
      testing::fill_normal(rows, random);
      for (std::int64_t i = 0; i < 3; ++i) slots.view().at<std::int64_t>(i) = 7 * i;
      testing::StridedTensor cpu = make_cache(format, 1, 64), gpu = testing::on(second, cpu);
      store({.rows = rows, .slots = slots, .format = format, .cache = cpu.view});
      const Tensor rows_there = rows.to(second), slots_there = slots.to(second);
      StoreArgs args{.rows = rows_there, .slots = slots_there, .format = format, .cache = gpu.view};
      Tensor workspace(DType::u8, {store_workspace_bytes(args)}, second);
      args.workspace = workspace;
      EXPECT_TRUE(run(here.args()) == run(there.args())) << to_string(format);
      store(args);
      synchronize(second);
      EXPECT_TRUE(testing::same_bytes(testing::on({}, gpu).storage, cpu.storage))
          << to_string(format);
    }
  });
}

#endif

// --- store --------------------------------------------------------------------------------------

// Of rows that name the same slot the last one is there, whole.
TEST_F(DecodeGpu, StoreOfSlotsNamedTwice) {
  for (const CacheFormat format : kFormats) {
    for (const std::int64_t n : {64, 1000, 5000}) {
      constexpr std::int64_t kBlocks = 3, kBlockSize = 64;
      const std::int64_t columns = row_columns(format);
      Tensor rows(DType::bf16, {n, columns}), slots(DType::i64, {n});
      testing::Random random(4);
      testing::fill_normal(rows, random);
      std::vector<std::int64_t> last(kBlocks * kBlockSize, -1);
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t slot = random.below(kBlocks * kBlockSize + 20) - 10;
        slots.view().at<std::int64_t>(i) = slot;
        if (slot >= 0 && slot < kBlocks * kBlockSize) last[static_cast<std::size_t>(slot)] = i;
      }
      // The same without repeats, on the CPU.
      Tensor once(DType::i64, {n});
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t slot = slots.view().at<std::int64_t>(i);
        const bool counts =
            slot >= 0 && slot < kBlocks * kBlockSize && last[static_cast<std::size_t>(slot)] == i;
        once.view().at<std::int64_t>(i) = counts ? slot : -1;
      }
      testing::StridedTensor cpu = make_cache(format, kBlocks, kBlockSize);
      testing::StridedTensor gpu = testing::on(kGpu, cpu);
      store({.rows = rows, .slots = once, .format = format, .cache = cpu.view});
      const Tensor there = rows.to(kGpu), slots_there = slots.to(kGpu);
      StoreArgs args{.rows = there, .slots = slots_there, .format = format, .cache = gpu.view};
      Tensor workspace(DType::u8, {store_workspace_bytes(args)}, kGpu);
      args.workspace = workspace;
      store(args);
      synchronize(kGpu);
      EXPECT_TRUE(testing::same_bytes(testing::on({}, gpu).storage, cpu.storage))
          << to_string(format) << ", n " << n;
    }
  }
}

}  // namespace
}  // namespace winnow::sparse_mla
