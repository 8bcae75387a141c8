// The problems on which the low-latency calls are tested and verified.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/low_latency/low_latency_oracle.h"
#include "winnow/expert_parallel/testing/all_to_all_check.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/expert_parallel/testing/rank_device.h"

namespace winnow::expert_parallel {

struct LowLatencyProblem {
  std::string name{};
  int world = 4, experts_per_rank = 3, topk = 3;
  int given_topk = 0;  // columns of expert_indices; 0: topk
  std::int64_t max_tokens = 9, hidden = 256;
  RowFormat format = RowFormat::fp8;
  ExpertChoice choice = ExpertChoice::dropped;
  bool full = false;              // every rank has max_tokens
  bool wide_indices = false;      // i64
  bool scales_by_column = false;  // and rows of output further apart
  bool halves = false;            // two calls are sent before one is received
  bool newest_first = false;      // the second of them is received first, on every other rank
  bool shrink = false;
  int rounds = 3;

  int experts() const { return world * experts_per_rank; }
  LowLatencyConfig config() const;
};
std::string describe(const LowLatencyProblem& problem);

// The tokens of all ranks in one call.
struct LowLatencyRound {
  std::vector<Tensor> inputs, indices, weights;
  low_latency_oracle::World world;
  std::uint64_t seed = 0;  // of the experts' outputs
};
std::vector<LowLatencyRound> make_rounds(const LowLatencyProblem& problem);

// What one rank gives to the calls of a round and gets from them, at `place`.
class LowLatencyTensors {
 public:
  LowLatencyTensors(const RankDevice& place, const LowLatencyProblem& problem,
                    const LowLatencyRound& round, int rank);
  // The tokens of another round, as many as those of the first, in the same tensors.
  void give(const LowLatencyRound& round);
  LowLatencyDispatchArgs dispatch_args(CallPart part) const;
  // The experts' rows, from what the dispatch has given.
  void make_expert_output();
  LowLatencyCombineArgs combine_args(CallPart part) const;
  // The calls with these; `receive` receives what `send` has sent.
  void dispatch(LowLatency& layer, CallPart part);
  void combine(LowLatency& layer, CallPart part);
  void check_dispatched(Comparisons& comparisons) const;
  // The sums lack the experts of a rank that is gone; -1: none is.
  void check_combined(Comparisons& comparisons, int gone = -1) const;
  Tensor statistics, waits;

 private:
  float expert_row(int expert, int source, std::int32_t pair, std::int64_t column) const;

  const RankDevice& place_;
  const LowLatencyProblem& problem_;
  const LowLatencyRound& round_;
  int rank_;
  Tensor input_, indices_, weights_;
  Tensor output_, scales_, counts_, tokens_, pairs_, pair_rows_, ranges_, expert_output_, out_;
  TensorView scales_view_;
  LowLatencySent dispatched_ = LowLatencySent::none, combined_ = LowLatencySent::none;
};

// All rounds of one rank.
Comparisons run_rank(LowLatency& layer, const LowLatencyProblem& problem,
                     const std::vector<LowLatencyRound>& rounds);

}  // namespace winnow::expert_parallel
