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
    {"fp8_584-flash-mla-lse", {"random:6"}},
    {"bf16_512-flash-mla-lse-batch", {"late"}, 8},
    {"fp8_584-parts-length-zero", {"late"}},
    {"fp8_656-paged-sq3", {"random:2"}},
    {"bf16_576-paged-scattered", {"late"}},
    {"fp8_656-paged-length-for-all-queries", {"random:1"}},
};
const std::vector<PassingCase> kThoroughCases = all_cases(decode_operation(), {});

// Of blocks of 16 heads, of 32, and of 64.
const BugsOf tiles{"attend_cuda.cuh", "fp8_656-k100"}, few{"attention_cuda.cuh", "bf16_576-k100"},
    raw{"decode_cuda.cuh", "fp8_656-k100"}, raw584{"decode_cuda.cuh", "fp8_584-k100"},
    odd{"decode_cuda.cuh", "fp8_656-odd-scales-h8"}, paged{"decode_cuda.cuh", "fp8_656-paged-sq3"},
    ahead{"attend_cuda.cuh", "fp8_656-h32"}, turned{"decode_cuda.cuh", "fp8_656-h64"},
    turned584{"decode_cuda.cuh", "fp8_584-h64"};
// Two queries of 65 heads in parts, which are put together.
const BugsOf merge{"decode_cuda.cuh", "bf16_576-parts-h65", 8};
constexpr const char* kMerge = "merge_kernel(const __grid_constant__";
constexpr const char* kMerged =
    "*reinterpret_cast<uint2*>(params.out.at(i, s, at) + 8 * threadIdx.x) =";
constexpr const char* kLse = "*reinterpret_cast<float*>(params.lse.at(i, s, head)) =";

const std::vector<PlantedBug> kQuickBugs = {
    race(tiles("NoWaitForRows", "the thread's copies are there", drop)),
    raw("ValuesElsewhere", "st_shared(to ^ kUnitBytes, values[1])", add, 16),
};
const std::vector<PlantedBug> kThoroughBugs = {
    race(tiles("NoBarrierBehindTheTileBefore", "and the one before is done", drop)),
    race(tiles("WaitForTheTileBefore", "the thread's copies are there", add, 1)),
    race(tiles("NoCommit", "cp_async_commit();  // of one tile", drop)),
    race(tiles("NoBarrierBehindLogits", "the logits are there", drop)),
    race(ahead("NoCommitAhead", "cp_async_commit();  // of the next tile", drop)),
    few("RowsElsewhere", "cp_async_zfill(to_ + chunk", add, 16),
    paged("BlocksElsewhere", "cp_async_word_zfill(place.address", add, 4),
    race(raw("NoBarrierBehindEnds", "store_output reads the factors", drop)),
    race(raw("NoBarrierBehindBounds", "the bounds are there", drop)),
    raw("NoValues", "st_shared(to, values[0])", drop),
    raw("LateValues", "st_shared(to, values[0])", delay),
    raw("RawElsewhere", "cp_async_zfill(to_ + at", add, 16),
    raw("RopeOfOtherColumns", "ld_shared<std::uint64_t>(from + Rows::kRopeOffset", add, 8),
    raw("ScalesOfOtherColumns", "Rows::kScaleOffset + 4 * warp", add, 4),
    raw584("RopeElsewhere", "st_shared(to[kTogether - 1] ^ unit", add, 32),
    raw584("NoScales", "cp_async_word_zfill(raw + Rows::kScales", drop),
    raw584("ScalesOfOtherColumns584", "Rows::kScaleBytes + warp / 2", add, 4),
    odd("OddValuesElsewhere", "st_shared((to ^ i / 2", add, 8),
    odd("OddValuesOfOthers", "dequantise_any(ld_shared", add, 4),
    race(turned("NoBarrierBehindTurnedRows", "all rows are turned", drop)),
    turned("TurnedElsewhere", "st_shared(slot.unit(row, column8 + 1)", add, 16),
    turned("NoTurnedRope", "st_shared(slot.unit(row, Rows::kQuantised / 8", drop),
    turned584("TurnedWithOtherScales", "const auto scales = ld_shared", add, 4),
    // merge_kernel
    merge.undo("MergedNotStored", kMerged),
    merge.move("MergedOfTheNextThread", kMerged, 8),
    of_threads(96, 128, merge.undo("MergedOfTheLastWarpNotStored", kMerged)),
    of_threads(0, 1, merge.undo("LseNotStored", kLse)),
    merge.move("LseOfTheNextHead", kLse, 4),
    in_one_schedule(merge("SumsOfTheNextHead",
                          "const PartialSums sums = params.partial_sums[row_of(n)];", misread, 8)),
    in_one_schedule(merge("RowOfTheNextThread",
                          "const float4 row = *reinterpret_cast<const float4*>(", misread, 16, 1)),
    in_one_schedule(merge("MergeThreadsOneFurther", kMerge, shift_thread, 1)),
    in_one_schedule(merge("MergeHeadsOneFurther", kMerge, shift_block, 1)),
    in_one_schedule(merge("MergeOfOneHeadLess", kMerge, launch_blocks, -1)),
    in_one_schedule(merge("MergeOfOneWarpLess", kMerge, launch_threads, -32)),
    race(merge("MergeAside", kMerge, launch_astray)),
};

// Of the turns that lie beside each other.
const BugsOf pipelined{"attend_cuda.cuh", "bf16_576-h64"};
const std::vector<PlantedBug> kLargeBugs = {
    race(pipelined("NoWaitForRows", "what this thread copied of the tile", drop)),
    race(pipelined("NoBarrier", "rescale(shared, tile - 2, lane, o)", drop)),
    race(turned("NoWaitForTheFirstRows", "cp_async_wait<0>();", drop)),
    race(turned("NoBarrierBehindEntries", "the entries of the second", drop)),
    race(turned("RawRowsReplacedEarly", "may be replaced", drop)),
    race(turned584("RawScalesReplacedEarly", "may be replaced", drop)),
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

// Whatever a block may have of shared memory: forward() has kernels for three sizes, of which each
// step takes so many.
void expect_bits_of_forward_of_sizes(int sizes_of_each) {
  constexpr int kSizes[] = {kLeast, 163 * 1024, kLarge};
  int number = 0;
  for (const DecodeCase& shape : steps_beside_forward()) {
    for (int i = 0; i < sizes_of_each; ++i) {
      const int size = (number + i) % 3;
      simulator::settings().shared_bytes = kSizes[size];
      simulator::settings().schedule =
          simulator::parse_schedule("random:" + std::to_string(10 * size + number));
      expect_bits_of_forward(shape, {DeviceType::cuda, 0});
    }
    ++number;
  }
  simulator::settings().shared_bytes = kLeast;
}
TEST(SimulatorDecodeCudaSameBits, DecodeGivesTheBitsOfForward) {
  expect_bits_of_forward_of_sizes(1);
}
TEST(ThoroughDecodeCudaSameBits, DecodeGivesTheBitsOfForward) {
  expect_bits_of_forward_of_sizes(3);
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
