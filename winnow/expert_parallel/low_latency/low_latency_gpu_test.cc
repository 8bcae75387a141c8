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
  Recorded(LowLatency& layer, const Place& place, const LowLatencyProblem& problem)
      : layer_(layer), place_(place), problem_(problem) {
    const std::int64_t experts = problem.experts_per_rank,
                       rows = problem.world * problem.max_tokens;
    const std::int64_t tokens = problem.max_tokens, topk = problem.topk;
    input_ = place.make(DType::bf16, {{tokens, problem.hidden}});
    indices_ = place.make(DType::i32, {{tokens, topk}});
    weights_ = place.make(DType::f32, {{tokens, topk}});
    output_ = place.make(DType::bf16, {{experts, rows, problem.hidden}});
    counts_ = place.make(DType::i32, {{experts}});
    tokens_ = place.make(DType::i32, {{experts, rows}});
    pairs_ = place.make(DType::i32, {{experts, rows}});
    pair_rows_ = place.make(DType::i32, {{problem.world, tokens, topk}});
    ranges_ = place.make(DType::i64, {{experts, problem.world}});
    out_ = place.make(DType::bf16, {{tokens, problem.hidden}});
    stream_ = static_cast<cudaStream_t>(place.stream().handle);
    graph_ = std::make_unique<testing::Graph>(
        stream_, [&] { call(); }, cudaStreamCaptureModeThreadLocal);
  }

  void launch(const LowLatencyRound& round) {
    const auto me = std::size_t(layer_.rank());
    place_.write(input_, round.inputs[me]);
    place_.write(indices_, round.indices[me]);
    place_.write(weights_, round.weights[me]);
    graph_->launch(stream_);
  }

  // The first wrong element of the combined rows, or an empty text.
  std::string wrong(const LowLatencyRound& round) const {
    const auto me = std::size_t(layer_.rank());
    const Tensor out = place_.to_host(out_.view());
    const ConstTensorView input = round.inputs[me];
    for (std::int64_t token = 0; token < out.size(0); ++token) {
      for (std::int64_t c = 0; c < problem_.hidden; ++c) {
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
    layer_.dispatch({.input = input_,
                     .expert_indices = indices_,
                     .format = RowFormat::bf16,
                     .output = output_,
                     .counts = counts_,
                     .source_tokens = tokens_,
                     .source_pairs = pairs_,
                     .pair_rows = pair_rows_,
                     .ranges = ranges_,
                     .stream = place_.stream()});
    layer_.combine({.expert_output = output_,
                    .pair_rows = pair_rows_,
                    .expert_indices = indices_,
                    .weights = weights_,
                    .out = out_,
                    .stream = place_.stream()});
  }

 private:
  LowLatency& layer_;
  const Place& place_;
  const LowLatencyProblem& problem_;
  cudaStream_t stream_ = nullptr;
  Tensor input_, indices_, weights_, output_, counts_, tokens_, pairs_, pair_rows_, ranges_, out_;
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
    std::vector<std::unique_ptr<Place>> places(static_cast<std::size_t>(world));
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
      places[me] = std::make_unique<Place>(kGpu);
      recorded[me] = std::make_unique<Recorded>(*layers[me], *places[me], problem);
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
