// GPU layers whose kernels come late or find no memory, and which rank errors name then. Every rank
// is a thread with a stream of its own, all on one GPU. Skipped without one.
#include <cstddef>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "winnow/expert_parallel/testing/forwarding_transport.h"
#include "winnow/expert_parallel/testing/gpu_ranks.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>

#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"
#include "winnow/expert_parallel/testing/late_rank.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// ---- Memory that the GPU does not have.

// All the memory of the GPU, while it is there.
class Hog {
 public:
  Hog() {
    for (std::size_t bytes = std::size_t{1} << 40; bytes >= 1 << 20; bytes /= 2) {
      for (void* memory; cudaMalloc(&memory, bytes) == cudaSuccess;) taken_.push_back(memory);
    }
    cudaGetLastError();
  }
  ~Hog() {
    for (void* memory : taken_) cudaFree(memory);
  }
  Hog(const Hog&) = delete;
  Hog& operator=(const Hog&) = delete;

 private:
  std::vector<void*> taken_;
};

class GpuMemory : public GpuTest {
 protected:
  // Two ranks whose dispatch needs more than a layer has at first.
  static Config config(int nodes = 1) {
    Config config = on(kGpu, small_config(2));
    config.max_tokens = 1 << 16;
    config.topk = 32;
    config.arena_rows = std::int64_t{2 * 32 + 1} << 16;  // every pair of both
    config.local_world_size = 2 / nodes;
    return config;
  }
  static DispatchArgs args_of(const RankDevice& place, const ConstTensorView& input,
                              const ConstTensorView& indices) {
    return {.input = input, .expert_indices = indices, .stream = place.stream()};
  }
};

TEST_F(GpuMemory, ACallForWhichThereIsNoneIsRefused) {
  World world(kGpu, config(), 2);
  std::vector<Tensor> inputs, indices;
  for (int rank = 0; rank < 2; ++rank) {
    inputs.push_back(world.place(rank).copy(Tensor(DType::f32, {3, 16})));
    indices.push_back(world.place(rank).copy(Tensor(DType::i32, {3, 32})));
    world.place(rank).wait();
  }
  const auto dispatch = [&] {
    return world.run([&](int rank) {
      const auto at = std::size_t(rank);
      world.layer(rank).dispatch(args_of(world.place(rank), inputs[at], indices[at]));
      world.place(rank).wait();
    });
  };
  std::vector<Outcome> refused;
  {
    const Hog hog;
    refused = dispatch();
  }
  for (const Outcome& outcome : refused) {
    EXPECT_EQ(outcome.code, ErrorCode::resource);
    EXPECT_THAT(outcome.text, StartsWith("expert_parallel::dispatch: rank 0: "));
    EXPECT_THAT(outcome.text, HasSubstr("out of memory"));
  }
  expect_all_return(dispatch());
  expect_all_return(world.barrier());
}

// Rank 1 gets all rows and has no room for their tables, when the others have gone on.
TEST_F(GpuMemory, ARankThatHasNoneLateTellsTheOthers) {
  for (const int nodes : {1, 2}) {
    SCOPED_TRACE(nodes);
    World world(kGpu, config(nodes), 2);
    std::vector<Tensor> inputs, to_nobody, to_rank_1;
    for (int rank = 0; rank < 2; ++rank) {
      const auto to = [&](std::int32_t chosen) {
        Tensor experts(DType::i32, {1 << 16, 32});
        for (std::int32_t& expert : experts.values<std::int32_t>()) expert = chosen;
        return world.place(rank).copy(experts);
      };
      inputs.push_back(world.place(rank).copy(Tensor(DType::f32, {1 << 16, 16})));
      to_nobody.push_back(to(-1));
      to_rank_1.push_back(to(2));
      world.place(rank).wait();
    }
    const auto dispatch = [&](const std::vector<Tensor>& indices) {
      return world.run([&](int rank) {
        const auto at = std::size_t(rank);
        world.layer(rank).dispatch(args_of(world.place(rank), inputs[at], indices[at]));
        // On another node rank 0 has nothing to wait for before the barrier, of which it receives
        // later.
        for (int later = 0; later < 2; ++later) {
          world.place(rank).wait();
          world.layer(rank).barrier(false, world.place(rank).stream());
        }
      });
    };
    expect_all_return(dispatch(to_nobody));  // takes what does not depend on the rows
    std::vector<Outcome> outcomes;
    {
      const Hog hog;
      outcomes = dispatch(to_rank_1);
    }
    const std::string text = ": rank 1: out of memory in the call";
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.code, ErrorCode::resource);
      EXPECT_THAT(outcome.text, StartsWith("expert_parallel::dispatch" + text));
      EXPECT_LT(outcome.seconds, 20);  // the deadline is a minute away
    }
    for (const Outcome& outcome : world.barrier()) {
      EXPECT_EQ(outcome.code, ErrorCode::resource);
      EXPECT_THAT(outcome.text, HasSubstr(text));
    }
    world.make(small_config(2));
    expect_working(world);
  }
}

// ---- Ranks that come late; all_to_all_faults_test.cc has those that do not come.

class GpuAbsence : public GpuTest {
 protected:
  static constexpr milliseconds kTimeout{300};
  static constexpr double kInTime = 0.3 + 2;

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    world_.make(small_config(4));  // loads the kernels, which takes longer than kTimeout
  }
  World world_{kGpu, 4};
};

// A rank whose work lies behind something long on its stream is late, and not absent.
TEST_F(GpuAbsence, OfARankThatIsOnlyLate) {
  Config config = small_config(4, kTimeout);
  config.local_world_size = 2;
  world_.make(config);
  for (const int late : {1, 2, 3}) {
    world_.dispatched([&](int rank, Given&) {
      if (rank == late) std::this_thread::sleep_for(kTimeout / 2);
    });
  }
}

// Rank 2 closes its layer although the GPU has not come to its calls. They run when the others have
// given up and a new layer is in use: what they still write goes where nobody looks. On four nodes
// the others close before they have told of the fault, so that it is everything.
TEST_F(GpuAbsence, OfKernelsThatRunWhenTheirLayerIsGone) {
  for (const int nodes : {1, 2, 4}) {
    SCOPED_TRACE(nodes);
    const Problem problem{.nodes = nodes,
                          .local_world_size = 4 / nodes,
                          .max_tokens = 40,
                          .hidden = 64,
                          .arena_rows = 4000,  // no call waits for room
                          .tokens = Tokens::full};
    const std::vector<Round> rounds = make_rounds(problem);
    Config config = problem.config();
    config.timeout = kTimeout;
    world_.make(config);
    std::vector<Dispatched> held(4);
    std::vector<Comparisons> comparisons(4);
    std::vector<std::unique_ptr<UnwaitedDispatch>> given(4);
    const auto outcomes = world_.run([&](int rank) {
      const auto at = std::size_t(rank);
      AllToAll& layer = world_.layer(rank);
      const RankDevice& place = world_.place(rank);
      held[at] =
          dispatch_and_check(layer, place, problem, rounds[0], rank, nullptr, comparisons[at]);
      given[at] = std::make_unique<UnwaitedDispatch>(place, rounds[1], rank);
      if (rank == 2) hold_up(place, 3 * kTimeout);
      layer.dispatch(given[at]->args);
      if (rank == 2 || nodes == 4) return layer.close();
      place.wait();
      layer.barrier(false, place.stream());
    });
    for (const auto& one : world_.layers()) one->close();
    for (const int rank : {0, 1, 3}) {
      const Outcome& outcome = outcomes[std::size_t(rank)];
      if (nodes < 4) expect_timeout(outcome, "expert_parallel::dispatch: rank ", kInTime);
    }

    const Layers anew = world_.ranks().layers(on(kGpu, small_config(4)));
    const auto late = static_cast<cudaStream_t>(world_.place(2).stream().handle);
    expect_working(world_.ranks(), anew);
    EXPECT_EQ(cudaStreamQuery(late), cudaErrorNotReady);
    while (cudaStreamQuery(late) == cudaErrorNotReady) expect_working(world_.ranks(), anew);
    expect_working(world_.ranks(), anew);
    for (int rank = 0; rank < 4; ++rank) {
      const auto at = std::size_t(rank);
      const RankDevice place(kGpu);
      check_dispatched(place, problem, rounds[0], rank, held[at], comparisons[at]);
      expect_passed(comparisons[at]);
    }
  }
}

// A rank that has left the world, as a thread that threw does: the kernels that wait for it end at
// once and not at their deadline, which is a minute away. Nothing that it had queued is lost.
TEST_F(GpuAbsence, OfARankWhoseTransportIsGone) {
  for (const int nodes : {1, 2, 4}) {
    for (const std::int64_t worst_case_rows : {0, 100}) {
      SCOPED_TRACE(std::to_string(nodes) + " nodes, " + std::to_string(worst_case_rows) + " rows");
      InProcessWorld world(4);
      Config config = on(kGpu, small_config(4));
      config.local_world_size = 4 / nodes;
      config.arena_rows = 1000;  // no call waits for room
      std::vector<Outcome> outcomes(4);
      std::latch made(4);
      std::vector<std::thread> ranks;
      for (int rank = 0; rank < 4; ++rank) {
        ranks.emplace_back([&, rank] {
          const DeviceGuard guard(kGpu);
          auto layer = std::make_unique<AllToAll>(world.transport(rank), world.store(), config);
          const RankDevice place(kGpu);
          Given given(place, 3, 0, 1);
          given.args.worst_case_rows = worst_case_rows;
          made.arrive_and_wait();
          if (rank == 2) {
            // Late: the others get what it had queued before it left.
            hold_up(place, milliseconds(300));
            layer->barrier(false, place.stream());
            layer.reset();
            return;
          }
          outcomes[std::size_t(rank)] = outcome_of([&] {
            layer->barrier(false, place.stream());
            place.wait();
          });
          EXPECT_EQ(outcomes[std::size_t(rank)].text, "") << "what a rank has queued counts";
          outcomes[std::size_t(rank)] = outcome_of([&] {
            const Dispatched got = layer->dispatch(given.args);
            place.wait();
            layer->barrier(true, place.stream());
          });
          place.wait();
        });
      }
      for (std::thread& rank : ranks) rank.join();
      for (const int rank : {0, 1, 3}) {
        const Outcome& outcome = outcomes[std::size_t(rank)];
        expect_timeout(outcome, " of rank 2 (", 5);
        EXPECT_THAT(outcome.text, HasSubstr(", its transport is closed"));
      }
    }
  }
}

// ---- Waits that name what does not come.

using GpuFaults = GpuTest;

// Behind the exchange of combine the kernels of this rank come late.
class LateTransport : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  static constexpr milliseconds kLate{1200};
  const FabricKernels* fabric() override {
    static const FabricKernels& real = *ForwardingTransport::fabric();
    static const FabricKernels late = [] {
      FabricKernels fabric = real;
      fabric.exchange = [](const ExchangeParams& params, void* stream) {
        const int status = real.exchange(params, stream);
        if (params.header.options.call == Call::combine) hold_up(stream, kLate);
        return status;
      };
      return fabric;
    }();
    return &late;
  }
};

TEST_F(GpuFaults, NameTheRankWhoseRowsOrSumsDoNotCome) {
  constexpr milliseconds kTimeout{300};
  const std::tuple<RowOrder, int, std::string> ways[] = {
      {RowOrder::token_major, 24, "the expert rows"},     // pushed
      {RowOrder::token_major, 8, "the end of the sums"},  // read
      {RowOrder::expert_major, 24, "the sums"}};          // pushed
  for (const auto& [order, sms, awaited] : ways) {
    SCOPED_TRACE(awaited);
    const Ranks ranks(4);
    Config config = small_config(4, kTimeout);
    config.enable_local_combine = true;
    config.sm_count = sms;
    const auto outcomes = ranks.run([&](int rank) {
      const DeviceGuard guard(kGpu);
      std::shared_ptr<Transport> transport = ranks.transport(rank);
      if (rank == 2) transport = std::make_shared<LateTransport>(transport);
      AllToAll layer(transport, ranks.store(), on(kGpu, config));
      const RankDevice place(kGpu);
      Given given(place, 4, 0, 1);  // a token for each rank
      given.args.order = order;
      const Dispatched got = layer.dispatch(given.args);
      CombineArgs args;
      args.expert_output = layer.combine_buffer(*got.descriptor);
      args.stream = place.stream();
      layer.combine(args, *got.descriptor);
      // The late rank finds all that it waits for, and learns of the fault in the first barrier.
      for (int i = 0; i < 2; ++i) {
        place.wait();
        layer.barrier(true, place.stream());
      }
    });
    for (const Outcome& outcome : outcomes) {
      expect_timeout(outcome, " for " + awaited + " of rank 2 (", 5);
      EXPECT_THAT(outcome.text, StartsWith("expert_parallel::combine: rank "));
    }
  }
}

// The blocks of a kernel that meet cannot where those of another layer, which wait for a late rank,
// leave them too few SMs.
TEST_F(GpuFaults, NameTheKernelWhoseBlocksFindNoRoom) {
  const Ranks ranks(2), alone(1);
  Config holding = small_config(2);
  holding.enable_local_combine = true;
  holding.sm_count = 24;
  Config waiting = small_config(1, milliseconds(300));
  waiting.experts = 3300;  // whose counters leave room for one block of an SM
  waiting.sm_count = 1000;
  Layers waiters = alone.layers(on(kGpu, waiting));
  std::vector<std::unique_ptr<AllToAll>> holders(2);
  const RankDevice places[2] = {RankDevice(kGpu), RankDevice(kGpu)};
  std::vector<std::unique_ptr<Given>> inputs(2);  // to give memory back waits for the GPU
  std::vector<Tensor> sums(2);
  expect_all_return(ranks.run([&](int rank) {
    const DeviceGuard guard(kGpu);
    std::shared_ptr<Transport> transport = ranks.transport(rank);
    if (rank == 1) transport = std::make_shared<LateTransport>(transport);
    auto& layer = holders[std::size_t(rank)];
    layer = std::make_unique<AllToAll>(transport, ranks.store(), on(kGpu, holding));
    const RankDevice& place = places[rank];
    inputs[std::size_t(rank)] = std::make_unique<Given>(place, 2, 0, 1);  // a token for each rank
    const Dispatched got = layer->dispatch(inputs[std::size_t(rank)]->args);
    CombineArgs args;
    args.expert_output = layer->combine_buffer(*got.descriptor);
    args.stream = place.stream();
    sums[std::size_t(rank)] = layer->combine(args, *got.descriptor);
  }));
  std::this_thread::sleep_for(milliseconds(100));
  const auto outcomes = alone.run([&](int) {
    const RankDevice place(kGpu);
    const Given given(place);
    waiters[0]->dispatch(given.args);
  });
  expect_timeout(outcomes[0], "expert_parallel::dispatch: rank 0 waited 0.3 s for the blocks of",
                 5);
  EXPECT_THAT(outcomes[0].text, HasSubstr(" run: other work holds its SMs"));
  for (const RankDevice& place : places) place.wait();
  waiters = alone.layers(on(kGpu, waiting));
  expect_working(alone, waiters);
}

}  // namespace
}  // namespace winnow::expert_parallel

#endif
