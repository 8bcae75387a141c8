// sparse_mla::decode of every GPU in the simulator, which is one of compute capability 8.6 here: it
// has no other kernel for the operation, and blocks have 99 KiB of shared memory.
#include <string>
#include <vector>

#include "winnow/simulator/kernels/sparse_mla_simulation.h"
#include "winnow/sparse_mla/decode/decode_split_cuda.h"

namespace winnow::sparse_mla {

testing::Operation decode_operation();

namespace {

constexpr int kLeast = 99 * 1024, kLarge = 227 * 1024;
const bool kSet = [] {  // before the library asks
  simulator::settings().compute_capability = 86;
  simulator::settings().shared_bytes = kLeast;
  return true;
}();

const std::vector<PassingCase> kQuickCases = {
    {"fp8_656-h64", {"random:1"}},           {"fp8_584-h64", {"random:2"}},
    {"bf16_576-h64", {"starved:3"}},         {"bf16_512-sq2-h16", {"late"}},
    {"fp8_656-odd-scales-h8", {"random:4"}}, {"fp8_584-extra-sq2-length", {"random:3"}},
    {"fp8_656-some-nothing", {"eager"}},     {"fp8_584-parts-length-zero", {"late"}},
    {"fp8_656-paged-sq3", {"random:2"}},     {"bf16_576-paged-scattered", {"late"}},
};
const std::vector<PassingCase> kThoroughCases = all_cases(decode_operation(), {});

const BugsOf tiles{"attend_cuda.cuh", "fp8_656-k100"}, raw{"decode_cuda.cuh", "fp8_656-k100"},
    raw584{"decode_cuda.cuh", "fp8_584-k100"}, paged{"decode_cuda.cuh", "fp8_656-paged-sq3"};

const std::vector<PlantedBug> kQuickBugs = {
    saying("race: ", tiles("NoWaitForRows", "the thread's copies are there", Action::drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    saying("race: ",
           tiles("NoBarrierBehindTheTileBefore", "and the one before is done", Action::drop)),
    saying("race: ",
           tiles("WaitForTheTileBefore", "the thread's copies are there", Action::add, 1)),
    saying("race: ", tiles("NoCommit", "cp_async_commit();  // of the next tile", Action::drop)),
    saying("race: ", tiles("NoBarrierBehindTurnedRows", "all rows are turned", Action::drop)),
    paged("BlocksElsewhere", "cp_async_word_zfill(place.address", Action::add, 4),
    saying("race: ", raw584("RawScalesReplacedEarly", "may be replaced", Action::drop)),
    saying("race: ", raw("NoBarrierBehindEnds", "store_output reads the factors", Action::drop)),
    saying("race: ", raw("NoBarrierBehindBounds", "the bounds are there", Action::drop)),
    raw("ValuesElsewhere", "st_shared(slot.unit(row, column8 + 1)", Action::add, 16),
    raw("NoRope", "st_shared(slot.unit(row, Row::kQuantised / 8", Action::drop),
    raw("LateRope", "st_shared(slot.unit(row, Row::kQuantised / 8", Action::delay),
    raw("RawElsewhere", "cp_async_zfill(to_ + at", Action::add, 16),
    raw584("NoScales", "cp_async_word_zfill(to_ + Row::kScaleOffset", Action::drop),
    raw584("ScalesOfAnotherGroup", "ld_shared<std::uint32_t>(from + Row::kScaleOffset", Action::add,
           4),
};

// Of the turns that lie beside each other.
const std::vector<PlantedBug> kLargeBugs = {
    saying("race: ", tiles("NoWaitForRows", "what this thread copied of the tile", Action::drop)),
    saying("race: ", tiles("NoBarrier", "rescale(shared, tile - 2, lane, o)", Action::drop)),
    saying("race: ", raw("NoWaitForTheFirstRows", "cp_async_wait<0>();", Action::drop)),
    saying("race: ", raw("NoBarrierBehindEntries", "the entries of the second", Action::drop)),
    saying("race: ", raw("RawRowsReplacedEarly", "may be replaced", Action::drop)),
};

TEST(SimulatorDecodeCudaSplit, FollowsTheTilesOrTheGpu) {
  using namespace decode_cuda_detail;
  constexpr Split none = batch_invariant_split(0), short_ = batch_invariant_split(32),
                  long_ = batch_invariant_split(1000);
  static_assert(none.segments == 1 && short_.segments == 1);
  static_assert(long_.segments == 8 && long_.segment_tiles == 125);
  static_assert(fastest_split(64, 1, 108).segments == 16);  // of at least four tiles
  static_assert(fastest_split(64, 27, 108).segments == 4);
  static_assert(fastest_split(64, 109, 108).segments == 1);
}

// Where a block may have more, the turns of three tiles are on the way at a time.
TEST(SimulatorDecodeCudaLarge, Passes) {
  simulator::settings().shared_bytes = kLarge;
  for (const PassingCase& one : kQuickCases) {
    simulator::expect_passes(decode_operation(), one.name, one.schedules.front());
  }
  simulator::settings().shared_bytes = kLeast;
}

class SimulatorDecodeCudaLargeBug : public ::testing::TestWithParam<PlantedBug> {};
TEST_P(SimulatorDecodeCudaLargeBug, IsFound) {
  simulator::settings().shared_bytes = kLarge;
  simulator::expect_found(decode_operation(), GetParam());
  simulator::settings().shared_bytes = kLeast;
}

WINNOW_SIMULATOR_TESTS(SimulatorDecodeCuda, decode_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);
INSTANTIATE_TEST_SUITE_P(Thorough, SimulatorDecodeCudaLargeBug, ::testing::ValuesIn(kLargeBugs),
                         kNameOf);

}  // namespace
}  // namespace winnow::sparse_mla
