// sparse_mla::decode of every GPU in the simulator.
#include <string>
#include <vector>

#include "winnow/simulator/kernels/attention_cuda_simulation.h"
#include "winnow/sparse_mla/decode/decode_split_cuda.h"
#include "winnow/sparse_mla/decode/test_beside_forward.h"

namespace winnow::sparse_mla {

testing::Operation decode_operation();

namespace {

const std::vector<PassingCase> kQuickCases = {
    {"fp8_656-h64", {"random:1"}},
    {"fp8_584-h64", {"random:2"}},
    {"bf16_576-h64", {"starved:3"}},
    {"bf16_512-sq2-h16", {"late"}},
    {"bf16_576-h32", {"random:5"}},
    {"fp8_656-h32", {"starved:1"}},
    {"fp8_584-h32", {"random:7"}},
    {"fp8_656-odd-scales-h8", {"random:4"}},
    {"fp8_584-extra-sq2-length", {"random:3"}},
    {"fp8_656-some-nothing", {"eager"}},
    {"fp8_584-parts-length-zero", {"late"}},
    {"fp8_656-paged-sq3", {"random:2"}},
    {"bf16_576-paged-scattered", {"late"}},
};
const std::vector<PassingCase> kThoroughCases = all_cases(decode_operation(), {});

// Of blocks of 16 heads, of 32, and of 64.
const BugsOf tiles{"attend_cuda.cuh", "fp8_656-k100"}, few{"attention_cuda.cuh", "bf16_576-k100"},
    raw{"decode_cuda.cuh", "fp8_656-k100"}, raw584{"decode_cuda.cuh", "fp8_584-k100"},
    odd{"decode_cuda.cuh", "fp8_656-odd-scales-h8"}, paged{"decode_cuda.cuh", "fp8_656-paged-sq3"},
    ahead{"attend_cuda.cuh", "fp8_656-h32"}, turned{"decode_cuda.cuh", "fp8_656-h64"},
    turned584{"decode_cuda.cuh", "fp8_584-h64"};

const std::vector<PlantedBug> kQuickBugs = {
    saying("race: ", tiles("NoWaitForRows", "the thread's copies are there", Action::drop)),
    raw("ValuesElsewhere", "st_shared(to ^ kUnitBytes, values[1])", Action::add, 16),
};
const std::vector<PlantedBug> kThoroughBugs = {
    saying("race: ",
           tiles("NoBarrierBehindTheTileBefore", "and the one before is done", Action::drop)),
    saying("race: ",
           tiles("WaitForTheTileBefore", "the thread's copies are there", Action::add, 1)),
    saying("race: ", tiles("NoCommit", "cp_async_commit();  // of one tile", Action::drop)),
    saying("race: ", tiles("NoBarrierBehindLogits", "the logits are there", Action::drop)),
    saying("race: ",
           ahead("NoCommitAhead", "cp_async_commit();  // of the next tile", Action::drop)),
    few("RowsElsewhere", "cp_async_zfill(to_ + chunk", Action::add, 16),
    paged("BlocksElsewhere", "cp_async_word_zfill(place.address", Action::add, 4),
    saying("race: ", raw("NoBarrierBehindEnds", "store_output reads the factors", Action::drop)),
    saying("race: ", raw("NoBarrierBehindBounds", "the bounds are there", Action::drop)),
    raw("NoValues", "st_shared(to, values[0])", Action::drop),
    raw("LateValues", "st_shared(to, values[0])", Action::delay),
    raw("RawElsewhere", "cp_async_zfill(to_ + at", Action::add, 16),
    raw("RopeOfOtherColumns", "ld_shared<std::uint64_t>(from + Rows::kRopeOffset", Action::add, 8),
    raw("ScalesOfOtherColumns", "Rows::kScaleOffset + 4 * warp", Action::add, 4),
    raw584("RopeElsewhere", "st_shared(to[kTogether - 1] ^ unit", Action::add, 32),
    raw584("NoScales", "cp_async_word_zfill(raw + Rows::kScales", Action::drop),
    raw584("ScalesOfOtherColumns584", "Rows::kScaleBytes + warp / 2", Action::add, 4),
    odd("OddValuesElsewhere", "st_shared((to ^ i / 2", Action::add, 8),
    odd("OddValuesOfOthers", "dequantise_any(ld_shared", Action::add, 4),
    saying("race: ", turned("NoBarrierBehindTurnedRows", "all rows are turned", Action::drop)),
    turned("TurnedElsewhere", "st_shared(slot.unit(row, column8 + 1)", Action::add, 16),
    turned("NoTurnedRope", "st_shared(slot.unit(row, Rows::kQuantised / 8", Action::drop),
    turned584("TurnedWithOtherScales", "const auto scales = ld_shared", Action::add, 4),
};

// Of the turns that lie beside each other.
const BugsOf pipelined{"attend_cuda.cuh", "bf16_576-h64"};
const std::vector<PlantedBug> kLargeBugs = {
    saying("race: ",
           pipelined("NoWaitForRows", "what this thread copied of the tile", Action::drop)),
    saying("race: ", pipelined("NoBarrier", "rescale(shared, tile - 2, lane, o)", Action::drop)),
    saying("race: ", turned("NoWaitForTheFirstRows", "cp_async_wait<0>();", Action::drop)),
    saying("race: ", turned("NoBarrierBehindEntries", "the entries of the second", Action::drop)),
    saying("race: ", turned("RawRowsReplacedEarly", "may be replaced", Action::drop)),
    saying("race: ", turned584("RawScalesReplacedEarly", "may be replaced", Action::drop)),
};

TEST(SimulatorDecodeCudaSplit, FollowsTheTilesOrTheGpu) {
  using namespace decode_cuda_detail;
  constexpr Split none = batch_invariant_split(0), short_ = batch_invariant_split(32),
                  long_ = batch_invariant_split(1000);
  static_assert(none.segments == 1 && short_.segments == 1);
  static_assert(long_.segments == 8 && long_.segment_tiles == 125);
  static_assert(fastest_split(64, 1, 108).segments == 32);  // of at least two tiles
  static_assert(fastest_split(64, 27, 108).segments == 4);
  static_assert(fastest_split(64, 109, 108).segments == 1);
}

// Whatever a block may have of shared memory: forward() has kernels for three sizes.
TEST(SimulatorDecodeCudaSameBits, DecodeGivesTheBitsOfForward) {
  constexpr int kSizes[] = {kLeast, 163 * 1024, kLarge};
  int number = 0;
  for (const DecodeCase& shape : steps_beside_forward()) {
    for (const int size : {number % 3, (number + 1) % 3}) {
      simulator::settings().shared_bytes = kSizes[size];
      simulator::settings().schedule =
          simulator::parse_schedule("random:" + std::to_string(10 * size + number));
      expect_bits_of_forward(shape, {DeviceType::cuda, 0});
    }
    ++number;
  }
  simulator::settings().shared_bytes = kLeast;
}

// Where a block may have more, the turns of three tiles are on the way at a time.
TEST(SimulatorDecodeCudaLarge, Passes) {
  expect_passes_with_much_memory(decode_operation(), kQuickCases, 3);
}
TEST(ThoroughDecodeCudaLarge, Passes) {
  expect_passes_with_much_memory(decode_operation(), kQuickCases, kQuickCases.size());
}

const bool kLargeRegistered = register_bugs_with_much_memory<decode_operation>(
    "Thorough/SimulatorDecodeCudaLargeBug", kLargeBugs);

WINNOW_SIMULATOR_TESTS(SimulatorDecodeCuda, decode_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
