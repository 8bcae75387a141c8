// Dispatch, combine and barrier of the all-to-all in the simulator.
#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/combine/combine_kernels_cuda.h"
#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"
#include "winnow/expert_parallel/exchange/rail_cuda.h"
#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/expert_parallel/testing/comparisons.h"
#include "winnow/expert_parallel/testing/rank_device.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/simulator/kernels/expert_parallel_simulation.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

testing::Operation all_to_all_operation();

namespace {

using simulator::in_kernel;
using simulator::of_argument;
using simulator::of_threads;
using simulator::PlantedBug;
using enum simulator::Plant::Action;

// How many pairs each expert has, by a kernel which is not of the layer.
constexpr std::int64_t kCountedTokens = 8, kCountedTopk = 2,
                       kCounts = kCountedTokens * kCountedTopk;
Backend count_pairs(const Tensor& experts, const TensorView& counts,
                    const RankDevice& place = RankDevice()) {
  const ConstTensorView indices(experts.data(), DType::i32, {kCountedTokens, kCountedTopk},
                                place.device());
  return layout({.expert_indices = indices,
                 .experts = counts.numel(),
                 .world_size = 4,
                 .local_world_size = 4,
                 .tokens_per_expert = counts},
                {.stream = place.stream()});
}

// The ranks of a case, with layers that move rows of f32.
class Ranks {
 public:
  Ranks(const testing::Target& target, int world, Config config) : config_(config), team_(world) {
    config_.dtype = DType::f32;
    config_.device = testing::device_of(target);
  }
  // What body(rank, place, layer) compares, or throws.
  template <class Body>
  testing::CaseOutcome compare(const Body& body) {
    return compare_on_ranks(team_, of_rank(body)).outcome();
  }
  template <class Body>
  std::vector<std::exception_ptr> try_run(const Body& body) {
    return team_.try_run(of_rank(body));
  }

 private:
  template <class Body>
  auto of_rank(const Body& body) {
    return [this, &body](int rank, const std::shared_ptr<Transport>& transport) {
      const RankDevice place(config_.device);
      AllToAll layer(transport, team_.world().store(), config_);
      return body(rank, place, layer);
    };
  }

  Config config_;
  RankTeam team_;
};

// Behind barrier() a rank's kernel reads what another rank's kernel has written before it: the
// counts of its experts, which are taken for experts and counted again.
testing::CaseOutcome run_barrier(const testing::Target& target, int nodes) {
  constexpr int kWorld = 4;
  std::vector<Tensor> chosen, counts(kWorld);
  for (int step = 1; step <= kWorld; ++step) {
    chosen.push_back(numbers({kCounts}, [&](int i) { return i * step % kCounts; }));
  }
  Ranks ranks(
      target, kWorld,
      {.max_tokens = 4, .hidden = 16, .topk = 2, .experts = 8, .local_world_size = kWorld / nodes});
  return ranks.compare([&](int rank, const RankDevice& place, AllToAll& layer) {
    const auto me = std::size_t(rank), other = (me + 1) % kWorld;
    const Tensor own = place.copy(chosen[me]);
    counts[me] = place.make(DType::i32, std::array{kCounts});
    Tensor again = place.make(DType::i32, std::array{kCounts});
    Comparisons comparisons;
    comparisons.ran_on(count_pairs(own, counts[me], place));
    layer.barrier(false, place.stream());
    count_pairs(counts[other], again, place);
    Tensor once(DType::i32, {kCounts}), twice(DType::i32, {kCounts});
    count_pairs(chosen[other], once);
    count_pairs(once, twice);
    comparisons.add(compare_bits("counts", place.to_host(again), twice));
    return comparisons;
  });
}

// Behind combine() a rank's kernel may write where the others have read its rows.
testing::CaseOutcome run_overwritten(const testing::Target& target) {
  constexpr std::int64_t kTokens = 12, kTopk = 8, kHidden = 16;  // for two blocks
  const Tensor chosen = numbers({kTokens, kTopk}, [](int i) { return i % 8; });
  Ranks ranks(target, 4, {.max_tokens = kTokens, .hidden = kHidden, .topk = kTopk, .experts = 8});
  return ranks.compare([&](int, const RankDevice& place, AllToAll& layer) {
    const Tensor input = place.copy(Tensor(DType::f32, {kTokens, kHidden})),
                 experts = place.copy(chosen);
    const Dispatched got =
        layer.dispatch({.input = input, .expert_indices = experts, .stream = place.stream()});
    const TensorView rows = layer.combine_buffer(*got.descriptor);
    place.spoil(rows);
    layer.combine({.expert_output = rows, .stream = place.stream()}, *got.descriptor);
    const TensorView written(rows.data(), DType::i32, {rows.numel()}, place.device());
    Tensor counts(DType::i32, {rows.numel()});
    Comparisons comparisons;
    comparisons.ran_on(count_pairs(experts, written, place));
    count_pairs(chosen, counts);
    comparisons.add(compare_bits("counts", place.to_host(written), counts));
    return comparisons;
  });
}

// One row stands for all of expert_output, so that each token gets it as often as it has experts.
testing::CaseOutcome run_one_row(const testing::Target& target) {
  constexpr std::int64_t kTokens = 6, kTopk = 2, kHidden = 16;
  const Tensor chosen = numbers({kTokens, kTopk}, [](int i) { return i % 8; });
  Tensor row(DType::f32, {1, kHidden}), sums(DType::f32, {kTokens, kHidden});
  int next = 0;
  for (float& value : row.values<float>()) value = static_cast<float>(next++);
  for (float& sum : sums.values<float>()) sum = static_cast<float>(next++ % kHidden * kTopk);
  Ranks ranks(target, 2, {.max_tokens = kTokens, .hidden = kHidden, .topk = kTopk, .experts = 8});
  return ranks.compare([&](int, const RankDevice& place, AllToAll& layer) {
    const Tensor input = place.copy(Tensor(DType::f32, {kTokens, kHidden})),
                 experts = place.copy(chosen), once = place.copy(row);
    const Dispatched got =
        layer.dispatch({.input = input, .expert_indices = experts, .stream = place.stream()});
    const ConstTensorView all(once.data(), DType::f32, {got.output.size(0), kHidden}, {0, 1},
                              place.device());
    Tensor out = place.make(DType::f32, std::array{kTokens, kHidden});
    layer.combine({.expert_output = all, .out = out, .stream = place.stream()}, *got.descriptor);
    Comparisons comparisons;
    comparisons.ran_on(got.backend);
    comparisons.add(compare_bits("sums", place.to_host(out), sums));
    return comparisons;
  });
}

// Each row's value is the number of its token, and so comes back to all pairs of it that are kept.
testing::CaseOutcome run_values(const testing::Target& target) {
  constexpr std::int64_t kTokens = 5, kTopk = 2, kHidden = 4;
  Ranks ranks(target, 4,
              {.max_tokens = kTokens,
               .hidden = kHidden,
               .topk = kTopk,
               .experts = 8,
               .local_world_size = 2});
  return ranks.compare([&](int rank, const RankDevice& place, AllToAll& layer) {
    const auto expert = [&](std::int64_t pair) { return (3 * int(pair) + rank) % 9 - 1; };
    const auto number = [&](std::int64_t token) { return float(rank * kTokens + token + 1); };
    Tensor rows(DType::f32, {kTokens, kHidden}), values(DType::f32, {kTokens, kTopk});
    for (std::int64_t token = 0; token < kTokens; ++token) {
      std::fill_n(&rows.values<float>()[std::size_t(token * kHidden)], kHidden, number(token));
      for (std::int64_t pair = token * kTopk; pair < (token + 1) * kTopk; ++pair) {
        values.values<float>()[std::size_t(pair)] = expert(pair) < 0 ? 0 : number(token);
      }
    }
    const Tensor input = place.copy(rows), experts = place.copy(numbers({kTokens, kTopk}, expert));
    const Dispatched got =
        layer.dispatch({.input = input, .expert_indices = experts, .stream = place.stream()});
    const Tensor there = place.to_host(got.output);
    Tensor of_rows(DType::f32, {got.output.size(0)});
    for (std::size_t row = 0; row < of_rows.values<float>().size(); ++row) {
      of_rows.values<float>()[row] = there.values<float>()[row * kHidden];
    }
    const Tensor given = place.copy(of_rows);
    Tensor out = place.make(DType::f32, std::array{kTokens, kTopk});
    place.spoil(out);
    layer.combine({.pair_values = given, .pair_values_out = out, .stream = place.stream()},
                  *got.descriptor);
    Comparisons comparisons;
    comparisons.ran_on(got.backend);
    comparisons.add(compare_bits("values", place.to_host(out), values));
    return comparisons;
  });
}

// A rank's rows all have one value, which a kernel therefore copies to where the others have read
// that of the call before.
testing::CaseOutcome run_values_again(const testing::Target& target) {
  constexpr std::int64_t kTokens = 33, kTopk = 8;  // for two blocks
  Ranks ranks(target, 2, {.max_tokens = kTokens, .hidden = 4, .topk = kTopk, .experts = 8});
  return ranks.compare([&](int rank, const RankDevice& place, AllToAll& layer) {
    const Tensor input = place.copy(Tensor(DType::f32, {kTokens, 4})),
                 experts = place.copy(numbers({kTokens, kTopk}, [](int i) { return i % 8; }));
    const Dispatched got =
        layer.dispatch({.input = input, .expert_indices = experts, .stream = place.stream()});
    Comparisons comparisons;
    comparisons.ran_on(got.backend);
    std::vector<Tensor> given, outs;
    const auto value_of = [](int call, int of_rank) { return float(10 * call + of_rank); };
    for (const int call : {1, 2}) {
      Tensor value(DType::f32, {1});
      value.values<float>()[0] = value_of(call, rank);
      given.push_back(place.copy(value));
      outs.push_back(place.make(DType::f32, std::array{kTokens, kTopk}));
    }
    for (const std::size_t call : {0u, 1u}) {
      const ConstTensorView all(given[call].data(), DType::f32, {got.output.size(0)}, {0},
                                place.device());
      layer.combine({.pair_values = all, .pair_values_out = outs[call], .stream = place.stream()},
                    *got.descriptor);
    }
    for (const int call : {1, 2}) {
      Tensor values(DType::f32, {kTokens, kTopk});
      int pair = 0;
      for (float& value : values.values<float>()) value = value_of(call, pair++ % 8 / 4);
      comparisons.add(compare_bits("values", place.to_host(outs[std::size_t(call) - 1]), values));
    }
    return comparisons;
  });
}

// Rank 0 gives two rows of its scatter table anew, and all ranks refuse the first that is wrong.
testing::CaseOutcome run_wrong_rows(const testing::Target& target,
                                    std::array<std::int32_t, 2> wrong, const std::string& refusal) {
  constexpr std::int64_t kTokens = 4, kTopk = 2, kHidden = 8;
  const Tensor of_rank0 = numbers({kTokens, kTopk}, [](int i) { return i % 2; });
  Ranks ranks(target, 2, {.max_tokens = kTokens, .hidden = kHidden, .topk = kTopk, .experts = 4});
  const auto thrown = ranks.try_run([&](int rank, const RankDevice& place, AllToAll& layer) {
    Tensor rows = numbers({kTokens, kTopk}, [&](int i) { return i + int(kTokens * kTopk) * rank; });
    if (rank == 0) std::copy(wrong.begin(), wrong.end(), &rows.values<std::int32_t>()[2]);
    const Tensor input = place.copy(Tensor(DType::f32, {kTokens, kHidden})),
                 experts = place.copy(of_rank0), scatter = place.copy(rows);
    layer.dispatch({.input = input,
                    .expert_indices = experts,
                    .scatter_indices = scatter,
                    .stream = place.stream()});
  });
  return outcome_of_refusals(thrown, "rank 0: scatter_indices: " + refusal);
}

testing::Operation simulated_operation() {
  testing::Operation operation = with_room(all_to_all_operation());
  for (const int nodes : {1, 2}) {
    operation.cases.push_back(
        {testing::numbered("barrier-of-nodes-", nodes), "",
         [nodes](const testing::Target& target) { return run_barrier(target, nodes); }, true});
  }
  operation.cases.push_back({"overwritten-rows", "", run_overwritten, true});
  operation.cases.push_back({"one-row", "", run_one_row, true});
  operation.cases.push_back({"few-values", "", run_values, true});
  operation.cases.push_back({"values-again", "", run_values_again, true});
  const auto add_wrong_rows = [&](const char* name, std::array<std::int32_t, 2> wrong,
                                  const char* refusal) {
    operation.cases.push_back(
        {name, "",
         [=](const testing::Target& target) { return run_wrong_rows(target, wrong, refusal); },
         true});
  };
  add_wrong_rows("rows-named-twice", {5, 6},
                 "want every row once, got row 5 again for token 2, k 1");
  add_wrong_rows("rows-outside", {16, -1}, "want 0 to 15, got 16 for token 1, k 0");
  return operation;
}

const std::vector<PassingCase> kQuickCases = {
    on_ranks("1x1-plain", {"eager"}), on_ranks("1x2-cached", {"late"}),
    on_ranks("1x4-copy-out-token-major", {"random:1"}), on_ranks("2x2-weights", {"random:2"}),
    on_ranks("2x2-token-major-24-sms", {"random:3"}),
    // Two blocks push.
    on_ranks("1x2-token-major-24-sms", {"random:2"}), on_ranks("4x1-pair-values", {"random:4"}),
    on_ranks("2x2-scatter-table-uneven", {"random:5"}),
    on_ranks("barrier-of-nodes-2", {"random:6"}), on_ranks("overwritten-rows", {"random:2"}),
    on_ranks("few-values", {"random:6"}), on_ranks("values-again", {"random:3"}),
    on_ranks("rows-named-twice", {"random:7"}), on_ranks("rows-outside", {"random:1"})};
// Of one node of four ranks and of two nodes of two, and some of other worlds.
std::vector<PassingCase> thorough_cases() {
  std::vector<PassingCase> list = all_on_ranks(
      all_to_all_operation(), {"1x1-", "1x2-", "2x1-", "4x1-", "2x3-", "2x2-large", "chunk"});
  for (const char* const name :
       {"1x1-plain", "4x1-plain", "2x3-plain", "barrier-of-nodes-1", "one-row"}) {
    list.push_back(on_ranks(name, {"random:4"}));
  }
  return list;
}
const std::vector<PassingCase> kThoroughCases = thorough_cases();
const RankBugs count{"dispatch_count_cuda.cu", "2x2-weights"},
    place{"dispatch_place_cuda.cu", "2x2-weights"}, exchange{"exchange_cuda.cuh", "2x2-weights"},
    rail{"rail_cuda.cuh", "2x2-weights"}, mover{"dispatch_move_cuda.cu", "2x2-cached"},
    takes{"dispatch_move_cuda.cu", "1x4-copy-out-token-major"}, pipe{"row_pipe.cuh", "2x2-cached"},
    sum{"combine_sum_cuda.cu", "2x2-local-combine"}, ring{"combine_sum_cuda.cuh", "1x4-plain"},
    push{"combine_push_cuda.cu", "2x2-token-major-24-sms"},
    large{"row_pipe.cuh", "1x4-large-rows-left"}, pushes{"row_pipe.cuh", "2x2-token-major-24-sms"},
    values{"combine_values_cuda.cu", "few-values"}, finish{"combine_finish.cuh", "2x2-pair-values"},
    over{"signal_node.cuh", "overwritten-rows"}, again{"signal_node.cuh", "values-again"};
const RankBugs words{"wait.cuh", "2x2-weights"}, base{"exchange_base_cuda.cuh", "2x2-weights"},
    blocks{"blocks.cuh", "2x2-weights"}, node{"signal_node.cuh", "2x2-weights"},
    claims{"claims.cuh", "2x2-cached"}, push_claims{"claims.cuh", "1x2-token-major-24-sms"},
    fabric{"fabric.cuh", "2x2-weights"}, barrier{"fabric_kernels.cuh", "barrier-of-nodes-1"},
    rail_barrier{"fabric.cuh", "barrier-of-nodes-2"},
    barriers{"fabric_kernels.cuh", "barrier-of-nodes-2"}, meet{"exchange_cuda.cuh", "1x2-cached"},
    marks{"combine_sum_cuda.cuh", "2x2-local-combine"},
    scatter{"dispatch_scatter_cuda.cu", "rows-named-twice"},
    outside{"dispatch_scatter_cuda.cu", "rows-outside"},
    table{"dispatch_scatter_cuda.cu", "2x2-scatter-table-uneven"},
    pushed{"combine_sum_cuda.cu", "2x2-token-major-24-sms"},
    given{"combine_sum_cuda.cu", "1x4-combine-weights-bf16-aligned"},
    bits{"bits.cuh", "2x2-pair-values"},
    weights{"combine_values_cuda.cu", "2x2-combine-weights-bf16-aligned"},
    segment{"layer_kernels_cuda.cu", "1x4-growth"},
    columns{"layer_kernels_cuda.cu", "1x4-scales-i32-by-column"};
const RankBugs one_row{"layer_kernels_cuda.cu", "one-row"}, words_of_row{"fabric.cuh", "one-row"};
// Of kernels that are few lines, also in their indices.
constexpr const char* kTranslate = "translate(const __grid_constant__";
constexpr const char* kClaim = "claim(const __grid_constant__";
constexpr const char* kWeights = "weights_kernel(const __grid_constant__";
constexpr const char* kSegment = "set_segment_kernel(std::byte** row";
constexpr const char* kColumns = "copy_columns_kernel(std::byte* to";
constexpr const char* kRows = "copy_rows_kernel(std::byte* to";
constexpr const char* kBarrier = "barrier_kernel(const __grid_constant__ BarrierParams";
constexpr const char* kExchange = "exchange_kernel(const __grid_constant__ ExchangeParams";
constexpr const char* kRailSend = "rail_send_kernel(const __grid_constant__ RailSendParams";
constexpr const char* kPush = "push_rows(const __grid_constant__ CudaSumParams";
constexpr const char* kValues = "values_kernel(const __grid_constant__ ValueParams";

const std::vector<PlantedBug> kQuickBugs = {
    count("CountWordsOfWarpsTooEarly", "counters[i] = 0;", drop, 0, 1),
    place("PlaceRunBeforeItIsKnown", "add_up_experts(p, blocks);", drop, 0, 1),
    rail("RailWantedBeforeItIsKnown", "wanted[pair / topology.topk] = true;", drop, 0, 3),
    mover("MoveNothingMarked", "device::st_release_cta_shared(&marks.reached, so_far);", drop),
    takes("TakesNoPipe", "if (__syncthreads_or(!goes_on(p))) return;", drop),
    pipe("PipeStoredBeforeItIsThere", "full(stage).wait(parity, \"store\", stage);", drop),
    pipe("PipeBytesBeyondThePiece", "device::bulk_load(", add, -16),
    ring("RingFullBeforeItIs", "ring.full().wait(ring.parity, \"adder\", int(ring.slot));", add, 1),
    ring("RingBytesThatDoNotCome", "mine.full().arrive_expect(bytes);", add, 1),
    push("PushNobodyTold", "device::st_relaxed_sys(", drop),
    values("ValuesTablesBeforeTheyAreThere", "__syncthreads();", drop),
    race(words("RowsBeforeTheirWordIsAcquired", "there && device::ld_acquire_sys(", weaken)),
    race(base("RowsWithoutARelease", "device::st_release_sys(", weaken)),
    race(blocks("BlocksMeetWithoutAFence", "if (threadIdx.x == 0) {", drop, 0, 1)),
    race(node("LastToSignalWithoutAFence", "__threadfence_system();", drop)),
    race(node("SignalWithoutAFenceOfTheWriters", "__threadfence();", drop)),
    race(push("PushWithoutAFence", "if (oldest) __threadfence_system();", drop)),
    race(place("PlaceBeforeTheExchange", "device::wait_for_kernel_before();", drop)),
    mover("MoveBeforeThePlaces", "device::wait_for_kernel_before();", drop),
    race(sum("SumBeforeTheExchange",
             "if (params.travel != Travel::rows_are_pushed) device::wait_for_kernel_before();",
             drop)),
    saying("proxy fence: ", mover("MoveWithoutAProxyFence", "came = wait_at_least(", drop, 0, 1)),
    saying("proxy fence: ",
           sum("SumWithoutAProxyFence", "if (!__all_sync(device::kFullWarp, arrived)) return -1;",
               drop, 0, 1)),
    pushed("SumEndsBeforeThePush",
           "if (params.travel == Travel::rows_are_pushed) device::wait_for_kernel_before();", drop),
    race(given("SumBeforeTheWeights",
               "if (kWeighted && params.weights_are_new) device::wait_for_kernel_before();", drop)),
    exchange("ExchangeBeforeTheCounts", "device::wait_for_kernel_before();", drop),
    rail("RailBeforeTheExchange", "device::wait_for_kernel_before();", drop),
    push("PushBeforeTheExchange", "device::wait_for_kernel_before();", drop),
    race(words("ArrivalsByPlainStores", "return atomicAdd(", weaken)),
    race(barrier("BarrierWithoutARelease", "device::st_release_sys(", weaken)),
    race(count("FindingsByPlainStores", "atomicMin(&first_bad, block_bad[block]);", weaken)),
    race(scatter("RowsClaimedByPlainStores", "other = atomicMin_system(word, mine);", weaken)),
    race(scatter("RowsAtFaultByPlainStores", "if (worst != kNone) atomicMin(", weaken)),
    race(outside("RowsOutsideByPlainStores",
                 "atomicMin(&first_bad, static_cast<unsigned long long>(pair));", weaken)),
    race(claims("ClaimsByPlainStores", "ahead_ = atomicInc(counter_", weaken)),
    race(in_kernel("push_rows",
                   push_claims("PushClaimsByPlainStores", "ahead_ = atomicInc(counter_", weaken))),
    race(mover("MoveFirstRowsByPlainStores",
               "atomicMax(&p.tables.firsts[source.rank * p.max_tokens + source.token],", weaken)),
    race(pipe("PipeStagesTakenByPlainStores", "number = atomicAdd(&shared_.next, 1u);", weaken)),
    race(mover("MoveMarksWithoutARelease", "device::st_release_cta_shared(&marks.reached, so_far);",
               weaken)),
    race(push("PushMarksWithoutARelease",
              "device::st_release_cta_shared(&shared_.put, number + 1);", weaken)),
    race(marks("RingMarksByPlainStores", "device::red_release_cta_shared_add<1>(", weaken)),
    race(fabric("RailRowsWithoutARelease", "device::st_release_sys(", weaken)),
    race(of_threads(0, 1, over("SumsDoneWithoutAFence", "__threadfence_system();", drop))),
    race(of_threads(0, 1, over("SumsOfBlocksDoneWithoutAFence", "__threadfence();", drop))),
    race(of_threads(0, 1, again("ValuesReadWithoutAFence", "__threadfence_system();", drop))),
    race(of_threads(0, 1, again("ValuesOfBlocksReadWithoutAFence", "__threadfence();", drop))),
    race(rail_barrier("RailBarrierWithoutARelease", "device::st_release_sys(", weaken)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    count("CountIndicesNotStored", "indices[pair_of(step)] = expert;", undo),
    count("CountOrdinalsNotStored", "ordinals[pair_of(step)] = p.token_major", undo),
    count("CountOrdinalsOfTheNextPair", "ordinals[pair_of(step)] = p.token_major", move, 4),
    count("CountOrdinalsOfTheWarpAlone", "ordinals[pair_of(first + i * mine.tokens)] =", undo),
    count("CountCountsNotStored", "if (last) p.counts[i] =", undo),
    count("CountCountersNotCleared", "i += 32) counters[i] = 0;", undo),
    place("PlaceFirstsNotStored", "if (here && source % locals == local) first[", undo),
    place("PlaceStartsOfTheNextExpert", "blocks.starts[expert] = sum;", move, 8),
    place("PlaceCountsNotStored", "p.tables.expert_counts[expert] = clamped(count);", undo),
    place("PlaceOffsetsOfTheNextExpert", "p.tables.expert_offsets[expert] = clamped(", move, 4),
    place("PlaceRowsNotWanted", "p.tables.wanted[rank] = blocks.wanted[rank];", undo),
    place("PlaceRowsNotStored", "p.tables.rows[offset + pair] = row;", undo),
    place("PlaceIndicesOfTheNextPair", "p.tables.indices[offset + pair] = index[i];", move, 4),
    fabric("RowsOfTheNextWord", "destination[first + i * step] = word[i];", move, 4),
    fabric("RailSignalOfTheNextCall", "device::st_release_sys(", add, 1),
    fabric("RailNoSignal", "device::st_release_sys(", drop),
    rail("RailWantedNotCleared", "wanted[threadIdx.x] = false;", undo),
    rail("RailNotWanted", "wanted[pair / topology.topk] = true;", undo),
    rail("RailNextTokenWanted", "wanted[pair / topology.topk] = true;", move, 1),
    barrier("BarrierNobodyTold", "device::st_release_sys(", drop),
    of_threads(1, 2, barriers("BarrierOneNotTold", "device::st_release_sys(", drop)),
    barriers("BarrierOfTheRoundBefore", "device::st_release_sys(", add, -1),
    race(barriers("BarrierSomeThreadsEnd", "fault_signalled(view)", drop)),
    race(barriers("BarrierThreadsOneFurther", kBarrier, shift_thread, 1)),
    race(barriers("BarrierOfTwoBlocks", kBarrier, launch_blocks, 1)),
    race(barriers("BarrierAside", kBarrier, launch_astray)),
    race(of_argument(0, barriers("BarrierOfTheNodeAlone", kBarrier, launch_argument, 1),
                     offsetof(BarrierParams, node_only), sizeof(bool))),
    race(of_argument(0, barriers("BarrierOfFewerNodes", kBarrier, launch_argument, -1),
                     offsetof(BarrierParams, view.topology.nodes), sizeof(int))),
    race(of_argument(0, barrier("BarrierOfFewerRanks", kBarrier, launch_argument, -1),
                     offsetof(BarrierParams, view.topology.locals), sizeof(int))),
    of_argument(0, barriers("BarrierOfTheNextRank", kBarrier, launch_argument, 1),
                offsetof(BarrierParams, view.topology.rank), sizeof(int)),
    of_argument(0, barriers("BarrierOfTheNextNode", kBarrier, launch_argument, 1),
                offsetof(BarrierParams, view.topology.node), sizeof(int)),
    of_argument(0, barriers("BarrierAlongTheNextRail", kBarrier, launch_argument, 1),
                offsetof(BarrierParams, view.topology.local), sizeof(int)),
    meet("ExchangeEpochNotStored", "view.state->epoch = epoch;", undo),
    meet("ExchangeCallNotStored", "view.state->call = params.call;", undo),
    meet("ExchangeClaimsNotCleared", "claim : view.state->claims) claim = 0;", undo),
    race(meet("ExchangeThreadsOneFurther", kExchange, shift_thread, 1)),
    race(meet("ExchangeAside", kExchange, launch_astray)),
    race(meet("ExchangeSomeThreadsEnd", "fault_signalled(view)", drop)),
    race(meet("ExchangeOfTwoBlocks", kExchange, launch_blocks, 1)),
    of_argument(0, meet("ExchangeOfTheNextRank", kExchange, launch_argument, 1),
                offsetof(ExchangeParams, view.topology.rank), sizeof(int)),
    of_argument(0, meet("ExchangeOfFewerRanks", kExchange, launch_argument, -1),
                offsetof(ExchangeParams, view.topology.locals), sizeof(int)),
    rail("RailThreadsOneFurther", kRailSend, shift_thread, 1),
    rail("RailBlocksOneFurther", kRailSend, shift_block, 1),
    race(rail("RailAside", kRailSend, launch_astray)),
    of_argument(0, rail("RailOfTheNextNode", kRailSend, launch_argument, 1),
                offsetof(RailSendParams, view.topology.node), sizeof(int)),
    of_argument(0, rail("RailToTheNextRank", kRailSend, launch_argument, 1),
                offsetof(RailSendParams, view.topology.local), sizeof(int)),
    push("PushThreadsOneFurther", kPush, shift_thread, 1),
    of_argument(0, push("PushOfTheNextNode", kPush, launch_argument, 1),
                offsetof(CudaSumParams, view.topology.node), sizeof(int)),
    of_argument(0, push("PushOfTheNextRank", kPush, launch_argument, 1),
                offsetof(CudaSumParams, view.topology.local), sizeof(int)),
    race(push("PushInTheNextWord", "device::st_relaxed_sys(", add, 8)),
    scatter("RowsNotClaimed", "const unsigned long long other = atomicMin_system(", drop),
    scatter("RowsClaimedForNothing", "if (worst != kNone) atomicMin(&first_bad, worst);", drop),
    scatter("FindingNotStored", "*finding_of(p.view) = found;", undo),
    table("TableRowsNotStored", "p.tables.rows[at] = row;", undo),
    table("TableRowsOfTheNextPair", "p.tables.rows[at] = row;", move, 4),
    table("GivenRowsNotStored", "p.rows[pair] = static_cast<std::int32_t>(row);", undo),
    table("GivenRowsOfTheNextPair", "p.rows[pair] = static_cast<std::int32_t>(row);", move, 4),
    values("ValuesTablesNotStored", "tables[local] = at_extent(", undo),
    values("ValuesTablesOfTheNextRank", "tables[local] = at_extent(", move, 8),
    of_argument(0, values("ValuesOfFewerTokens", kValues, launch_argument, -1),
                offsetof(ValueParams, tokens), sizeof(std::int64_t)),
    of_argument(0, values("ValuesOfTheNextNode", kValues, launch_argument, 1),
                offsetof(ValueParams, view.topology.node), sizeof(int)),
    of_argument(0, values("ValuesOneFurther", kValues, launch_argument, sizeof(float)),
                offsetof(ValueParams, out), sizeof(std::byte*)),
    of_argument(0, values("ValuesTooFarApart", kValues, launch_argument, sizeof(float)),
                offsetof(ValueParams, out_stride), sizeof(std::int64_t)),
    of_argument(1, values("ValuesOfTheOtherPart", kValues, launch_argument, 1)),
    of_threads(1, 2, values("ValuesOneTableNotStored", "tables[local] = at_extent(", undo)),
    values("ValuesThreadsOneFurther", kValues, shift_thread, 1),
    values("ValuesBlocksOneFurther", kValues, shift_block, 1),
    bits("ValuesNotStored", "reinterpret_cast<std::uint32_t*>(table)[i] = bits;", undo),
    bits("ValuesOfTheNextPair", "reinterpret_cast<std::uint32_t*>(table)[i] = bits;", move, 4),
    weights("WeightsNotStored", "params.pairs[i] = to_float(params.dtype, bits);", undo),
    weights("WeightsOfTheNextPair", "params.pairs[i] = to_float(params.dtype, bits);", move, 4),
    segment("SegmentNotSet", "i += blockDim.x) row[i] = pointers.data[i];", undo),
    segment("SegmentOfTheNextRank", "i += blockDim.x) row[i] = pointers.data[i];", move, 8),
    columns("ColumnsNotCopied", "to[i * element_bytes + byte] = element[byte];", undo),
    columns("ColumnsOneFurther", "to[i * element_bytes + byte] = element[byte];", move, 1),
    count("CountCountsOfChunksTooEarly",
          "// Counters become what the warps before this one have met in the block.", drop, 0, 1),
    count("CountBlocksDoNotMeet", "__syncthreads_and(mine) != 0;", drop),
    count("CountFindingsOfOthers", "atomicMin(&first_bad, block_bad[block]);", add, 1),
    count("CountFirstMistakeTooEarly", "atomicMin(&first_bad, block_bad[block]);", drop, 0, 2),
    place("PlaceBehindTheWrongLane", "row = __shfl_sync(kFullWarp, behind, 31);", drop),
    place("PlaceNobodyWants", "const unsigned those = __ballot_sync(kFullWarp, wanted);", drop),
    place("PlaceOffsetsTooEarly", "sum_sources(p, received, blocks);", drop, 0, 1),
    place("PlaceRunOverwritten",
          "blocks.firsts[i] += blocks.starts[node * per_node + i % per_node];", drop, 0, 2),
    rail("RailNoVote", "const unsigned low = __ballot_sync(0xffffffffu, wanted[lane]);", drop),
    mover("MoveNoLaneFirst", "if (__any_sync(kFullWarp, pair.row >= 0)) {", drop),
    mover("MoveRowOfAnotherPair", "const std::int32_t first_row = __shfl_sync(", drop),
    mover("MoveRowOfTheNextPair", "const std::int32_t first_row = __shfl_sync(", add, 1),
    mover("MoveRowsRepeatedUnseen", "unsigned lanes = __ballot_sync(kFullWarp, first >= 0);", drop),
    mover("MoveRepeatedFromNowhere", "row = which == 0 ? -1 : __shfl_sync(", drop),
    mover("MoveRepeatedFromTheNextRow", "row = which == 0 ? -1 : __shfl_sync(", add, 1),
    mover("MoveRepeatedToNowhere", "const std::int64_t from = __shfl_sync(", drop),
    mover("MoveRepeatedToTheNextRow", "const std::int64_t from = __shfl_sync(", add, 1),
    mover("MoveFirstRowsNotNoted",
          "atomicMax(&p.tables.firsts[source.rank * p.max_tokens + source.token],", drop),
    mover("MoveFirstRowsAreOthers",
          "atomicMax(&p.tables.firsts[source.rank * p.max_tokens + source.token],", add, 1),
    mover("MoveSendersDoNotMeet", "device::barrier_red_and<32 * kSenders>(", drop),
    takes("TakesRowsOfNobody", "if (p_.token_major) write_ids(", drop),
    takes("TakesIdsAtTheOwnRank", "const int lane = __ffs(firsts) - 1;", drop, 0, 1),
    takes("TakesIdsAtTheNextRank", "const int lane = __ffs(firsts) - 1;", add, 1, 1),
    takes("TakesIdsInTheOwnRow", "const int lane = __ffs(firsts) - 1;", drop, 0, 2),
    takes("TakesIdsInTheNextRow", "const int lane = __ffs(firsts) - 1;", add, 1, 2),
    takes("TakesSendersDoNotMeet", "device::barrier_red_and<32 * kSenders>(", drop),
    pipe("PipeFullNotInitialised", "full(stage).init(1);", drop),
    pipe("PipeFullOfTwo", "full(stage).init(1);", add, 1),
    pipe("PipeEmptyNotInitialised", "empty(stage).init(1);", drop),
    pipe("PipeBarriersNotFenced", "device::fence_mbarrier_init();", drop),
    pipe("PipeNobodyWantsRows", "const unsigned lanes = __ballot_sync(", drop),
    pipe("PipeTargetsTooEarly", "if (element_bytes > 0) load_elements(", drop, 0, 1),
    pipe("PipeNothingExpected", "full(stage).arrive_expect(size);", drop),
    pipe("PipeOneByteMore", "full(stage).arrive_expect(size);", add, 1),
    pipe("PipeFewerBytesExpected", "full(stage).arrive_expect(size);", add, -16),
    pipe("PipeNothingLoaded", "device::bulk_load(", drop),
    pipe("PipeOneByteTooMany", "device::bulk_load(", add, 1),
    pipe("PipeNeverFull", "kEnd && (since > kBehind || !full(stage).test_wait(parity))", drop),
    pipe("PipeStoredInTheWrongPhase", "full(stage).wait(parity, \"store\", stage);", add, 1),
    pipe("PipeNothingStored", "device::bulk_store(", drop),
    pipe("PipeStoredFromTheMiddle", "device::bulk_store(", add, 1),
    pipe("PipeNothingCommitted", "device::bulk_commit();  // an empty group for a mark", drop),
    pipe("PipeNothingWaitedFor", "if (++stage == count_) stage = 0, parity ^= 1;", drop, 0, 2),
    pipe("PipeOneGroupNotWaitedFor", "if (++stage == count_) stage = 0, parity ^= 1;", add, 1, 2),
    pipe("PipeNobodyIsLast", "last = atomicSub(&count, 1) == 1;", drop),
    pipe("PipeOneTooMany", "last = atomicSub(&count, 1) == 1;", add, 1),
    pipe("PipeLastLaneAlone", "return __shfl_sync(device::kFullWarp, last, 0);", drop),
    pipe("PipeMarkNotSent", "shared_.targets[stage] = what;", drop, 0, 1),
    pipe("PipeOneStageForAll", "if (lane_ == 0) number = atomicAdd(&shared_.next, 1u);", drop),
    pipe("PipeStagesSkipped", "if (lane_ == 0) number = atomicAdd(&shared_.next, 1u);", add, 1),
    pipe("PipeStageOfTheLane", "number = __shfl_sync(device::kFullWarp, number, 0);", drop),
    pipe("PipeStageOfAnotherLane", "number = __shfl_sync(device::kFullWarp, number, 0);", add, 1),
    pipe("PipeLoadedInTheWrongPhase", "empty(stage).wait((", add, 1),
    large("LargeStageStillRead", "device::bulk_wait_read<kReading - 1>();", drop),
    large("LargeStageStillReadOnce", "device::bulk_wait_read<kReading - 1>();", add, 1),
    large("LargeStageNeverEmpty", "empty(oldest).arrive();", drop),
    sum("SumItemOfTheLane", "ceil_div<std::int64_t>(__reduce_max_sync(", drop),
    sum("SumAddendsTooEarly", "const unsigned rows = __ballot_sync(", drop),
    sum("SumPairsOfNobody", "const unsigned mates = __match_any_sync(", drop),
    sum("SumRowsNotSeen", "const unsigned counted = __ballot_sync(", drop),
    sum("SumFirstOfItsRank", "const unsigned of_node = __ballot_sync(", drop),
    sum("SumFirstOfItsNode",
        "__ballot_sync(device::kFullWarp, counts && there && node < topology_.node) & of_token;",
        drop),
    sum("SumGroupOfTheLane", "const int other = __shfl_sync(", drop),
    sum("SumSomeRun", "const bool all_run = __syncthreads_and(runs_here) != 0;", drop),
    ring("RingFullNotInitialised", "device::place_of(ring.shared->full[i]).init(1);", drop),
    ring("RingFullOfTwo", "device::place_of(ring.shared->full[i]).init(1);", add, 1),
    ring("RingEmptyNotInitialised", "device::place_of(ring.shared->empty[i]).init(", drop),
    ring("RingEmptyOfMore", "device::place_of(ring.shared->empty[i]).init(", add, 1),
    ring("RingBarriersNotFenced", "device::fence_mbarrier_init();", drop),
    ring("RingAddendsTooEarly", "__device__ void sum(std::uint32_t count) {", drop, 0, 1),
    ring("RingNothingExpected", "mine.full().arrive_expect(bytes);", drop),
    ring("RingFewerBytesExpected", "mine.full().arrive_expect(bytes);", add, -16),
    ring("RingNothingLoaded", "device::bulk_load(", drop),
    ring("RingOneByteTooMany", "device::bulk_load(", add, 1),
    ring("RingFewerBytesLoaded", "device::bulk_load(", add, -16),
    ring("RingFlagBeforeTheSlotIsEmpty", "if (lane_ == 0) {", drop, 0, 1),
    ring("RingFlagInTheWrongPhase", "if (lane_ == 0) {", add, 1, 1),
    ring("RingFlagNotTold", "ring_.full().arrive();", drop),
    ring("RingEmptyUnlooked", "lane_ < min(wanted, ring_.slots) && mine.empty().test_wait(", drop),
    ring("RingEmptyInTheWrongPhase", "lane_ < min(wanted, ring_.slots) && mine.empty()", add, 1),
    ring("RingPiecesBeforeTheSlotIsEmpty", "if (others & 1) {", drop, 0, 1),
    ring("RingPiecesInTheWrongPhase", "if (others & 1) {", add, 1, 1),
    ring("RingAddedBeforeItIsThere", "ring.full().wait(", drop),
    ring("RingNeverEmpty", "second_bias = ring.shared->pieces[slot].second_bias;", drop, 0, 2),
    ring("RingThereBeforeItIs", "there = ring.full().test_wait(ring.parity);", drop),
    ring("RingThereInTheWrongPhase", "there = ring.full().test_wait(ring.parity);", add, 1),
    push("PushMarkNotPut", "device::st_release_cta_shared(&shared_.put, number + 1);", drop),
    push("PushMarksTakenTooFar", "device::st_release_cta_shared(&shared_.taken, end);", add, 1),
    push("PushLongestOfTheLane", "longest = __reduce_max_sync(device::kFullWarp, longest);", drop),
    push("PushSomeRun", "if (__syncthreads_or(!runs(", drop),
    pushes("PushesBarriersNotFenced", "device::fence_mbarrier_init();", drop),
    pushes("PushesTargetsTooEarly", "if (element_bytes > 0) load_elements(", drop, 0, 1),
    pushes("PushesNothingExpected", "full(stage).arrive_expect(size);", drop),
    pushes("PushesOneByteMore", "full(stage).arrive_expect(size);", add, 1),
    pushes("PushesNothingLoaded", "device::bulk_load(", drop),
    pushes("PushesStoredBeforeItIsThere", "full(stage).wait(parity, \"store\", stage);", drop),
    pushes("PushesNothingStored", "device::bulk_store(", drop),
    pushes("PushesNothingCommitted", "device::bulk_commit();  // an empty group for a mark", drop),
    outside("TranslateMistakeBeforeItIsCleared", "if (threadIdx.x == 0) first_bad = kNone;", drop,
            0, 1),
    outside("TranslateMistakesUnseen",
            "atomicMin(&first_bad, static_cast<unsigned long long>(pair));", drop),
    outside("TranslateMistakeOfTheNextPair",
            "atomicMin(&first_bad, static_cast<unsigned long long>(pair));", add, 1),
    outside("TranslateMistakesTooEarly", "if (threadIdx.x != 0) return;", drop, 0, -1),
    table("TranslateDroppedOfTheNextPair", "p.rows[pair] = -1;", move, 4),
    table("GivenRowsOfThePairBefore", "p.rows[pair] = static_cast<std::int32_t>(row);", move, -4),
    table("TranslateThreadsOneFurther", kTranslate, shift_thread, 1),
    scatter("ClaimMistakeBeforeItIsCleared", "*finding_of(p.view) = ScatterFinding{};", drop, 0, 2),
    scatter("ClaimMistakesTooEarly", "if (worst != kNone) atomicMin(", drop, 0, 1),
    table("ClaimThreadsOneFurther", kClaim, shift_thread, 1),
    weights("WeightsOfThePairBefore", "params.pairs[i] = to_float(params.dtype, bits);", move, -4),
    of_threads(0, 1, weights("WeightOfTheFirstPairNotStored", "params.pairs[i] = to_float(", undo)),
    of_threads(32, 64, weights("WeightsOfOneWarpNotStored", "params.pairs[i] = to_float(", undo)),
    weights("WeightsThreadsOneFurther", kWeights, shift_thread, 1),
    weights("WeightsBlocksOneFurther", kWeights, shift_block, 1),
    of_argument(0, weights("WeightsOfAShorterNode", kWeights, launch_argument, -1),
                offsetof(WeightParams, max_tokens), sizeof(std::int64_t)),
    of_argument(0, weights("WeightsOfOneTokenLess", kWeights, launch_argument, -1),
                offsetof(WeightParams, tokens), sizeof(std::int64_t)),
    of_argument(0, weights("WeightsOfAnotherType", kWeights, launch_argument, -1),
                offsetof(WeightParams, dtype), sizeof(DType)),
    of_argument(0, weights("WeightsOfWiderRows", kWeights, launch_argument, 2),
                offsetof(WeightParams, stride), sizeof(std::int64_t)),
    race(weights("WeightsAside", kWeights, launch_astray)),
    segment("SegmentOfTheRankBefore", "i += blockDim.x) row[i] = pointers.data[i];", move, -8),
    of_threads(1, 2, segment("SegmentOfTheSecondRankNotSet", "row[i] = pointers.data[i];", undo)),
    of_threads(0, 1, segment("SegmentOfTheFirstRankNotSet", "row[i] = pointers.data[i];", undo)),
    of_threads(3, 4, segment("SegmentOfTheLastRankNotSet", "row[i] = pointers.data[i];", undo)),
    segment("SegmentThreadsOneFurther", kSegment, shift_thread, 1),
    of_argument(2, segment("SegmentOfOneRankLess", kSegment, launch_argument, -1)),
    of_argument(1, segment("SegmentFromItsSecondRow", kSegment, launch_argument, 16),
                sizeof(std::byte*), sizeof(std::byte*)),
    of_argument(0,
                segment("SegmentInTheRowBehind", kSegment, launch_argument, std::int64_t{4} * 8)),
    columns("ColumnsOneBefore", "to[i * element_bytes + byte] = element[byte];", move, -1),
    columns("ColumnsOfTheNextElement", "to[i * element_bytes + byte] = element[byte];", move, 4),
    of_threads(0, 1,
               columns("ColumnOfTheFirstThreadNotCopied",
                       "to[i * element_bytes + byte] = element[byte];", undo)),
    of_threads(16, 32,
               columns("ColumnsOfHalfAWarpNotCopied",
                       "to[i * element_bytes + byte] = element[byte];", undo)),
    columns("ColumnsThreadsOneFurther", kColumns, shift_thread, 1),
    columns("ColumnsBlocksOneFurther", kColumns, shift_block, 1),
    columns("ColumnsOfTheNextByte", "to[i * element_bytes + byte] = element[byte];", misread, 1),
    of_argument(2, columns("ColumnsOfWiderRows", kColumns, launch_argument, 4)),
    of_argument(3, columns("ColumnsTooFarApart", kColumns, launch_argument, 4)),
    of_argument(4, columns("ColumnsOfOneRowLess", kColumns, launch_argument, -1)),
    of_argument(5, columns("ColumnsWithoutTheLast", kColumns, launch_argument, -1)),
    of_argument(6, columns("ColumnsOfShorterElements", kColumns, launch_argument, -1)),
    words_of_row("RowsNotCopied", "destination[first + i * step] = word[i];", undo),
    words_of_row("RowsOneWordFurther", "destination[first + i * step] = word[i];", move, 16),
    of_threads(0, 1,
               words_of_row("RowsWithoutTheirFirstWord", "destination[first + i * step] = word[i];",
                            undo)),
    of_threads(
        3, 4,
        words_of_row("RowsWithoutTheirLastWord", "destination[first + i * step] = word[i];", undo)),
    one_row("RowsThreadsOneFurther", kRows, shift_thread, 1),
    one_row("RowsBlocksOneFurther", kRows, shift_block, 1),
    words_of_row("RowsFromTheNextWord", "word[i] = source[first + i * step];", misread, 16),
    of_argument(0, one_row("RowsToTheNextWord", kRows, launch_argument, 16)),
    of_argument(2, one_row("RowsFromFurther", kRows, launch_argument, 16)),
    of_argument(4, one_row("RowsOfMoreWords", kRows, launch_argument, 16)),
    of_argument(1, one_row("RowsTooFarApart", kRows, launch_argument, 16)),
    of_argument(3, one_row("RowsOfSeveral", kRows, launch_argument, 16)),
    of_argument(4, one_row("RowsOfFewerWords", kRows, launch_argument, -16)),
    of_argument(5, one_row("RowsWithoutTheLast", kRows, launch_argument, -1)),
    race(one_row("RowsAside", kRows, launch_astray)),
    finish("FinishNobodyWaits", "if (__any_sync(device::kFullWarp, last)) wait_for_node(", drop),
};
WINNOW_SIMULATOR_TESTS(SimulatorAllToAll, simulated_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
