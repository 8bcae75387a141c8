// sparse_mla::backward of every GPU in the simulator.
#include <string>
#include <vector>

#include "winnow/simulator/kernels/attention_cuda_simulation.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation backward_operation(std::int64_t most_queries);

namespace {

// Blocks have several queries all the same.
testing::Operation cut_operation() { return backward_operation(6); }

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h16", {"late"}},          {"bf16-d512-h16-k100-deterministic", {"random:3"}},
    {"bf16-h96", {"random:1"}},      {"bf16-sink-mixed-nan-in-dead-deterministic", {"late"}},
    {"bf16-dense-empty", {"eager"}}, {"f16-extra-list-list", {"random:5"}},
};
// The first six queries of stride4-from0 see one row at most, so that their dq is rounding alone.
const std::vector<PassingCase> kThoroughCases =
    all_cases(cut_operation(),
              {"skv131072", "skv50000", "skv25000", "skv20000", "k2048", "k2300", "stride4-from0"});

// 16 tiles, and 19, of which the last lies where dkv begins; 96 heads are two blocks of them, and
// six steps.
const BugsOf bug{"sparse_mla/backward/backward_cuda.cuh", "bf16-k512"},
    odd{"sparse_mla/backward/backward_cuda.cuh", "bf16-h16-k600"},
    heads{"sparse_mla/backward/backward_cuda.cuh", "bf16-h96"};

const BugsOf fixed{"sparse_mla/backward/backward_cuda.cuh", "bf16-d512-h16-k100-deterministic"};

// Where warps of one schedule are too even to be apart.
PlantedBug where_warps_part(PlantedBug planted) {
  planted.schedules = {"random:1", "random:2", "starved:0"};
  return planted;
}

const std::vector<PlantedBug> kQuickBugs = {
    race(heads("NoWaitForStep", "cp_async_wait<0>();  // of the step", drop)),
    in_one_schedule(
        race(bug("PlainSumsOfDkv", "reduce_add(static_cast<float*>(params.sums)", weaken))),
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
};

WINNOW_SIMULATOR_TESTS(SimulatorBackwardCuda, cut_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
