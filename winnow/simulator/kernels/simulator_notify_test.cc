// expert_parallel::notify in the simulator.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "winnow/expert_parallel/testing/notify_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/simulator/kernels/expert_parallel_simulation.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

testing::Operation notify_operation();

namespace {

using simulator::of_threads;
using simulator::PlantedBug;
using enum simulator::Plant::Action;

// Rank 0's counts for ranks 1 and 2 contradict its tokens: all ranks refuse the first.
testing::CaseOutcome run_contradiction(const testing::Target& target) {
  const NotifyShape shape{.nodes = 2, .local_world_size = 2};
  NotifierConfig config = shape.config();
  config.device = testing::device_of(target);
  testing::Random random(1);
  const std::vector<Tensor> indices = make_indices(shape, random);
  RankTeam team(shape.ranks());
  const auto thrown = team.try_run([&](int rank, const std::shared_ptr<Transport>& transport) {
    const RankDevice place(config.device);
    Notifier notifier(transport, team.world().store(), config);
    NotifyInputs inputs(shape, indices[static_cast<std::size_t>(rank)]);
    NotifyOutputs outputs(shape);
    if (rank == 0) {
      for (const std::int64_t other : {1, 2}) {
        inputs.tokens_per_rank.view().at<std::int32_t>(other) = 1000;
      }
    }
    notify_at(place, notifier, make_args(shape, inputs, outputs), inputs, outputs);
  });
  return outcome_of_refusals(thrown, "for rank 1 as in is_token_in_rank, got 1000");
}

testing::Operation simulated_operation() {
  testing::Operation operation = with_room(notify_operation());
  operation.cases.push_back({"contradicting-counts", "", run_contradiction, true});
  return operation;
}

const std::vector<PassingCase> kQuickCases = {
    on_ranks("1x1", {"eager"}), on_ranks("1x4", {"late"}), on_ranks("2x2", {"random:1"}),
    on_ranks("4x1", {"random:2"}), on_ranks("contradicting-counts", {"random:3"})};
const std::vector<PassingCase> kThoroughCases = all_on_ranks(notify_operation(), {"3x3", "1x1"});
const RankBugs tokens{"notify_cuda.cu", "2x2"}, exchange{"count_exchange_cuda.cuh", "2x2"},
    base{"exchange_base_cuda.cuh", "2x2"}, scan{"block_scan.cuh", "2x2"},
    fabric{"fabric.cuh", "2x2"}, wrong{"count_exchange_cuda.cuh", "contradicting-counts"};
constexpr const char* kSum = "sum_kernel(const __grid_constant__";
constexpr const char* kPrefix = "prefix_kernel(const __grid_constant__";
constexpr const char* kPrefixes = "out[channel] = std::int32_t(sum); });";
constexpr const char* kEpoch = "if (threadIdx.x == 0) view.state->epoch = call;";
constexpr const char* kNotify = "notify_kernel(const __grid_constant__";
const std::vector<PlantedBug> kQuickBugs = {
    tokens("TokensSumBeforeItIsCleared", "if (threadIdx.x == 0) sum = 0;", drop, 0, 1),
    base("BaseNobodyTold", "device::st_release_sys(", drop),
    fabric("FabricEpochOfTheNextCall", "device::st_release_sys(", add, 1),
    race(base("BaseWithoutARelease", "device::st_release_sys(", weaken)),
    race(tokens("TokensCountedByPlainStores", "if (threadIdx.x % 32 == 0) atomicAdd(", weaken)),
    race(fabric("FabricRowsWithoutARelease", "device::st_release_sys(", weaken)),
    race(wrong("ContradictionsByPlainStores", "atomicMin(&shared_.first, unsigned(i));", weaken)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    tokens("TokensSumNotCleared", "if (threadIdx.x == 0) sum = 0;", undo),
    tokens("TokensSumsNotStored", "if (threadIdx.x == 0) p.view.sums[row] = sum;", undo),
    tokens("TokensSumsOfTheNextRank", "if (threadIdx.x == 0) p.view.sums[row] = sum;", move, 4),
    tokens("TokensOfChannelsNotStored", "if (threadIdx.x % 32 == 0) out[channel] = count;", undo),
    tokens("TokensOfTheNextChannel", "if (threadIdx.x % 32 == 0) out[channel] = count;", move, 4),
    tokens("TokensTokensNotCounted", "if (threadIdx.x % 32 == 0) atomicAdd(&sum, count);", drop),
    tokens("TokensTokensCountedTwice", "if (threadIdx.x % 32 == 0) atomicAdd(&sum, count)", add, 1),
    tokens("TokensSumBeforeItIsWhole", "if (threadIdx.x % 32 == 0) atomicAdd(", drop, 0, 1),
    tokens("TokensChannelsBeforeTheyAreCounted", "out[channel] = count;", drop, 0, 2),
    tokens("SumThreadsOneFurther", kSum, shift_thread, 1),
    tokens("SumRowsOneFurther", kSum, shift_block, 1),
    of_threads(32, 64, tokens("TokensOfOneWarpNotStored", "out[channel] = count;", undo)),
    tokens("PrefixThreadsOneFurther", kPrefix, shift_thread, 1),
    tokens("PrefixRowsOneFurther", kPrefix, shift_block, 1),
    tokens("PrefixWithoutTheLastNode", kPrefix, launch_blocks, -1),
    race(tokens("PrefixAside", kPrefix, launch_astray)),
    tokens("PrefixesNotStored", kPrefixes, undo),
    race(tokens("PrefixesOfTheNextChannel", kPrefixes, move, 4)),
    race(tokens("PrefixesFromTheNextChannel", "return std::int64_t(out[channel]); },", misread, 4)),
    exchange("NotifyThreadsOneFurther", kNotify, shift_thread, 1),
    race(exchange("NotifyAside", kNotify, launch_astray)),
    race(exchange("NotifyEpochNotStored", kEpoch, undo)),
    race(exchange("NotifyEpochStoredBehind", kEpoch, move, 8)),
    exchange("NotifyResultsNotStored", "to[i] = std::int32_t(results[first + i]);", undo),
    exchange("NotifyResultsInTheNextPlace", "to[i] = std::int32_t(results[first + i]);", move, 4),
    exchange("ExchangeFindingBeforeItIsCleared",
             "take(counts + all + world, params_.per_node, nodes);", drop, 0, 2),
    exchange("ExchangeReportNotComplete", "device::st_release_sys(", drop),
    exchange("ExchangeReportOfTheNextCall", "device::st_release_sys(", add, 1),
    base("BaseEpochTooHigh", "device::st_release_sys(", add, 1),
    base("BaseRowPutBeforeItIsWritten", "__threadfence_system();", drop, 0, 1),
    scan("ScanNoSumOfTheLanesBelow", "const std::int64_t below = __shfl_up_sync(", drop),
    scan("ScanSumOfTheWrongLane", "const std::int64_t below = __shfl_up_sync(", add, 1),
    scan("ScanSumsOfWarpsTooEarly", "if (lane == 31) scratch[warp] = sum;", drop, 0, 1),
    scan("ScanSumsOfWarpsOverwritten", "before += of_round;", drop, 0, 1),
    fabric("FabricNoSignal", "device::st_release_sys(", drop),
};
WINNOW_SIMULATOR_TESTS(SimulatorNotify, simulated_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
