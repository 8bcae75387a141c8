// sparse_mla::backward of every GPU in the simulator.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "winnow/simulator/kernels/attention_cuda_simulation.h"
#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation backward_operation(std::int64_t most_queries);

namespace {

// dkv of the deterministic mode beside that of the other one, where an element of kv is far larger
// than all others: with a bound that misses it sums leave their integers. No query sees row 1.
testing::CaseOutcome run_peak(std::int64_t peak_row, std::int64_t peak_column) {
  constexpr std::int64_t kQueries = 3, kHeads = 16, kRows = 20, kColumns = 512;
  constexpr Device kGpu{DeviceType::cuda, 0};
  testing::Random random(5);
  const auto values_of = [&](std::int64_t rows, std::int64_t heads, float size) {
    Tensor values(DType::bf16, {rows, heads, kColumns});
    testing::fill_normal(values, random);
    for (BFloat16& value : values.values<BFloat16>()) {
      value = BFloat16(size * static_cast<float>(value));
    }
    return values;
  };
  Tensor q = values_of(kQueries, kHeads, 1), kv = values_of(kRows, 1, 1e-6f);
  // Nothing else of the logits than of the others.
  for (std::int64_t row = 0; row < kQueries * kHeads; ++row) {
    q.values<BFloat16>()[std::size_t(row * kColumns + peak_column)] = BFloat16(0.0f);
  }
  kv.values<BFloat16>()[std::size_t(peak_row * kColumns + peak_column)] = BFloat16(0x1p30f);
  for (std::int64_t i = 0; i < kColumns; ++i) {
    kv.values<BFloat16>()[std::size_t(kColumns + i)] = BFloat16(INFINITY);
  }
  Tensor indices(DType::i32, {kQueries, 1, kRows - 1}), lse(DType::f32, {kQueries, kHeads});
  std::int32_t entry = 0;
  for (std::int32_t& row : indices.values<std::int32_t>()) {
    row = entry++ % (kRows - 1);
    if (row > 0) ++row;
  }
  std::ranges::fill(lse.values<float>(), std::log(float{kRows - 1}));
  const Tensor q_there = q.to(kGpu), kv_there = kv.to(kGpu), indices_there = indices.to(kGpu),
               lse_there = lse.to(kGpu), out_there = values_of(kQueries, kHeads, 0.2f).to(kGpu),
               d_out_there = values_of(kQueries, kHeads, 1).to(kGpu);
  testing::CaseOutcome outcome;
  std::vector<Tensor> sums;
  for (const bool deterministic : {false, true}) {
    Tensor dq = Tensor(DType::f32, {kQueries, kHeads, kColumns}).to(kGpu),
           dkv = Tensor(DType::f32, {kRows, 1, kColumns}).to(kGpu);
    outcome.backend = backward({.q = q_there,
                                .kv = kv_there,
                                .indices = indices_there,
                                .out = out_there,
                                .lse = lse_there,
                                .d_out = d_out_there,
                                .deterministic = deterministic,
                                .dq = dq,
                                .dkv = dkv});
    sums.push_back(dkv.to({}));
  }
  const auto plain = sums[0].values<float>(), fixed = sums[1].values<float>();
  for (std::size_t row = 0; row < kRows; ++row) {
    float largest = 0, error = 0;
    bool finite = true;
    for (std::size_t i = row * kColumns; i < (row + 1) * kColumns; ++i) {
      largest = std::max(largest, std::fabs(plain[i]));
      error = std::max(error, std::fabs(plain[i] - fixed[i]));
      finite = finite && std::isfinite(fixed[i]);
    }
    const float tolerance = 1e-3f * largest;
    outcome.comparisons.push_back({"dkv of row " + std::to_string(row), error, tolerance,
                                   finite && error <= tolerance, "beside f32 sums"});
  }
  return outcome;
}

// Blocks have several queries all the same.
testing::Operation cut_operation() {
  testing::Operation operation = backward_operation(6);
  const auto add_peak = [&](const char* name, std::int64_t row, std::int64_t column) {
    operation.cases.push_back(
        {name, "", [=](const testing::Target&) { return run_peak(row, column); }, true});
  };
  add_peak("peak-in-first-row", 0, 0);
  add_peak("peak-in-last-row", 19, 511);
  return operation;
}

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h16", {"late"}},          {"bf16-d512-h16-k100-deterministic", {"random:3"}},
    {"bf16-h96", {"random:1"}},      {"bf16-sink-mixed-nan-in-dead-deterministic", {"late"}},
    {"bf16-dense-empty", {"eager"}}, {"f16-extra-list-list", {"random:5"}},
};
// The first six queries of stride4-from0 see one row at most, so that their dq is rounding alone.
const std::vector<PassingCase> kThoroughCases =
    all_cases(cut_operation(),
              {"skv70000", "skv50000", "skv25000", "skv20000", "k2048", "k2300", "stride4-from0"});

// 16 tiles, and 19, of which the last lies where dkv begins; 96 heads are two blocks of them, and
// six steps.
const BugsOf bug{"sparse_mla/backward/backward_cuda.cuh", "bf16-k512"},
    odd{"sparse_mla/backward/backward_cuda.cuh", "bf16-h16-k600"},
    heads{"sparse_mla/backward/backward_cuda.cuh", "bf16-h96"};

const BugsOf fixed{"sparse_mla/backward/backward_cuda.cuh", "bf16-d512-h16-k100-deterministic"};

// Of the kernels before and after the products.
const BugsOf sinks{"sparse_mla/backward/backward_cuda.cuh",
                   "bf16-sink-mixed-nan-in-dead-deterministic"},
    first{"sparse_mla/backward/backward_cuda.cuh", "peak-in-first-row"},
    last{"sparse_mla/backward/backward_cuda.cuh", "peak-in-last-row"},
    narrow{"sparse_mla/backward/backward_cuda.cuh", "bf16-h16-dkv-as-q"},
    plain{"sparse_mla/backward/backward_cuda.cuh", "bf16-h16"},
    two{"sparse_mla/backward/backward_cuda.cuh", "f16-extra-list-list"};
constexpr const char* kPrepare = "prepare_kernel(const __grid_constant__";
constexpr const char* kBound = "bound_rows_kernel(const char* kv";
constexpr const char* kFinish = "finish_kernel(const __grid_constant__";
constexpr const char* kSink = "sink_kernel(const float* shares";
constexpr const char* kShares = "params.shares[query * params.h_q + head] =";
constexpr const char* kElement = "reinterpret_cast<float*>(element)[column] = x;";
constexpr const char* kNarrow = "reinterpret_cast<std::uint16_t*>(element)[column] =";
constexpr const char* kSumsOfWarps = "if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;";
constexpr const char* kSinkOut = "d_sink.data[d_sink.offset(blockIdx.x)] = -sum;";

// Where warps of one schedule are too even to be apart.
PlantedBug where_warps_part(PlantedBug planted) {
  planted.schedules = {"random:1", "random:2", "starved:0"};
  return planted;
}

const std::vector<PlantedBug> kQuickBugs = {
    race(heads("NoWaitForStep", "cp_async_wait<0>();  // of the step", drop)),
    in_one_schedule(race(bug("PlainSumsOfDkv", "reduce_add(static_cast<float*>(", weaken))),
    in_one_schedule(race(fixed(
        "FixedPlainSums", "reduce_add(static_cast<unsigned long long*>(params.sums)", weaken))),
    in_one_schedule(race(bug("ItemsTakenByPlainStores", "atomicAdd(params.taken, 1u)", weaken))),
    in_one_schedule(race(fixed("PlainBounds", "atomicMax(bound, largest)", weaken))),
};
const std::vector<PlantedBug> kThoroughBugs = {
    bug("NoBarrierBehindQuery", "the query is named", drop),
    race(bug("NoBarrierBehindNames", "the rows are named", drop)),
    race(bug("NoWaitForFirstRows", "cp_async_wait<1>();  // of the first rows", drop)),
    race(bug("NoWaitForRows", "cp_async_wait<0>();  // of the next rows", drop)),
    race(bug("NoWaitForRowsOfDq", "// of rows and dS", drop)),
    race(bug("NoBarrierBehindFirstRows", "they are there", drop)),
    race(bug("NoBarrierBehindLogits", "the logits are there", drop)),
    race(bug("NoBarrierBehindDp", "dP and the next tile are there", drop)),
    race(bug("NoBarrierBehindRowsOfDq", "and those before are done", drop)),
    where_warps_part(race(odd("NoBarrierBehindDq", "the last tile is done with", drop))),
    race(heads("NoBarrierBehindStep", "and the step before is done", drop)),
    race(bug("NoBarrierBehindSums", "the sums are there", drop)),
    race(heads("StepReplacedEarly", "cp_async_wait<0>();  // of the step", add, 1)),
    saying("result: ", bug("NoDkv", "reduce_add(static_cast<float*>(params.sums)", drop)),
    saying("result: ", bug("NoProductsOfP", "if (has_value) mma_m16n8k16", drop)),
    saying("result: ", bug("NoProductsOfDq", "mma_m16n8k16<P::kType>(d[m][n], a[m][1]", drop)),
    bug("WeightsOfAnotherPlace", "ldmatrix_x4_trans(at + kDsBytes", add, 16),
    // prepare_kernel
    race(sinks("LimitsBeforeTheyAreThere", "if (thread < 4) limits[thread] =", drop, 0, 1)),
    in_one_schedule(sinks("SeenByTheThreadAlone", "sees = __syncthreads_or(sees);", drop)),
    sinks.undo("LseNotStored", "params.lse2[at] = lse2;"),
    sinks.move("LseOfTheNextHead", "params.lse2[at] = lse2;", 4),
    sinks.undo("DeltasNotStored", "params.deltas[at] = delta;"),
    sinks.move("DeltasOfTheNextHead", "params.deltas[at] = delta;", 4),
    sinks.undo("SharesNotStored", kShares),
    sinks.move("SharesOfTheNextHead", kShares, 4),
    in_one_schedule(sinks("OtherLse", "const float lse = __ldg(", add, 4)),
    in_one_schedule(sinks("OtherSink", "sink = __ldg(params.attn_sink.data", add, 4)),
    first.undo("SeenRowsNotNamed", "params.rows[row_number(params, entries, tile, entry)] = 1;"),
    first.move("RowsBehindSeenOnes", "params.rows[row_number(params, entries, tile, entry)", 4),
    in_one_schedule(sinks("QueriesOneFurther", kPrepare, shift_block, 1)),
    in_one_schedule(sinks("OneQueryLess", kPrepare, launch_blocks, -1)),
    race(sinks("PreparedAside", kPrepare, launch_astray)),
    // bound_rows_kernel
    in_one_schedule(last("LargestOfTheLane", "largest = __reduce_max_sync(", drop)),
    in_one_schedule(first("NoBounds", "if (lane == 0 && largest > 0) atomicMax(", drop)),
    in_one_schedule(first("BoundOfTheNextUnits",
                          "largest_of<kType>(__ldg(reinterpret_cast<const uint4*>(kv + row", add,
                          16)),
    in_one_schedule(first("BoundWhereTheNextRowIsSeen",
                          "if (row >= count || seen[row] == 0) return;", misread, 4)),
    in_one_schedule(of_argument(1, last("BoundOfShorterRows", kBound, launch_argument, -16))),
    in_one_schedule(of_argument(2, last("BoundOfOneRowLess", kBound, launch_argument, -1))),
    in_one_schedule(of_argument(3, last("BoundOfOneUnitLess", kBound, launch_argument, -1))),
    in_one_schedule(of_argument(3, first("BoundOfOneUnitMore", kBound, launch_argument, 1))),
    in_one_schedule(of_argument(5, first("BoundOfTheNextKind", kBound, launch_argument, 4))),
    in_one_schedule(first("BoundThreadsOneFurther", kBound, shift_thread, 1)),
    in_one_schedule(first("BoundRowsOneBlockFurther", kBound, shift_block, 1)),
    in_one_schedule(last("BoundOfOneBlockLess", kBound, launch_blocks, -1)),
    in_one_schedule(last("BoundOfFewerWarps", kBound, launch_threads, -160)),
    race(first("BoundAside", kBound, launch_astray)),
    // finish_kernel
    plain.undo("DkvNotStored", kElement),
    plain.move("DkvOfTheNextColumn", kElement, 4),
    narrow.undo("NarrowDkvNotStored", kNarrow),
    narrow.move("NarrowDkvOfTheNextColumn", kNarrow, 2),
    in_one_schedule(plain("SumsOfTheNextColumn", "x = static_cast<const float*>(", misread, 4)),
    in_one_schedule(fixed("FixedSumsOfTheNextColumn",
                          "static_cast<const long long*>(params.sums)[first", misread, 8)),
    in_one_schedule(of_argument(1, two("FinishFromTheNextRow", kFinish, launch_argument, 1))),
    in_one_schedule(of_argument(2, plain("FinishOneRowLess", kFinish, launch_argument, -1))),
    in_one_schedule(of_argument(5, plain("FinishShorterRows", kFinish, launch_argument, -4))),
    in_one_schedule(of_argument(6, plain("FinishOfAnotherType", kFinish, launch_argument, -1))),
    in_one_schedule(plain("FinishOneBlockFurther", kFinish, shift_block, 1)),
    in_one_schedule(plain("FinishOneBlockLess", kFinish, launch_blocks, -1)),
    race(plain("FinishAside", kFinish, launch_astray)),
    // sink_kernel
    race(sinks("SinkBeforeTheSums", kSumsOfWarps, drop, 0, 1)),
    sinks.undo("SumsOfWarpsNotStored", kSumsOfWarps),
    sinks.move("SumsOfTheNextWarp", kSumsOfWarps, 4),
    sinks.undo("SinkNotStored", kSinkOut),
    sinks.move("SinkOfTheNextHead", kSinkOut, 4),
    in_one_schedule(
        sinks("SharesReadOfTheNextHead", "sum += shares[i * h_q + blockIdx.x];", misread, 4)),
    in_one_schedule(of_argument(1, sinks("SinkOfOneQueryLess", kSink, launch_argument, -1))),
    in_one_schedule(of_argument(2, sinks("SharesOfFewerHeads", kSink, launch_argument, -1))),
    in_one_schedule(sinks("SinkThreadsOneFurther", kSink, shift_thread, 1)),
    in_one_schedule(sinks("SinkHeadsOneFurther", kSink, shift_block, 1)),
    in_one_schedule(sinks("SinkOfOneHeadLess", kSink, launch_blocks, -1)),
    race(sinks("SinkAside", kSink, launch_astray)),
};

WINNOW_SIMULATOR_TESTS(SimulatorBackwardCuda, cut_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
