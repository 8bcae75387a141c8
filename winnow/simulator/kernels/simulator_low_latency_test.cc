// The low-latency calls of the all-to-all in the simulator.
#include <exception>
#include <memory>
#include <stdexcept>
#include <vector>

#include "winnow/expert_parallel/testing/low_latency_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/simulator/kernels/expert_parallel_simulation.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

testing::Operation low_latency_operation();

namespace {

using simulator::PlantedBug;
using enum simulator::Plant::Action;

// Each call is sent before the one ahead of it is received. So a rank that takes the places of the
// call before the last knows by their `consumed` words alone that the others have read them: it has
// received nothing that they have sent since.
testing::CaseOutcome run_overlapping(const testing::Target& target) {
  const LowLatencyProblem problem{.name = "overlapping", .world = 2, .rounds = 4};
  LowLatencyConfig config = problem.config();
  config.device = testing::device_of(target);
  const std::vector<LowLatencyRound> rounds = make_rounds(problem);
  RankTeam team(problem.world);
  const auto of_rank = [&](int rank, const std::shared_ptr<Transport>& transport) {
    Comparisons comparisons;
    LowLatency layer(transport, team.world().store(), config);
    const RankDevice place(config.device);
    std::vector<std::unique_ptr<LowLatencyTensors>> calls;
    for (const LowLatencyRound& round : rounds) {
      calls.push_back(std::make_unique<LowLatencyTensors>(place, problem, round, rank));
    }
    const auto overlap = [&](void (LowLatencyTensors::*call)(LowLatency&, CallPart)) {
      ((*calls.front()).*call)(layer, CallPart::send);
      for (std::size_t i = 1; i < calls.size(); ++i) {
        ((*calls[i]).*call)(layer, CallPart::send);
        ((*calls[i - 1]).*call)(layer, CallPart::receive);
      }
      ((*calls.back()).*call)(layer, CallPart::receive);
    };
    overlap(&LowLatencyTensors::dispatch);
    comparisons.ran_on(layer.backend());
    for (const auto& one : calls) one->check_dispatched(comparisons);
    for (const auto& one : calls) one->make_expert_output();
    overlap(&LowLatencyTensors::combine);
    for (const auto& one : calls) one->check_combined(comparisons);
    return comparisons;
  };
  return compare_on_ranks(team, of_rank).outcome();
}

// Rank 0 gives two tokens, which two blocks send, an expert that does not exist: the ranks learn of
// one of them.
testing::CaseOutcome run_wrong_experts(const testing::Target& target) {
  const LowLatencyProblem problem{.name = "wrong-experts", .world = 2, .full = true, .rounds = 1};
  LowLatencyConfig config = problem.config();
  config.device = testing::device_of(target);
  std::vector<LowLatencyRound> rounds = make_rounds(problem);
  for (const std::int64_t token : {0, 1}) {
    rounds[0].indices[0].view().at<std::int32_t>(token, 0) = 99;
  }
  RankTeam team(problem.world);
  const auto thrown = team.try_run([&](int rank, const std::shared_ptr<Transport>& transport) {
    LowLatency layer(transport, team.world().store(), config);
    const RankDevice place(config.device);
    const LowLatencyTensors tensors(place, problem, rounds[0], rank);
    layer.dispatch(tensors.dispatch_args(CallPart::both));
    place.wait();
    try {
      layer.dispatch(tensors.dispatch_args(CallPart::both));  // throws what the first one has found
    } catch (...) {
      place.wait();  // for kernels that read these tensors
      throw;
    }
  });
  return outcome_of_refusals(thrown, "rank 0: expert_indices: want -1 to 6, got 99 for token ");
}

// Rank 0 gives an expert that does not exist. A call is sent while the ranks know of it and
// received after it: the half that receives throws, and the calls that follow have their places.
testing::CaseOutcome run_wrong_experts_in_halves(const testing::Target& target) {
  const LowLatencyProblem problem{.name = "halves", .world = 2, .full = true, .rounds = 2};
  LowLatencyConfig config = problem.config();
  config.device = testing::device_of(target);
  const std::vector<LowLatencyRound> rounds = make_rounds(problem);
  std::vector<LowLatencyRound> wrong = make_rounds(problem);
  wrong[0].indices[0].view().at<std::int32_t>(0, 0) = 99;
  const auto error_of = [](const auto& call) -> std::exception_ptr {
    try {
      call();
    } catch (const Error&) {
      return std::current_exception();
    }
    return nullptr;
  };
  RankTeam team(problem.world);
  const auto thrown = team.try_run([&](int rank, const std::shared_ptr<Transport>& transport) {
    LowLatency layer(transport, team.world().store(), config);
    const RankDevice place(config.device);
    const LowLatencyTensors first(place, problem, wrong[0], rank);
    LowLatencyTensors second(place, problem, rounds[0], rank);
    layer.dispatch(first.dispatch_args(CallPart::both));
    place.wait();
    const auto of_send = error_of([&] { second.dispatch(layer, CallPart::send); });
    const auto of_receive = error_of([&] { second.dispatch(layer, CallPart::receive); });
    place.wait();  // for kernels that use these tensors
    if (of_send) throw std::runtime_error("the half that sends has thrown");
    const Comparisons later = run_rank(layer, problem, rounds);
    for (const auto& comparison : later.list()) {
      if (!comparison.passed) throw std::runtime_error("later calls: " + comparison.detail);
    }
    if (of_receive) std::rethrow_exception(of_receive);
  });
  return outcome_of_refusals(thrown, "rank 0: expert_indices: want -1 to 6, got 99 for token 0");
}

testing::Operation simulated_operation() {
  testing::Operation operation = with_room(low_latency_operation());
  operation.cases.push_back({"wrong-experts", "", run_wrong_experts});
  operation.cases.push_back({"wrong-experts-halves", "", run_wrong_experts_in_halves});
  operation.cases.push_back({"overlapping", "", run_overlapping});
  return operation;
}

// Of calls whose two parts come apart, and of ranks that are left out.
const RankBugs dispatch_in_parts{"low_latency_dispatch_cuda.cu", "overlapping"},
    combine_in_parts{"low_latency_combine_cuda.cu", "overlapping"},
    left_out{"low_latency_cuda.cuh", "newest-first-shrink"};

const std::vector<PassingCase> kQuickCases = {on_ranks("1-ranks", {"eager"}),
                                              on_ranks("2-ranks", {"late"}),
                                              on_ranks("3-ranks", {"random:1"}),
                                              on_ranks("4-ranks-bf16-halves", {"random:2"}),
                                              on_ranks("newest-first-shrink", {"random:3"}),
                                              on_ranks("overlapping", {"random:5"}),
                                              on_ranks("wrong-experts", {"random:6"}),
                                              on_ranks("wrong-experts-halves", {"random:4"})};
const std::vector<PassingCase> kThoroughCases =
    all_on_ranks(low_latency_operation(), {"6-ranks", "8-ranks"});
const RankBugs dispatch{"low_latency_dispatch_cuda.cu", "3-ranks"},
    combine{"low_latency_combine_cuda.cu", "3-ranks"},
    wide{"low_latency_combine_cuda.cu", "wide-halves"}, both{"low_latency_cuda.cuh", "3-ranks"},
    shrinking{"low_latency_cuda.cuh", "many-experts"},
    overlapping{"low_latency_cuda.cuh", "overlapping"},
    wrong{"low_latency_cuda.cuh", "wrong-experts"}, words{"wait.cuh", "3-ranks"};
const std::vector<PlantedBug> kQuickBugs = {
    dispatch("DispatchCountsBeforeTheyAreCleared", "counts[expert] = 0;", drop, 0, 1),
    dispatch("DispatchPlacesBeforeTheyAreKnown", "begin_token(token + gridDim.x);", drop, 0, 1),
    combine("CombineStageNotFenced", "device::fence_proxy_async_shared();", drop),
    combine("CombineSumNotStaged", "device::st_shared(stage + behind, four);", drop),
    both("BothPlacesNeverFree", "device::st_release_sys(word(", drop),
    race(overlapping("BothPlacesFreeWithoutARelease", "device::st_release_sys(word(", weaken)),
    race(dispatch("DispatchWithoutAFence", "__threadfence_system();  // behind the block's rows",
                  drop)),
    race(dispatch("DispatchCountsWithoutAFence", "__threadfence_system();  // behind the counts",
                  drop)),
    race(combine("CombineWithoutAFence", "own_token ? __threadfence()", drop)),
    race(dispatch("DispatchLanesBeforeTheAcquire",
                  "__syncwarp();  // behind what the first lane has acquired", drop)),
    race(combine("CombineLanesBeforeTheAcquire", "if (!__all_sync(kFullWarp, ok))", drop, 0, 1)),
    race(both("LastBlockWithoutAFence",
              "__threadfence_system();  // behind what all blocks have done", drop)),
    dispatch("DispatchEndsBeforeTheSender", "if (p.behind_send) device::wait_for_kernel_before();",
             drop),
    combine("CombineEndsBeforeTheSender", "if (p.behind_send) device::wait_for_kernel_before();",
            drop),
    dispatch("DispatchBeforeTheCallBefore", "if (finding_lane() == 0) mistaken = 0;", drop, 0, 2),
    combine("CombineBeforeTheCallBefore", "if (threadIdx.x == 0) mistaken = 0;", drop, 0, 1),
    dispatch_in_parts("DispatchReceivesBeforeTheCallBefore", "receive_kernel(", drop, 0, 3),
    combine_in_parts("CombineReceivesBeforeTheCallBefore", "receive_kernel(", drop, 0, 3),
    race(left_out("VerdictWithoutAnAcquire", "device::ld_acquire_sys(verdict_of)", weaken)),
    race(left_out("VerdictWithoutARelease",
                  "device::st_release_sys(verdict_of, epoch * 2 + (there ? 1 : 0));", weaken)),
    race(combine("CombineNoteWithoutAFence", "if (speaks()) __threadfence_system();", drop)),
    race(combine("CombineEndWithoutAFence", "__device__ void say_end(", drop, 0, 1)),
    race(combine("CombinePiecesTakenByPlainStores", "const int i = atomicAdd(", weaken)),
    race(wide("CombinePiecesWithoutAFence", "__threadfence_block();", drop)),
    race(wide("CombineTokensCountedByPlainStores", "if (atomicSub(piece.left, 1) != 1)", weaken)),
    race(both("ReceiversCountedWithoutAFence", "// This block has read `received`.", drop, 0, 1)),
    race(both("LastToReceiveWithoutAFence",
              "if (arrive(&view.state->receiving) == gridDim.x - 1) {", drop, 0, 1)),
    race(dispatch("DispatchPairsCountedByPlainStores", "if (kept && !twice) atomicAdd(", weaken)),
    race(wrong("FirstMistakeByPlainStores", "if (atomicCAS(reinterpret_cast<int*>(", weaken)),
    race(words("ReceiversCountedByPlainStores", "return atomicAdd(", weaken)),
    race(dispatch("DispatchPlacesByPlainStores", "place = view.layout.place_of(", weaken)),
    race(both("BothBlocksCountedByPlainStores", "so_far = here + atomicAdd(", weaken)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    dispatch("DispatchScaleOfTheLane", "amax = max(amax, __shfl_xor_sync(mask, amax, step))", drop),
    dispatch("DispatchScaleOfAnotherGroup", "max(amax, __shfl_xor_sync(mask, amax, step))", add, 1),
    dispatch("DispatchOnePlaceForAll", "place = view.layout.place_of(", drop),
    dispatch("DispatchPlacesSkipped", "place = view.layout.place_of(", add, 1),
    dispatch("DispatchPairsNotCounted", "if (kept && !twice) atomicAdd(counts + expert, 1);", drop),
    dispatch("DispatchPairsCountedTwice", "if (kept && !twice) atomicAdd(", add, 1),
    dispatch("DispatchCountsTooEarly", "if (kept && !twice) atomicAdd(", drop, 0, 3),
    dispatch("DispatchCountsWantedTooEarly", "if (__syncthreads_or(!ok) != 0) return false;", drop),
    dispatch("DispatchLastBlockUnknown",
             "if (sent.all) view.state->sent[kLowLatencyDispatch] = epoch;", drop, 0, 2),
    dispatch("DispatchNobodyTold",
             "device::st_relaxed_sys(word(view.peers[to], view.layout.signal(kLowLatencyDispatch, "
             "rank)),",
             drop),
    dispatch("DispatchCountsNotTold",
             "device::st_relaxed_sys(word(view.peers[to], view.layout.count_word(rank)),", drop),
    dispatch("DispatchBlockNotTold",
             "device::st_relaxed_sys(word(view.peers[to], view.layout.block_word(rank, "
             "int(blockIdx.x))),",
             drop),
    dispatch("DispatchRangesNotStored",
             "p.ranges[i / world * p.ranges_stride + i % world] =", undo),
    dispatch("DispatchRangesOfTheNextRank",
             "p.ranges[i / world * p.ranges_stride + i % world] =", move, 8),
    dispatch("DispatchPairsOfTheLane", "__ballot_sync(device::kFullWarp, got.place >= 0);", drop),
    dispatch("DispatchExpertOfTheLane", "const int expert = __shfl_sync(", drop),
    dispatch("DispatchExpertOfTheNextPair", "const int expert = __shfl_sync(", add, 1),
    dispatch("DispatchRowOfTheLane", "const std::int64_t row = __shfl_sync(", drop),
    dispatch("DispatchRowOfTheNextPair", "const std::int64_t row = __shfl_sync(", add, 1),
    combine("CombineRowsOfTheLane", "pairs = __ballot_sync(kFullWarp, row != nullptr);", drop),
    combine("CombineToldOneTooEarly", "one_group ? device::bulk_wait<1>()", add, 1),
    combine("CombineResultsNotStored", "*reinterpret_cast<uint2*>(out) = packed;", undo),
    combine("CombineResultsOfTheNextLane", "*reinterpret_cast<uint2*>(out) = packed;", move, 8),
    combine("CombineEndsBeforeItIsWritten", "__device__ void end() {", drop, 0, 2),
    combine("CombineEndsOneTooEarly", "__device__ void end() {", add, 1, 2),
    combine("CombineTokenNotTold", "device::st_relaxed_sys(piece.message_at, piece.message)", drop),
    combine("CombineStageForLaneZero", "device::bulk_wait_read<1>();", drop, 0, 1),
    combine("CombineStageNotWhole", "device::fence_proxy_async_shared();", drop, 0, 1),
    combine("CombineRowOfTheLane",
            "__shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row), k));", drop),
    combine("CombineRowOfTheNextPair",
            "__shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row), k));", add, 1),
    combine("CombineNothingStored", "device::bulk_store(", drop),
    combine("CombineStoredFromTheMiddle", "device::bulk_store(", add, 1),
    combine("CombineStoredFromBehind", "device::bulk_store(", add, 128),
    combine("CombineWeightOfTheLane", "__shfl_sync(kFullWarp, weight, __ffs(rest) - 1);", drop),
    combine("CombineWeightOfTheNextPair",
            "const float its = __shfl_sync(kFullWarp, weight, __ffs(rest) - 1);", add, 1),
    combine("CombineSumNotCommitted", "if (bytes > kHalfBytes) store(", drop, 0, 1),
    combine("CombineRowsNotStaged",
            "device::st_shared(stage + half * kHalfBytes + at, raw[half][v]);", drop),
    combine("CombineRowsNotCommitted", "if (ks[half] >= 0) store(", drop, 0, 2),
    combine("CombineNoteNotTold",
            "device::st_relaxed_sys(word(view.peers[to], "
            "view.layout.note_word(view.layer.topology.rank)),",
            drop),
    combine("CombineEndTooFar",
            "device::st_relaxed_sys(word(view.peers[to], view.layout.signal(kLowLatencyCombine, "
            "rank)),",
            add, 1),
    combine("CombinePairsTooEarly", "if (first == 0) check_rows(p, pair, mistaken);", drop, 0, 1),
    combine("CombineWeightsTooEarly", "if (sums) receive_weight(", drop, 0, 1),
    combine("CombinePiecesSkipped", "const int i = atomicAdd(&next[own_tokens], 1) + (", add, 1),
    combine("CombinePieceOfTheLane", "i = __shfl_sync(kFullWarp, i, 0);", drop),
    combine("CombineTokensOverwritten", "sender.end();", drop, 0, 1),
    combine("CombineWeightOfTheWrongPair",
            "const float its = __shfl_sync(kFullWarp, weight, __ffs(pairs) - 1);", add, 1),
    combine("CombineRankOfTheLane", "rank = __reduce_min_sync(", drop),
    combine("CombineRowsOfTheLaneAlone", "pairs = __ballot_sync(kFullWarp, home == rank);", drop),
    combine("CombineSentOfTheLane", "const SentRows its = {__shfl_sync(", drop),
    combine("CombineSentOfTheNextLane", "const SentRows its = {__shfl_sync(", add, 1),
    combine("CombineComeTooEarly", "if (received.broken || received.refused) return;", drop, 0, 3),
    wide("WideStageStillRead", "device::bulk_wait_read<1>();", drop),
    wide("WideStageStillReadOnce", "device::bulk_wait_read<1>();", add, 1),
    both("BothBlocksNotCounted", "const std::uint64_t so_far = here + atomicAdd(", drop),
    both("BothBlocksCountedTwice", "const std::uint64_t so_far = here + atomicAdd(", add, 1),
    both("BothBrokenForSome", "if (__syncthreads_or(broken(view.layer)) != 0) return false;", drop),
    both("BothComeBeforeItIsKnown", "received.broken = __syncthreads_or(!ok) != 0;", drop),
    both("BothSumsOfWarpsTooEarly", "if (lane == 31) of_warps[warp] = inclusive;", drop, 0, 1),
    shrinking("BothEndTooEarly", "if (threadIdx.x == 0) begins[entries] = before;", drop, 0, 1),
};
WINNOW_SIMULATOR_TESTS(SimulatorLowLatency, simulated_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
