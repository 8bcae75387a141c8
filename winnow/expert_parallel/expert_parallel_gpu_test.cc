// What only a GPU can show of the all-to-all beyond its case table: captured graphs, ranks that
// come late or never, refusals of the GPU's own, and that nothing is left behind. Every rank is a
// thread with a stream of its own, all on one GPU. Skipped without one.
#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "winnow/expert_parallel/gpu_test_ranks.h"
#include "winnow/testing/generate.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;

void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

cudaStream_t stream_of(const Place& place) {
  return static_cast<cudaStream_t>(place.stream().handle);
}

// What `body` enqueues on the stream, to be launched again and again.
class Graph {
 public:
  template <class Body>
  Graph(cudaStream_t stream, const Body& body) : stream_(stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&graph_, graph, 0));
    cudaGraphDestroy(graph);
  }
  ~Graph() { cudaGraphExecDestroy(graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() { check(cudaGraphLaunch(graph_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
};

// ---- Graphs.

// One rank's dispatch in the worst-case mode, experts that return what they get, and combine, in a
// graph whose tensors are written between launches.
class Recorded {
 public:
  Recorded(AllToAll& layer, const Place& place, const Problem& problem, const Round& first,
           std::int64_t rows)
      : place_(place), rank_(layer.rank()) {
    const Round::Rank& mine = first.ranks[std::size_t(rank_)];
    input_ = place.copy(mine.input);
    indices_ = place.copy(mine.expert_indices);
    weights_ = place.copy(mine.weights);
    sums_ = place.make(problem.dtype, {{mine.input.size(0), problem.hidden}});
    graph_ = std::make_unique<Graph>(stream_of(place), [&] {
      DispatchArgs args;
      args.input = input_;
      args.expert_indices = indices_;
      args.weights = weights_;
      args.order = problem.token_major ? RowOrder::token_major : RowOrder::expert_major;
      args.worst_case_rows = rows;
      args.stream = place.stream();
      dispatched_ = layer.dispatch(args);
      const TensorView buffer = layer.combine_buffer(*dispatched_.descriptor);
      check(cudaMemcpyAsync(buffer.data(), dispatched_.output.data(),
                            std::size_t(buffer.numel() * size_of(problem.dtype)),
                            cudaMemcpyDeviceToDevice, stream_of(place)));
      CombineArgs back;
      back.expert_output = buffer;
      back.weighted = problem.weighted_combine;
      back.out = sums_;
      back.stream = place.stream();
      layer.combine(back, *dispatched_.descriptor);
    });
  }

  void launch(const Round& round) {
    const Round::Rank& mine = round.ranks[std::size_t(rank_)];
    place_.write(input_, mine.input);
    place_.write(indices_, mine.expert_indices);
    place_.write(weights_, mine.weights);
    graph_->launch();
    place_.wait();
  }
  void compare(const Round& round, bool weighted, Comparisons& comparisons) const {
    const auto head = [](const Tensor& all, std::int64_t rows) {
      return all.view().slice(0, 0, rows);
    };
    const auto& rows = round.rows[std::size_t(rank_)];
    const auto count = std::int64_t(rows.size());
    comparisons.add(compare_bits("output", head(place_.to_host(dispatched_.output.view()), count),
                                 oracle::gather(round.world, rows, &oracle::RankInput::input)));
    comparisons.add(compare_bits("weights", head(place_.to_host(dispatched_.weights.view()), count),
                                 oracle::gather_weights(round.world, rank_, rows)));
    std::vector<Tensor> outputs;
    std::vector<ConstTensorView> views;
    for (const auto& other : round.rows) {
      outputs.push_back(oracle::gather(round.world, other, &oracle::RankInput::input));
    }
    for (const Tensor& output : outputs) views.push_back(output);
    comparisons.add(
        compare_bits("combine", place_.to_host(sums_.view()),
                     oracle::combine(round.world, rank_, round.rows, views, weighted, {})));
  }

 private:
  const Place& place_;
  int rank_;
  Tensor input_, indices_, weights_, sums_;
  Dispatched dispatched_;
  std::unique_ptr<Graph> graph_;
};

Problem recorded_problem(int nodes, int locals) {
  return {.name = "graph",
          .nodes = nodes,
          .local_world_size = locals,
          .topk = 3,
          .max_tokens = 40,
          .hidden = 64,
          .arena_rows = 2000,
          .tokens = Tokens::full,
          .choice = ExpertChoice::dropped,
          .weights = true,
          .weighted_combine = true,
          .rounds = 5};
}

using Graphs = GpuTest;

TEST_F(Graphs, LaunchedAgainWithOtherIndices) {
  for (const auto& [nodes, locals] : {std::pair{1, 1}, {1, 2}, {1, 4}, {2, 2}, {4, 1}}) {
    for (const bool local_combine : {false, true}) {
      SCOPED_TRACE(std::to_string(nodes) + " nodes of " + std::to_string(locals) +
                   (local_combine ? ", local combine" : ""));
      Problem problem = recorded_problem(nodes, locals);
      problem.local_combine = local_combine;
      const std::vector<Round> rounds = make_rounds(problem);
      std::int64_t rows = 5;
      for (const Round& round : rounds) rows = std::max(rows, round.most_rows() + 5);
      GpuWorld world(problem.config(), problem.world_size());
      std::vector<Comparisons> comparisons(rounds.front().ranks.size());
      expect_all_return(world.run([&](int rank) {
        Recorded recorded(world.layer(rank), world.place(rank), problem, rounds[0], rows);
        for (int pass = 0; pass < 2; ++pass) {
          for (const Round& round : rounds) {
            recorded.launch(round);
            recorded.compare(round, problem.weighted_combine, comparisons[std::size_t(rank)]);
          }
        }
        world.layer(rank).barrier(false, world.place(rank).stream());
      }));
      for (const Comparisons& one : comparisons) expect_passed(one);
      expect_works(world.ranks(), world.layers(), {.topk = 3, .max_tokens = 40, .hidden = 64});
    }
  }
}

TEST_F(Graphs, OverflowIsToldByTheNextCall) {
  for (const auto& [nodes, locals] : {std::pair{1, 3}, {2, 2}}) {
    SCOPED_TRACE(nodes);
    const Problem problem = recorded_problem(nodes, locals);
    const std::vector<Round> rounds = make_rounds(problem);
    GpuWorld world(problem.config(), problem.world_size());
    const std::int64_t rows = 20;  // far too few
    std::string expected;
    for (std::size_t rank = 0; rank < rounds[0].rows.size() && expected.empty(); ++rank) {
      const std::size_t wanted = rounds[0].rows[rank].size();
      if (wanted <= 20) continue;
      expected = "expert_parallel::barrier: rank " + std::to_string(rank) +
                 ": worst_case_rows: want " + std::to_string(wanted) + " or more, got 20";
    }
    ASSERT_NE(expected, "");
    std::vector<std::unique_ptr<Recorded>> recorded(rounds[0].rows.size());
    expect_all_return(world.run([&](int rank) {
      recorded[std::size_t(rank)] = std::make_unique<Recorded>(world.layer(rank), world.place(rank),
                                                               problem, rounds[0], rows);
      recorded[std::size_t(rank)]->launch(rounds[0]);
    }));
    expect_all_refuse(
        world.run([&](int rank) { world.layer(rank).barrier(false, world.place(rank).stream()); }),
        expected);
    expect_all_return(world.run([&](int rank) {
      world.layer(rank).barrier(false, world.place(rank).stream());
      world.place(rank).wait();
    }));
  }
}

TEST_F(Graphs, BadIndicesAreToldByTheNextCall) {
  const Problem problem = recorded_problem(2, 2);
  std::vector<Round> rounds = make_rounds(problem);
  GpuWorld world(problem.config(), problem.world_size());
  std::vector<Comparisons> comparisons(rounds.front().ranks.size());
  std::vector<std::unique_ptr<Recorded>> recorded(rounds[0].rows.size());
  expect_all_return(world.run([&](int rank) {
    recorded[std::size_t(rank)] =
        std::make_unique<Recorded>(world.layer(rank), world.place(rank), problem, rounds[0], 500);
    Round bad = make_round(problem, 7, 8);
    bad.ranks[2].expert_indices.view().at<std::int32_t>(11, 1) = 1000;
    recorded[std::size_t(rank)]->launch(bad);
  }));
  expect_all_refuse(
      world.run([&](int rank) { world.layer(rank).barrier(true, world.place(rank).stream()); }),
      "expert_parallel::barrier: rank 2: expert_indices: want -1 to " +
          std::to_string(problem.experts()) + ", got 1000 for token 11");
  expect_all_return(world.run([&](int rank) {
    world.layer(rank).barrier(true, world.place(rank).stream());
    recorded[std::size_t(rank)]->launch(rounds[1]);
    recorded[std::size_t(rank)]->compare(rounds[1], true, comparisons[std::size_t(rank)]);
  }));
  for (const Comparisons& one : comparisons) expect_passed(one);
}

TEST_F(Graphs, CannotWaitForCounts) {
  GpuWorld world(small_config(2), 2);
  for (const Outcome& outcome : world.run([&](int rank) {
         const GpuGiven given(world.place(rank));
         const cudaStream_t stream = stream_of(world.place(rank));
         check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
         const Outcome inner = outcome_of([&] { world.layer(rank).dispatch(given.args); });
         cudaGraph_t graph = nullptr;
         cudaStreamEndCapture(stream, &graph);
         if (graph != nullptr) cudaGraphDestroy(graph);
         if (inner.code) throw Error(*inner.code, "inner", inner.text);
       })) {
    EXPECT_EQ(outcome.code, ErrorCode::invalid_argument) << outcome.text;
    EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::dispatch: "));
    EXPECT_THAT(outcome.text, HasSubstr("worst_case_rows"));
  }
}

// ---- Refusals.

class GpuRefusals : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    world_ = std::make_unique<GpuWorld>(small_config(3), 3);
  }
  void TearDown() override {
    if (world_ == nullptr) return;
    expect_working(world_->ranks(), world_->layers());
  }
  // Every rank dispatches after `change` of what it gives, and then of its arguments.
  template <class Change>
  std::vector<Outcome> dispatch(const Change& change) {
    return world_->run([&](int rank) {
      Given given;
      const Place& place = world_->place(rank);
      change(rank, given);
      GpuGiven there(place, given);
      for (auto [argument, tensor] : {std::pair{&given.args.input, &given.input},
                                      {&given.args.expert_indices, &given.indices}}) {
        if (argument->data() != tensor->data()) continue;
        *argument = argument == &given.args.input ? there.input.view() : there.indices.view();
      }
      given.args.stream = place.stream();
      world_->layer(rank).dispatch(given.args);
      place.wait();
    });
  }
  std::unique_ptr<GpuWorld> world_;
};

TEST_F(GpuRefusals, HaveTheTextsOfTheCpu) {
  const Ranks cpu_ranks(3);
  const Layers cpu = cpu_ranks.layers(small_config(3));
  const auto compare = [&](const auto& change) {
    const auto wanted = cpu_ranks.run([&](int rank) {
      Given given;
      change(rank, given);
      cpu[std::size_t(rank)]->dispatch(given.args);
    });
    const auto got = dispatch(change);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_NE(wanted[rank].text, "");
      EXPECT_EQ(got[rank].text, wanted[rank].text);
      EXPECT_EQ(got[rank].code, wanted[rank].code);
    }
  };
  compare([](int rank, Given& given) {  // an index out of range
    if (rank == 2) given.indices.view().at<std::int32_t>(1, 1) = 7;
  });
  compare([](int rank, Given& given) {  // two of them
    if (rank != 1) given.indices.view().at<std::int32_t>(2, 0) = -5;
  });
  compare([](int rank, Given& given) {
    if (rank == 2) given.args.expert_alignment = 16;
  });
  compare([](int rank, Given& given) {
    if (rank == 0) given.args.order = RowOrder::token_major;
  });
  compare([](int rank, Given& given) { given.args.worst_case_rows = rank == 1 ? 20 : 30; });
  compare([](int rank, Given& given) {
    if (rank == 1) given.args.expert_alignment = 0;
  });
  compare([](int rank, Given& given) {
    if (rank == 1) given.args.worst_case_rows = -1;
  });
  compare([](int rank, Given& given) {
    if (rank == 1) given.args.input = {};
  });
  compare([](int rank, Given& given) {
    if (rank == 1) given.args.expert_indices = {};
  });
}

TEST_F(GpuRefusals, MoreTokensThanMaxTokens) {
  for (const Outcome& outcome : world_->run([&](int rank) {
         const GpuGiven given(world_->place(rank), Given(rank == 1 ? 5 : 3));
         world_->layer(rank).dispatch(given.args);
       })) {
    EXPECT_THAT(outcome.text, HasSubstr("rank 1: input: want at most max_tokens = 4 tokens"));
  }
}

TEST_F(GpuRefusals, TensorsOfTheHost) {
  for (const Outcome& outcome : world_->run([&](int rank) {
         GpuGiven given(world_->place(rank));
         const Given host;
         if (rank == 1) given.args.input = host.input;
         world_->layer(rank).dispatch(given.args);
       })) {
    EXPECT_THAT(outcome.text, HasSubstr("rank 1: input"));
    EXPECT_THAT(outcome.text, HasSubstr("cuda:0"));
  }
}

TEST_F(GpuRefusals, TheDefaultStreamOfASharedGpu) {
  for (const Outcome& outcome : world_->run([&](int rank) { world_->layer(rank).barrier(); })) {
    EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::barrier: stream: want"));
  }
}

TEST_F(GpuRefusals, DescriptorsOfOtherLayers) {
  GpuWorld other(small_config(3), 3);
  std::vector<Dispatched> got(3);
  expect_all_return(other.run([&](int rank) {
    const GpuGiven given(other.place(rank));
    got[std::size_t(rank)] = other.layer(rank).dispatch(given.args);
    other.place(rank).wait();
  }));
  for (const Outcome& outcome : world_->run([&](int rank) {
         GpuGiven given(world_->place(rank));
         given.args.expert_indices = {};
         given.args.cached = got[std::size_t(rank)].descriptor;
         world_->layer(rank).dispatch(given.args);
       })) {
    EXPECT_THAT(outcome.text, HasSubstr("rank 0: cached: want a descriptor of this layer"));
  }
}

// ---- Ranks that do not come.

class GpuAbsence : public GpuTest {
 protected:
  static constexpr milliseconds kTimeout{300};
  static constexpr double kInTime = 0.3 + 2;

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    world_ = std::make_unique<GpuWorld>(small_config(4), 4);
  }
  void make_layers(int nodes) {
    Config config = small_config(4, kTimeout);
    config.local_world_size = 4 / nodes;
    world_->make(config);
  }
  // `call` on all ranks but 2, which comes when the others have given up and hears of it: everyone
  // gets an error in time, later calls fail at once, and a new layer works.
  template <class Call>
  void expect_named(const std::string& operation, int nodes, const Call& call) {
    const auto outcomes = world_->run([&](int rank) {
      if (rank == 2) std::this_thread::sleep_for(3 * kTimeout);
      call(rank);
      world_->place(rank).wait();
      world_->layer(rank).barrier(true, world_->place(rank).stream());
      world_->place(rank).wait();
      world_->layer(rank).barrier(true, world_->place(rank).stream());
    });
    for (int rank = 0; rank < 4; ++rank) {
      SCOPED_TRACE(rank);
      // Alone on its node, the late rank finds everything there and is told by nobody.
      if (rank == 2 && nodes == 4) continue;
      const Outcome& outcome = outcomes[std::size_t(rank)];
      expect_timeout(outcome, "of rank ", rank == 2 ? 10 : kInTime);
      EXPECT_THAT(outcome.text, StartsWith("expert_parallel::" + operation + ": rank "));
      EXPECT_THAT(outcome.text, HasSubstr(nodes == 1 ? "of rank 2 (" : "of rank "));
    }
    for (const int rank : {0, 1, 3}) {
      const Outcome again =
          outcome_of([&] { world_->layer(rank).barrier(false, world_->place(rank).stream()); });
      expect_timeout(again, outcomes[std::size_t(rank)].text, 0.3);
    }
    const auto start = std::chrono::steady_clock::now();
    for (const auto& one : world_->layers()) one->close();
    EXPECT_LT(seconds_since(start), 1);
    world_->make(small_config(4));
    expect_working(world_->ranks(), world_->layers());
  }
  std::unique_ptr<GpuWorld> world_;
};

TEST_F(GpuAbsence, AtDispatch) {
  for (const int nodes : {1, 2, 4}) {
    SCOPED_TRACE(nodes);
    make_layers(nodes);
    expect_named("dispatch", nodes, [&](int rank) {
      const GpuGiven given(world_->place(rank), Given(3, 1));
      world_->layer(rank).dispatch(given.args);
    });
  }
}

TEST_F(GpuAbsence, AtWorstCaseDispatch) {
  for (const int nodes : {1, 2}) {
    SCOPED_TRACE(nodes);
    make_layers(nodes);
    expect_named("dispatch", nodes, [&](int rank) {
      GpuGiven given(world_->place(rank), Given(3, 1));
      given.args.worst_case_rows = 30;
      world_->layer(rank).dispatch(given.args);
    });
  }
}

TEST_F(GpuAbsence, AtCombine) {
  for (const int nodes : {1, 2}) {
    SCOPED_TRACE(nodes);
    make_layers(nodes);
    std::vector<Dispatched> got(4);
    expect_all_return(world_->run([&](int rank) {
      Given given(4);
      for (int i = 0; i < 8; ++i) given.indices.values<std::int32_t>()[std::size_t(i)] = i;
      const GpuGiven there(world_->place(rank), given);
      got[std::size_t(rank)] = world_->layer(rank).dispatch(there.args);
      world_->place(rank).wait();
    }));
    expect_named("combine", nodes, [&](int rank) {
      const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
      CombineArgs args;
      args.expert_output = world_->layer(rank).combine_buffer(descriptor);
      args.stream = world_->place(rank).stream();
      world_->layer(rank).combine(args, descriptor);
    });
  }
}

TEST_F(GpuAbsence, AtABarrier) {
  for (const bool node_only : {false, true}) {
    SCOPED_TRACE(node_only);
    make_layers(1);
    expect_named("barrier", 1, [&](int rank) {
      world_->layer(rank).barrier(node_only, world_->place(rank).stream());
    });
  }
}

// A rank whose work lies behind something long on its stream is late, and not absent.
TEST_F(GpuAbsence, OfARankThatIsOnlyLate) {
  make_layers(2);
  const auto outcomes = world_->run([&](int rank) {
    for (int i = 0; i < 3; ++i) {
      if (rank == 1 + i) std::this_thread::sleep_for(kTimeout / 2);
      const GpuGiven given(world_->place(rank));
      world_->layer(rank).dispatch(given.args);
      world_->place(rank).wait();
    }
  });
  expect_all_return(outcomes);
}

// ---- Creation and end.

using GpuLayers = GpuTest;

TEST_F(GpuLayers, AHundredTimesLeaveNothing) {
  const Ranks ranks(2);
  std::size_t early = 0, late = 0, total = 0;
  for (int i = 0; i < 100; ++i) {
    const Layers layers = ranks.layers(on_gpu(small_config(2)));
    expect_all_return(ranks.run([&](int rank) {
      const Place place(kGpu);
      AllToAll& layer = *layers[std::size_t(rank)];
      const GpuGiven given(place);
      const Dispatched got = layer.dispatch(given.args);
      if (i % 2 == 0) layer.close();
      if (i % 3 == 0) place.wait();
      place.wait();
      layer.close();
    }));
    if (i == 30) check(cudaMemGetInfo(&early, &total));
  }
  check(cudaMemGetInfo(&late, &total));
  EXPECT_GE(late + (std::size_t{8} << 20), early);
}

TEST_F(GpuLayers, TwoAtOnceEvenIfOneEnds) {
  const Ranks ranks(2);
  std::vector<Comparisons> comparisons(2);
  const Problem problem{.local_world_size = 2, .choice = ExpertChoice::dropped, .weights = true};
  const std::vector<Round> rounds = make_rounds(problem);
  expect_all_return(ranks.run([&](int rank) {
    auto first = ranks.layer(rank, on_gpu(problem.config()));
    const auto second = ranks.layer(rank, on_gpu(problem.config()));
    Comparisons& mine = comparisons[std::size_t(rank)];
    mine.add(run_rank(*first, problem, rounds), rank);
    const Place place(kGpu);
    for (int i = 0; i < 20; ++i) {
      // One closes while the other's kernels wait for the rank that is still in close().
      if (i == 10 && rank == 0) first.reset();
      second->barrier(false, place.stream());
      if (i == 10 && rank == 1) first.reset();
    }
    place.wait();
    mine.add(run_rank(*second, problem, rounds), rank);
  }));
  for (const Comparisons& one : comparisons) expect_passed(one);
}

TEST_F(GpuLayers, OutputsOutliveThem) {
  const Ranks ranks(2);
  expect_all_return(ranks.run([&](int rank) {
    const Place place(kGpu);
    Dispatched got;
    const Given given(3, 1);
    {
      const auto layer = ranks.layer(rank, on_gpu(small_config(2)));
      const GpuGiven there(place, given);
      got = layer->dispatch(there.args);
      place.wait();
    }
    const Tensor output = place.to_host(got.output.view());
    EXPECT_EQ(output.size(0), rank == 0 ? 12 : 0);
    for (const float value : output.values<float>()) EXPECT_EQ(value, 0.0f);
  }));
}

TEST_F(GpuLayers, UnsupportedGpusAreNamed) {
  const Ranks ranks(2);
  Config config = small_config(2);
  config.device = {DeviceType::cuda, 99};
  for (const Outcome& outcome : ranks.run([&](int rank) { ranks.layer(rank, config); })) {
    EXPECT_EQ(outcome.code, ErrorCode::unsupported) << outcome.text;
    EXPECT_THAT(outcome.text, StartsWith("expert_parallel::AllToAll: cuda:99 cannot be used: "));
  }
}

// ---- Between nodes.

// Counts of whose memory pointers are asked for.
class WatchedMemory : public SymmetricMemory {
 public:
  WatchedMemory(std::shared_ptr<SymmetricMemory> memory, std::vector<int>& asked)
      : SymmetricMemory(memory->local(), memory->bytes()),
        memory_(std::move(memory)),
        asked_(asked) {}
  std::byte* peer(int rank) override {
    ++asked_[std::size_t(rank)];
    return memory_->peer(rank);
  }
  std::byte* const* wire() override { return memory_->wire(); }

 private:
  std::shared_ptr<SymmetricMemory> memory_;
  std::vector<int>& asked_;
};

class WatchedTransport : public Transport {
 public:
  WatchedTransport(std::shared_ptr<Transport> transport, std::vector<int>& asked)
      : transport_(std::move(transport)), asked_(asked) {}
  int rank() const override { return transport_->rank(); }
  int world_size() const override { return transport_->world_size(); }
  std::string name() const override { return transport_->name(); }
  std::string world_id() const override { return transport_->world_id(); }
  std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes, const Deadline& deadline,
                                            std::string_view what) override {
    return transport_->allocate(bytes, deadline, what);
  }
  std::shared_ptr<SymmetricMemory> allocate_device(Device device, std::size_t bytes,
                                                   const Deadline& deadline,
                                                   std::string_view what) override {
    return std::make_shared<WatchedMemory>(
        transport_->allocate_device(device, bytes, deadline, what), asked_);
  }
  const Wire* wire() override { return transport_->wire(); }
  int ranks_on_gpu() const override { return transport_->ranks_on_gpu(); }
  void put(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
           std::size_t bytes) override {
    transport_->put(memory, rank, offset, source, bytes);
  }
  void put_signal(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
                  std::size_t bytes, std::size_t signal_offset, std::uint64_t value) override {
    transport_->put_signal(memory, rank, offset, source, bytes, signal_offset, value);
  }
  std::string describe_peer(int rank) const override { return transport_->describe_peer(rank); }
  bool peer_gone(int rank) const override { return transport_->peer_gone(rank); }

 private:
  std::shared_ptr<Transport> transport_;
  std::vector<int>& asked_;
};

TEST_F(GpuLayers, TakeNoPointerAcrossNodes) {
  for (const auto& [nodes, locals] : {std::pair{2, 2}, {4, 1}}) {
    const Problem problem{.nodes = nodes,
                          .local_world_size = locals,
                          .topk = 3,
                          .arena_rows = 4,  // grows
                          .choice = ExpertChoice::dropped,
                          .local_combine = true,
                          .weights = true,
                          .in_flight = true,
                          .rounds = 3};
    const std::vector<Round> rounds = make_rounds(problem);
    const Ranks ranks(4);
    const Topology topology(4, locals);
    std::vector<Comparisons> comparisons(4);
    std::vector<std::vector<int>> asked(4, std::vector<int>(4));
    expect_all_return(ranks.run([&](int rank) {
      AllToAll layer(
          std::make_shared<WatchedTransport>(ranks.transport(rank), asked[std::size_t(rank)]),
          ranks.store(), on_gpu(problem.config()));
      comparisons[std::size_t(rank)] = run_rank(layer, problem, rounds);
    }));
    for (int rank = 0; rank < 4; ++rank) {
      expect_passed(comparisons[std::size_t(rank)]);
      for (int other = 0; other < 4; ++other) {
        const int count = asked[std::size_t(rank)][std::size_t(other)];
        if (topology.same_node(rank, other)) {
          EXPECT_GT(count, 0) << rank << " of " << other;
        } else {
          EXPECT_EQ(count, 0) << rank << " of " << other;
        }
      }
    }
  }
}

}  // namespace
}  // namespace winnow::expert_parallel

#else

TEST(ExpertParallelGpu, NeedsCuda) { GTEST_SKIP() << "this build has no CUDA kernels"; }

#endif
