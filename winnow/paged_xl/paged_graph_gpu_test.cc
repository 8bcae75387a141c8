// The operations on a paged cache in graphs, on several streams, threads and GPUs, and in scratch
// memory of the caller. Skipped without a GPU.
#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/test_paged_gpu.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::paged_xl {
namespace {

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

// One capture of a whole step, replayed with new lengths in the same memory. Whatever the first
// call loads, it loads under capture too: `make test-gpu` runs this test in a process of its own.
TEST_F(PagedGpu, TheFirstCallMayBeCapturedAndReplayedWithNewLengths) {
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

// Scratch memory of the pool is ordered by the stream: on many streams, and on one stream that
// threads share.
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

// A step whose scratch memory is the caller's and holds NaN wherever it is read before it is
// written. One workspace for the largest step serves smaller ones, at any address of K, V and r.
std::int64_t workspace_bytes(AttentionArgs args) {
  Tensor out(args.query.dtype(), args.query.shape(), args.query.device());
  args.out = out;
  return attention_workspace_bytes(args);
}

TEST_F(PagedGpu, WorkspaceOfTheCaller) {
  for (const Mode mode : kModes) {
    const auto step_of = [&](std::vector<std::int32_t> lens, std::int64_t heads) {
      return make_step({.name = "workspace",
                        .dtype = DType::bf16,
                        .mode = mode,
                        .num_heads = heads,
                        .num_kv_heads = heads,
                        .head_size = 128,
                        .context_lens = std::move(lens)});
    };
    const Step largest = step_of({5000, 1300, 3, 0, 777}, 16);
    const std::int64_t bytes = workspace_bytes(largest.on(kGpu).attention_args());
    EXPECT_GT(bytes, 0);
    EXPECT_EQ(workspace_bytes(largest.attention_args()), 0);
    Tensor workspace(DType::u8, {bytes});
    std::memset(workspace.data(), 0xff, static_cast<std::size_t>(bytes));
    for (const std::vector<std::int32_t>& lens :
         {std::vector<std::int32_t>{5000, 1300, 3, 0, 777}, {4000, 2}, {5000}, {1}, {0}}) {
      const Step step = step_of(lens, 16), there = step.on(kGpu);
      Tensor scratch = workspace.to(kGpu);
      AttentionArgs args = there.attention_args();
      EXPECT_LE(workspace_bytes(args), bytes);
      args.workspace = scratch;
      const Result with = run_there(args);
      expect_same(with, run_there(step.attention_args()));
      EXPECT_TRUE(same_bytes(with, run_there(there.attention_args())));
    }
  }
}

TEST_F(PagedGpu, WorkspacesThatDoNotServeAreRefused) {
  const Step step = make_step({.name = "workspace", .context_lens = {20, 33, 0}});
  const Step there = step.on(kGpu);
  AttentionArgs args = there.attention_args();
  const std::int64_t bytes = workspace_bytes(args);
  Tensor memory(DType::u8, {bytes + 256}, kGpu), on_host(DType::u8, {bytes});
  args.workspace = memory.view().slice(0, 0, bytes - 1);
  expect_refusal([&] { run_there(args); }, "paged_xl::attention: workspace: want " +
                                               std::to_string(bytes) + " bytes or more, got " +
                                               std::to_string(bytes - 1));
  args.workspace = memory.view().slice(0, 1, bytes + 1);
  expect_refusal([&] { run_there(args); },
                 "paged_xl::attention: workspace: want memory aligned to 256 bytes");
  args.workspace = on_host;
  expect_refusal([&] { run_there(args); }, "paged_xl::attention: workspace: want device cuda:0");
  args.workspace = memory.view().slice(0, 0, bytes);
  expect_same(run_there(args), run_there(step.attention_args()));
}

// A graph holds what it works in: memory of the pool, or of the caller.
TEST_F(PagedGpu, GraphsWorkInMemoryOfTheCaller) {
  for (const std::int64_t num_seqs : {3, 1}) {
    Loop loop(num_seqs);
    testing::Random random(10);
    AttentionArgs args = loop.fused_args();
    args.out = loop.fused;
    Tensor workspace(DType::u8, {attention_workspace_bytes(args)}, kGpu);
    args.workspace = workspace;
    const CudaStream stream;
    const Graph graph(stream.stream, [&] { attention(args, stream.options()); });
    for (int replay = 0; replay < 20; ++replay) {
      loop.set_step(random);
      graph.launch(stream.stream);
      stream.wait();
      ASSERT_TRUE(testing::same_bytes(loop.fused.to({}), run_there(loop.fused_args()).out));
    }
  }
}

TEST_F(PagedGpu, CheckingModeRefusesACapture) {
  Loop loop;
  CudaStream stream;
  RunOptions options = stream.options();
  options.check = true;
  const Graph graph(stream.stream, [&] {
    testing::expect_error(
        [&] { position_term({loop.query, loop.bias, loop.r, loop.lens, loop.term}, options); },
        ErrorCode::unsupported,
        "paged_xl::position_term: checking mode waits for the stream, which a stream in capture "
        "does not allow");
  });
}

TEST_F(PagedGpu, RunsOnTheDeviceOfTheTensors) {
  const Step step = make_step({.name = "second-gpu", .context_lens = {20, 33, 0}});
  testing::expect_runs_on_second_gpu([&](Device second) {
    expect_same(run_there(step.on(second).attention_args()), run_there(step.attention_args()));
  });
}

#endif

}  // namespace
}  // namespace winnow::paged_xl
