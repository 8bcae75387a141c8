// What only a GPU can show of topk_paged, beyond the case table: graph replays with other lengths
// and tables, repeats, every size of the batch, the size of the workspace, rejections. Skipped
// without a GPU.
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/indexer/topk_paged/topk_paged_cases.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/gpu_test.h"

namespace winnow::indexer {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};

class TopkPagedGpu : public winnow::testing::GpuTest<Backend::sm90> {};

PagedCase small_case() {
  return {.name = "gpu",
          .context_lens = {700, 40, 5000, 1, 0, 4096, 1300, 2100},
          .s_q = 2,
          .h = 64,
          .topk = 200,
          .table = 80,
          .num_pages = 400};
}

struct Results {
  Tensor indices, length, scores, workspace;
  Results(std::int64_t b, const PagedCase& shape, Device device = kGpu)
      : indices(DType::i32, {b, shape.s_q, shape.topk}, device),
        length(DType::i32, {b, shape.s_q}, device),
        scores(DType::f32, {b, shape.s_q, shape.topk}, device),
        workspace(DType::u8, {std::int64_t{64} << 20}, device) {}

  void run(TopkPagedArgs args, const RunOptions& options = {}) {
    args.indices = indices;
    args.length = length;
    args.scores = scores;
    args.workspace = workspace;
    topk_paged(args, options);
  }
};

bool same(const Tensor& a, const Tensor& b) {
  return winnow::testing::same_bytes(a.to({}), b.to({}));
}
void expect_same(const Results& a, const Results& b) {
  EXPECT_TRUE(same(a.indices, b.indices));
  EXPECT_TRUE(same(a.length, b.length));
  EXPECT_TRUE(same(a.scores, b.scores));
}

TEST_F(TopkPagedGpu, RepeatsAreTheSame) {
  const PagedStep step = PagedStep(small_case()).on(kGpu);
  for (const Backend backend : {Backend::sm90, Backend::cuda}) {
    const RunOptions options{.backend = backend};
    Results first(step.b(), step.shape);
    first.run(step.args(), options);
    for (int repeat = 0; repeat < 20; ++repeat) {
      Results next(step.b(), step.shape);
      next.run(step.args(), options);
      expect_same(next, first);
      if (HasFailure()) FAIL() << "repeat " << repeat;
    }
  }
}

// Runs sequences [first, end) of a step alone, whose bits must be those of the whole.
void expect_part(const PagedStep& step, const Tensor& indices, const Tensor& scores,
                 std::int64_t first, std::int64_t end) {
  TopkPagedArgs args = step.args();
  for (ConstTensorView* view : {&args.q, &args.weights, &args.block_tables, &args.context_lens}) {
    *view = view->slice(0, first, end);
  }
  Results part(end - first, step.shape);
  part.run(args);
  const Tensor some_indices = part.indices.to({}), some_scores = part.scores.to({});
  const auto bytes = static_cast<std::size_t>(some_indices.numel()) * sizeof(float);
  EXPECT_EQ(std::memcmp(some_indices.data(), &indices.view().at<std::int32_t>(first, 0, 0), bytes),
            0)
      << "sequences " << first << " to " << end;
  EXPECT_EQ(std::memcmp(some_scores.data(), &scores.view().at<float>(first, 0, 0), bytes), 0)
      << "sequences " << first << " to " << end;
}

// A sequence's bits are the same alone, where it is cut into as many pieces as there are blocks,
// and in every batch.
TEST_F(TopkPagedGpu, TheBatchDoesNotMatter) {
  const PagedStep step = PagedStep(small_case()).on(kGpu);
  Results whole(step.b(), step.shape);
  whole.run(step.args());
  const Tensor indices = whole.indices.to({}), scores = whole.scores.to({});
  for (std::int64_t first = 0; first < step.b(); ++first) {
    for (std::int64_t end = first + 1; end <= step.b(); ++end) {
      expect_part(step, indices, scores, first, end);
      if (HasFailure()) return;
    }
  }
}

// Of many long sequences two blocks of the choice hold the keys of a sequence in turns; of few, the
// blocks of a larger cluster hold them all.
TEST_F(TopkPagedGpu, ChoosesInTurnsAndInClusters) {
  PagedCase shape{.name = "turns", .h = 16, .topk = 1500, .table = 625, .num_pages = 640};
  for (std::int32_t i = 0; i < 140; ++i) shape.context_lens.push_back(40000 - 250 * i);
  const PagedStep step = PagedStep(shape).on(kGpu);
  Results whole(step.b(), step.shape);
  whole.run(step.args());
  const Tensor indices = whole.indices.to({}), scores = whole.scores.to({});
  for (const std::int64_t first : {0, 1, 28, 29, 70, 139}) {
    expect_part(step, indices, scores, first, first + 1);
  }
  expect_part(step, indices, scores, 10, 26);  // four blocks for each
}

#if WINNOW_WITH_CUDA

// Now and then a number that no length and no page has, else one below `end`.
std::int32_t odd_or_below(winnow::testing::Random& random, std::int64_t odd_one_in,
                          std::int64_t end) {
  constexpr std::int32_t kOdd[] = {INT32_MIN, -1, 0, 1, INT32_MAX};
  if (random.below(odd_one_in) == 0) return kOdd[random.below(5)];
  return static_cast<std::int32_t>(random.below(end));
}

// change(step, random) writes other lengths and tables; a graph reads them anew at every launch.
template <class Change>
void expect_replays_follow(const PagedCase& shape, int replays, const Change& change) {
  PagedStep here(shape);
  const PagedStep there = here.on(kGpu);
  Results captured(here.b(), shape), eager(here.b(), shape);
  const winnow::testing::CudaStream stream;
  const winnow::testing::Graph graph(stream.stream,
                                     [&] { captured.run(there.args(), stream.options()); });
  const auto copy = [](const StridedTensor& to, const StridedTensor& from, std::size_t count) {
    copy_between(to.view.data(), kGpu, from.view.data(), {}, count * sizeof(std::int32_t));
  };
  winnow::testing::Random random(5);
  for (int replay = 0; replay < replays; ++replay) {
    change(here, random);
    copy(there.context_lens, here.context_lens, here.shape.context_lens.size());
    copy(there.block_tables, here.block_tables, static_cast<std::size_t>(here.b() * shape.table));
    graph.launch(stream.stream);
    stream.wait();
    const Tensor length = captured.length.to({});
    for (std::int64_t i = 0; i < here.b(); ++i) {
      for (std::int64_t j = 0; j < shape.s_q; ++j) {
        std::int64_t seen = 0;
        for (std::int64_t t = 0; t < here.visible(i, j); ++t) seen += here.page(i, t) >= 0;
        EXPECT_EQ(length.view().at<std::int32_t>(i, j), std::min(shape.topk, seen))
            << "sequence " << i << ", query " << j;
      }
    }
    if (replay % 20 == 0) {
      eager.run(there.args());
      expect_same(captured, eager);
    }
    if (::testing::Test::HasFailure()) FAIL() << "replay " << replay;
  }
}

// Must run first in its process to show what the name says: `make test-gpu` does.
TEST_F(TopkPagedGpu, TheFirstCallMayBeCapturedAndReplaysFollowLengthsAndTables) {
  const PagedCase shape = small_case();
  expect_replays_follow(shape, 300, [&](PagedStep& step, winnow::testing::Random& random) {
    for (std::int64_t i = 0; i < step.b(); ++i) {
      const std::int32_t length = odd_or_below(random, 4, 5200);
      step.context_lens.view.at<std::int32_t>(i) = length;
      step.shape.context_lens[static_cast<std::size_t>(i)] = length;
      for (std::int64_t place = 0; place < shape.table; ++place) {
        step.block_tables.view.at<std::int32_t>(i, place) = odd_or_below(random, 9, 410);
      }
    }
  });
}

// Those out of range are clamped.
TEST_F(TopkPagedGpu, ReplaysFollowTheLengthsOfQueries) {
  PagedCase shape = small_case();
  shape.s_q = 5;  // two groups of queries
  shape.context_lens = std::vector<std::int32_t>(8 * 5, 5120);
  shape.of_queries = true;
  expect_replays_follow(shape, 100, [&](PagedStep& step, winnow::testing::Random& random) {
    for (std::int64_t i = 0; i < step.b(); ++i) {
      for (std::int64_t j = 0; j < shape.s_q; ++j) {
        const std::int32_t length = odd_or_below(random, 3, 5200);
        step.context_lens.view.at<std::int32_t>(i, j) = length;
        step.shape.context_lens[static_cast<std::size_t>(i * shape.s_q + j)] = length;
      }
    }
  });
}

TEST_F(TopkPagedGpu, RunsOnTheDeviceOfTheTensors) {
  const PagedCase shape = small_case();
  const PagedStep step(shape);
  winnow::testing::expect_runs_on_second_gpu([&](Device second) {
    const PagedStep first_step = step.on(kGpu), second_step = step.on(second);
    Results here(step.b(), shape), there(step.b(), shape, second);
    here.run(first_step.args());
    there.run(second_step.args());
    expect_same(there, here);
  });
}

#endif

// Of tensors that are only described: 256 MiB are enough for any batch and group, and for contexts
// of 2^24 rows.
TEST_F(TopkPagedGpu, TheWorkspaceIsBounded) {
  alignas(256) static char memory[256];
  const auto view = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView(memory, dtype, shape, kGpu);
  };
  for (const std::int64_t b : {1, 64, 1000, 100000}) {
    for (const std::int64_t s_q : {1, 2, 64, 4096}) {
      for (const std::int64_t table : {0, 512, 2048, 1 << 18, 1 << 20}) {
        for (const std::int64_t h : {1, 32, 64, 128}) {
          const TopkPagedArgs args{.q = view(DType::f8_e4m3, {b, s_q, h, 128}),
                                   .pages = view(DType::u8, {1000, page_bytes(128)}),
                                   .weights = view(DType::f32, {b, s_q, h}),
                                   .block_tables = view(DType::i32, {b, table}),
                                   .context_lens = view(DType::i32, {b}),
                                   .indices = view(DType::i32, {b, s_q, 2048}),
                                   .length = view(DType::i32, {b, s_q})};
          EXPECT_LE(topk_paged_workspace_bytes(args),
                    std::max(std::int64_t{256} << 20, 16 * 64 * table))
              << b << " x " << s_q << ", " << h << " heads, table " << table;
        }
      }
    }
  }
}

TEST_F(TopkPagedGpu, RefusesAndWorksOn) {
  const PagedStep host(small_case()), step = host.on(kGpu);
  Results results(step.b(), step.shape), again(step.b(), step.shape);
  results.run(step.args());
  TopkPagedArgs mixed = step.args(), odd = step.args();
  mixed.pages = host.pages.view;
  winnow::testing::expect_error([&] { again.run(mixed); }, ErrorCode::invalid_argument,
                                "indexer::topk_paged: pages: want device cuda:0, got cpu");
  const Tensor wide(DType::u8, {400, page_bytes(128) + 8}, kGpu);
  odd.pages = wide.view().slice(1, 0, page_bytes(128));
  EXPECT_THROW(again.run(odd), Error);  // rows apart by no multiple of 16 bytes
  EXPECT_THROW(again.run(step.args(), {.backend = Backend::cpu}), Error);
  again.run(step.args());
  expect_same(results, again);
}

}  // namespace
}  // namespace winnow::indexer
