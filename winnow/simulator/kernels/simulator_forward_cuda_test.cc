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
};
const std::vector<PassingCase> kThoroughCases =
    all_cases(forward_operation(), {"sq4096", "sq300", "skv20000"});

const BugsOf bug{"sparse_mla/attend_cuda.cuh", "bf16-k512"},
    ragged{"sparse_mla/attend_cuda.cuh", "bf16-length-ragged"},
    logits{"sparse_mla/logits_cuda.cuh", "bf16-k512"},
    shared{"sparse_mla/attention_cuda.cuh", "bf16-k512"},
    kernel{"sparse_mla/forward/forward_cuda.cuh", "bf16-k512"},
    entries{"sparse_mla/two_sources_cuda.cuh", "bf16-k512"};

const std::vector<PlantedBug> kQuickBugs = {
    saying("race: ", bug("NoWaitForRows", "the thread's copies are there", Action::drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    saying("race: ",
           bug("NoBarrierBehindRows", "the tile is there, and the one before", Action::drop)),
    saying("race: ", bug("WaitForTheTileBefore", "the thread's copies are there", Action::add, 1)),
    saying("race: ", bug("NoCommit", "cp_async_commit();  // of the next tile", Action::drop)),
    saying("race: ", bug("NoBarrierBehindEntries", "the first entries are there", Action::drop)),
    saying("race: ", kernel("NoBarrierBehindEnds", "store_output reads the factors", Action::drop)),
    saying("race: ", bug("NoBarrierBehindLogits", "// the logits are there", Action::drop)),
    saying("race: ", bug("NoBarrierBehindP", "rescale(shared, tile, lane, o)", Action::drop)),
    logits("LateLogits", "(first + to).store", Action::delay),
    logits("LogitsElsewhere", "(first + to).store", Action::add, 16),
    bug("WeightsElsewhere", "(weights + 32 * n).store", Action::add, 8),
    saying("result: ", bug("NoFactors", "if (lane % 4 == 0) shared.factors()", Action::drop)),
    ragged("NoMask", "shared.masks()[tile & 3].store", Action::drop),
    entries("NoEntries", "cp_async_word_zfill(place.address", Action::drop),
    shared("OtherKeys", "ldmatrix_x4(k.at(half", Action::add, 16),
    saying("result: ", bug("OtherValues", "ldmatrix_x4_trans(v.at(k16", Action::add, 32)),
    saying("result: ", shared("NoProducts", "mma_m16n8k16<P::kType>(s[m][1]", Action::drop)),
    shared("RowsElsewhere", "cp_async_zfill(to_ + chunk", Action::add, 128),
};
// Of the turns that lie beside each other.
const std::vector<PlantedBug> kLargeBugs = {
    saying("race: ", bug("NoWaitForRows", "what this thread copied of the tile", Action::drop)),
    saying("race: ",
           bug("WaitForTheTileBefore", "what this thread copied of the tile", Action::add, 1)),
    saying("race: ", bug("NoBarrier", "rescale(shared, tile - 2, lane, o)", Action::drop)),
    saying("race: ", bug("NoBarrierOfAGroup", "their logits may be replaced", Action::drop)),
    saying("result: ", bug("NoFactors", "if (lane % 4 == 0) shared.factors()", Action::drop)),
    logits("LateLogits", "(first + to).store", Action::delay),
    bug("LateWeights", "(weights + 32 * n).store", Action::delay),
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
