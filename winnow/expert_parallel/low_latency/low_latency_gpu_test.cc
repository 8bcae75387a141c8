// Tests of the low-latency calls that need a GPU, beyond their case table: graphs that are replayed
// with other tokens and experts. The ranks are threads on one GPU, each with a stream.
#include <memory>
#include <string>
#include <vector>

#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/testing/gpu_ranks.h"
#include "winnow/expert_parallel/testing/low_latency_problem.h"
#include "winnow/testing/gpu_test.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>

namespace winnow::expert_parallel {
namespace {

// A graph of one rank's dispatch and combine, whose experts return their inputs. Its tensors are
// written between launches.
class Recorded {
 public:
  Recorded(LowLatency& layer, const RankDevice& place, const LowLatencyProblem& problem,
           const LowLatencyRound& first)
      : layer_(layer), place_(place), tensors_(place, problem, first, layer.rank()) {
    graph_ = std::make_unique<testing::Graph>(
        stream(), [&] { call(); }, cudaStreamCaptureModeThreadLocal);
  }

  void launch(const LowLatencyRound& round) {
    tensors_.give(round);
    graph_->launch(stream());
  }
  // The first wrong element of the combined rows, or an empty text.
  std::string wrong(const LowLatencyRound& round) const {
    const auto me = std::size_t(layer_.rank());
    const Tensor out = place_.to_host(tensors_.combine_args(CallPart::both).out);
    const ConstTensorView input = round.inputs[me];
    for (std::int64_t token = 0; token < out.size(0); ++token) {
      for (std::int64_t c = 0; c < out.size(1); ++c) {
        const BFloat16 want = low_latency_oracle::sum_of(
            round.world, round.indices[me], round.weights[me], token,
            [&](std::int64_t, std::int32_t) { return float(input.at<BFloat16>(token, c)); });
        if (float(out.view().at<BFloat16>(token, c)) == float(want)) continue;
        return "token " + std::to_string(token) + ", column " + std::to_string(c);
      }
    }
    return "";
  }

  void call() {
    const LowLatencyDispatchArgs dispatched = tensors_.dispatch_args(CallPart::both);
    LowLatencyCombineArgs args = tensors_.combine_args(CallPart::both);
    args.expert_output = dispatched.output;
    layer_.dispatch(dispatched);
    layer_.combine(args);
  }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(place_.stream().handle); }

  LowLatency& layer_;
  const RankDevice& place_;
  LowLatencyTensors tensors_;
  std::unique_ptr<testing::Graph> graph_;
};

using LowLatencyGraphs = GpuTest;

TEST_F(LowLatencyGraphs, AreReplayedWithOtherTokensAndExperts) {
  for (const int world : {1, 2, 4}) {
    LowLatencyProblem problem{.name = "graph",
                              .world = world,
                              .max_tokens = 7,
                              .hidden = 4224,  // several parts
                              .format = RowFormat::bf16,
                              .full = true,
                              .rounds = 5};
    const std::vector<LowLatencyRound> rounds = make_rounds(problem);
    const Ranks ranks(world);
    std::vector<std::unique_ptr<LowLatency>> layers(static_cast<std::size_t>(world));
    std::vector<std::unique_ptr<RankDevice>> places(static_cast<std::size_t>(world));
    std::vector<std::unique_ptr<Recorded>> recorded(static_cast<std::size_t>(world));
    const auto each = [&](const auto& body) {
      expect_all_return(ranks.run([&](int rank) {
        const DeviceGuard guard(kGpu);
        body(static_cast<std::size_t>(rank), rank);
      }));
    };
    each([&](std::size_t me, int rank) {
      LowLatencyConfig config = problem.config();
      config.device = kGpu;
      config.timeout = std::chrono::seconds(10);
      layers[me] = std::make_unique<LowLatency>(ranks.transport(rank), ranks.store(), config);
      places[me] = std::make_unique<RankDevice>(kGpu);
      recorded[me] = std::make_unique<Recorded>(*layers[me], *places[me], problem, rounds[0]);
    });
    each([&](std::size_t me, int) {
      for (const LowLatencyRound& round : rounds) {
        recorded[me]->launch(round);
        EXPECT_EQ(recorded[me]->wrong(round), "") << world << " ranks, rank " << me;
      }
      // Calls of the host and launches of the graph may alternate.
      recorded[me]->call();
      recorded[me]->launch(rounds[0]);
      EXPECT_EQ(recorded[me]->wrong(rounds[0]), "");
    });
    each([&](std::size_t me, int) { recorded[me].reset(); });
  }
}

}  // namespace
}  // namespace winnow::expert_parallel

#endif
