// sparse_mla::forward of every GPU in the simulator.
#include <string>
#include <vector>

#include "winnow/simulator/kernels/attention_cuda_simulation.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation forward_operation();

namespace {

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", {"late", "random:1"}},   {"bf16-d512-h64-k512", {"random:3"}},
    {"f16-d512-h16-k100", {"starved:3"}}, {"bf16-length-ragged", {"random:4"}},
    {"bf16-some-nothing", {"random:5"}},  {"bf16-later-maxima", {"late"}},
    {"bf16-dense-empty", {"random:1"}},   {"f16-extra-list-list", {"late"}},
    {"f16-flash-mla-lse", {"random:2"}},
};
const std::vector<PassingCase> kThoroughCases =
    all_cases(forward_operation(), {"sq4096", "sq300", "skv20000"});

const BugsOf bug{"sparse_mla/attend_cuda.cuh", "bf16-k512"},
    ragged{"sparse_mla/attend_cuda.cuh", "bf16-length-ragged"},
    logits{"sparse_mla/logits_cuda.cuh", "bf16-k512"},
    shared{"sparse_mla/attention_cuda.cuh", "bf16-k512"},
    kernel{"sparse_mla/forward/forward_cuda.cuh", "bf16-k512"},
    few{"sparse_mla/forward/forward_cuda.cuh", "f16-d512-h16-k100"},
    entries{"sparse_mla/two_sources_cuda.cuh", "bf16-k512"};
constexpr const char* kForward = "forward_kernel(const __grid_constant__";
constexpr const char* kLse = "params.lse.data[params.lse.offset(query, head)] =";
constexpr const char* kMaxima = "params.max_logits.data[params.max_logits.offset(query, head)] =";

const std::vector<PlantedBug> kQuickBugs = {
    race(bug("NoWaitForRows", "the thread's copies are there", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    race(bug("NoBarrierBehindRows", "the tile is there, and the one before", drop)),
    race(bug("WaitForTheTileBefore", "the thread's copies are there", add, 1)),
    race(bug("NoCommit", "cp_async_commit();  // of the next tile", drop)),
    race(bug("NoBarrierBehindEntries", "the first entries are there", drop)),
    race(kernel("NoBarrierBehindEnds", "store_output reads the factors", drop)),
    race(few("NoBarrierBehindBounds", "// the bounds are there", drop)),
    few("NoEnds", "shared.ends()[row].store(", drop),
    few.undo("LseNotStored", kLse),
    few.move("LseOfTheNextHead", kLse, 4),
    few.undo("MaximaNotStored", kMaxima),
    few.move("MaximaOfTheNextHead", kMaxima, 4),
    in_one_schedule(few("ThreadsOneFurther", kForward, shift_thread, 1)),
    in_one_schedule(few("ItemsOneFurther", kForward, shift_block, 1)),
    in_one_schedule(few("OneItemLess", kForward, launch_blocks, -1)),
    in_one_schedule(few("OneWarpLess", kForward, launch_threads, -32)),
    race(bug("NoBarrierBehindLogits", "// the logits are there", drop)),
    race(bug("NoBarrierBehindP", "rescale(shared, tile, lane, o)", drop)),
    logits("LateLogits", "(first + to).store", delay),
    logits("LogitsElsewhere", "(first + to).store", add, 16),
    bug("WeightsElsewhere", "(weights + 32 * n).store", add, 8),
    saying("result: ", bug("NoFactors", "if (lane % 4 == 0) shared.factors()", drop)),
    ragged("NoMask", "shared.masks()[tile & 3].store", drop),
    entries("NoEntries", "cp_async_word_zfill(place.address", drop),
    shared("OtherKeys", "ldmatrix_x4(k.at(half", add, 16),
    saying("result: ", bug("OtherValues", "ldmatrix_x4_trans(v.at(k16", add, 32)),
    saying("result: ", shared("NoProducts", "mma_m16n8k16<P::kType>(s[m][1]", drop)),
    shared("RowsElsewhere", "cp_async_zfill(to_ + chunk", add, 128),
};
// Of the turns that lie beside each other.
const std::vector<PlantedBug> kLargeBugs = {
    race(bug("NoWaitForRows", "what this thread copied of the tile", drop)),
    race(bug("WaitForTheTileBefore", "what this thread copied of the tile", add, 1)),
    race(bug("NoBarrier", "rescale(shared, tile - 2, lane, o)", drop)),
    race(bug("NoBarrierOfAGroup", "their logits may be replaced", drop)),
    saying("result: ", bug("NoFactors", "if (lane % 4 == 0) shared.factors()", drop)),
    logits("LateLogits", "(first + to).store", delay),
    bug("LateWeights", "(weights + 32 * n).store", delay),
};

// Where a block may have more, the turns of three tiles are on the way at a time.
TEST(SimulatorForwardCudaLarge, Passes) {
  expect_passes_with_much_memory(forward_operation(), kQuickCases, 3);
}
TEST(ThoroughForwardCudaLarge, Passes) {
  expect_passes_with_much_memory(forward_operation(), kQuickCases, kQuickCases.size());
}

const bool kLargeRegistered = register_bugs_with_much_memory<forward_operation>(
    "Thorough/SimulatorForwardCudaLargeBug", kLargeBugs);

WINNOW_SIMULATOR_TESTS(SimulatorForwardCuda, forward_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
