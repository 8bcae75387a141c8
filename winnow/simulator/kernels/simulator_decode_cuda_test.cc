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
    {"fp8_656-h32", {"starved:1"}},
    {"bf16_512-sq2-h16", {"late"}},
    {"bf16_576-h32", {"random:5"}},
    {"fp8_584-h32", {"random:7"}},
    {"fp8_656-odd-scales-h8", {"random:4"}},
    {"fp8_656-zero-rows-extra", {"random:2"}},
    {"fp8_584-zero-rows", {"late"}},
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

// Of blocks of 32 heads and of 64.
const BugsOf tiles{"attend_cuda.cuh", "bf16_576-k100"}, rows{"attention_cuda.cuh", "bf16_576-k100"},
    ends{"decode_cuda.cuh", "bf16_576-k100"}, turned{"decode_cuda.cuh", "fp8_656-h64"},
    turned584{"decode_cuda.cuh", "fp8_584-h64"};
// Of few heads over rows in f8, whose copies all blocks have; and of two queries of one head in
// parts.
const BugsOf few{"decode_few_cuda.cuh", "fp8_656-k100"},
    few584{"decode_few_cuda.cuh", "fp8_584-k100"},
    odd{"decode_few_cuda.cuh", "fp8_656-odd-scales-h8"}, copies{"decode_cuda.cuh", "fp8_656-k100"},
    copies584{"decode_cuda.cuh", "fp8_584-k100"}, paged{"decode_cuda.cuh", "fp8_656-paged-sq3"},
    parts{"decode_few_cuda.cuh", "fp8_656-parts-h1-length", 8};
// Two queries of 65 heads in parts, which are put together.
const BugsOf merge{"decode_cuda.cuh", "bf16_576-parts-h65", 8};
constexpr const char* kMerge = "merge_kernel(const __grid_constant__";
constexpr const char* kMerged =
    "*reinterpret_cast<uint2*>(params.out.at(i, s, at) + 8 * threadIdx.x) =";
constexpr const char* kLse = "*reinterpret_cast<float*>(params.lse.at(i, s, head)) =";

const std::vector<PlantedBug> kQuickBugs = {
    race(tiles("NoWaitForRows", "the thread's copies are there", drop)),
    race(few("NoBarrierBehindParts", "// The parts of logits are there", drop, 0, 1)),
    few584("PowersOfOtherColumns", "ld_shared<std::uint32_t>(raw + Rows::kScales", add, 4),
};
const std::vector<PlantedBug> kThoroughBugs = {
    race(tiles("NoBarrierBehindTheTileBefore", "and the one before is done", drop)),
    race(tiles("WaitForTheTileBefore", "the thread's copies are there", add, 1)),
    race(tiles("NoCommit", "cp_async_commit();  // of the next tile", drop)),
    race(tiles("NoBarrierBehindLogits", "the logits are there", drop)),
    rows("RowsElsewhere", "cp_async_zfill(to_ + chunk", add, 16),
    paged("BlocksElsewhere", "cp_async_word_zfill(place.address", add, 4),
    race(ends("NoBarrierBehindEnds", "store_output reads the factors", drop)),
    race(ends("NoBarrierBehindBounds", "the bounds are there", drop)),
    copies("RawElsewhere", "cp_async_zfill(to_ + first * kUnitBytes", add, 16),
    copies584("NoScales", "cp_async_word_zfill(raw + Rows::kScales", drop),
    race(turned("NoBarrierBehindTurnedRows", "all rows are turned", drop)),
    turned("TurnedElsewhere", "st_shared(slot.unit(row, column8 + 1)", add, 16),
    turned("NoTurnedRope", "st_shared(slot.unit(row, Rows::kQuantised / 8", drop),
    turned584("TurnedWithOtherScales", "const auto scales = ld_shared", add, 4),
    // few_kernel
    race(few("NoBarrierBehindTheBounds", "the bounds are there", drop)),
    race(few("NoBarrierBehindQueries", "the queries and the first tiles are there", drop)),
    race(few("NoBarrierBehindTopsOfQueries", "the largest of each warp are there", drop)),
    race(few("NoWaitForEntries", "the lane's first entry is there", drop)),
    race(few("NoWaitForFirstRows", "cp_async_wait<kSlots - 1>();", drop)),
    race(few("NoWaitForRowsOfATurn", "what the thread copied of the next tile is there", drop)),
    race(few("NoBarrierBehindTops", "the maxima are there", drop)),
    race(few("NoBarrierBehindWeights", "P relative to the new references is there", drop)),
    race(few("NoVote", "!barrier_red_and<kTeamThreads>(barrier", drop)),
    race(few("NoBarrierBehindSums", "the sums of the warps are there", drop)),
    few("QueriesElsewhere", "st_shared(to.address, make_uint4(q[s][0]", add, 16),
    few("PartsElsewhere", "st_shared(address, make_uint4(__float_as_uint(x[0])", add, 16),
    few("RopeOfOtherColumns", "ld_shared<std::uint64_t>(row + i * 32", add, 8),
    few("RatiosOfOtherRows", "if (lane < 4) to.store(ratios);", add, 4),
    few("WeightsOfOtherRows", "st_shared(team.weights()[which]", add, 8),
    few("OtherValues", "= movmatrix_trans(values", add, 0x0400),
    few584("RatiosOfTheNextRow", "ld_shared<std::uint64_t>(raw + Rows::kScales", add, 8),
    odd("FactorsOfOtherColumns", "ld_shared<float>(from + 8 * n", add, 4),
    parts.undo("PartialSumsNotStored", "params.partial_sums[partial + row] ="),
    // merge_kernel
    merge.undo("MergedNotStored", kMerged),
    merge.move("MergedOfTheNextThread", kMerged, 8),
    of_threads(96, 128, merge.undo("MergedOfTheLastWarpNotStored", kMerged)),
    of_threads(0, 1, merge.undo("LseNotStored", kLse)),
    merge.move("LseOfTheNextHead", kLse, 4),
    in_one_schedule(merge("SumsOfTheNextHead", "sums = params.partial_sums[row_of(n)", misread, 8)),
    in_one_schedule(merge("RowOfTheNextThread",
                          "const float4 row = *reinterpret_cast<const float4*>(", misread, 16, 1)),
    in_one_schedule(merge("MergeThreadsOneFurther", kMerge, shift_thread, 1)),
    in_one_schedule(merge("MergeHeadsOneFurther", kMerge, shift_block, 1)),
    in_one_schedule(merge("MergeOfOneHeadLess", kMerge, launch_blocks, -1)),
    in_one_schedule(merge("MergeOfOneWarpLess", kMerge, launch_threads, -32)),
    race(merge("MergeAside", kMerge, launch_astray)),
};

// Where a block has much memory: of turns that lie beside each other, and of two teams.
const BugsOf pipelined{"attend_cuda.cuh", "bf16_576-h64"};
const std::vector<PlantedBug> kLargeBugs = {
    race(pipelined("NoWaitForRows", "what this thread copied of the tile", drop)),
    race(pipelined("NoBarrier", "rescale(shared, tile - 2, lane, o)", drop)),
    race(turned("NoWaitForTheFirstRows", "cp_async_wait<0>();", drop)),
    race(turned("NoBarrierBehindEntries", "the entries of the second", drop)),
    race(turned("RawRowsReplacedEarly", "may be replaced", drop)),
    race(turned584("RawScalesReplacedEarly", "may be replaced", drop)),
    of_threads(128, 256,
               race(few("NoVoteOfTheSecondTeam", "!barrier_red_and<kTeamThreads>(barrier", drop))),
    race(few("NoBarrierBehindSumsOfBoth", "the sums of both are there", drop)),
    race(few("NoWaitForZeros", "the zeros behind the last tile", drop)),
    race(few("NoBarrierBehindGiven", "what each gives the other is there", drop)),
    race(
        few("NoWaitForRowsOfTwoTurns", "what the thread copied of the next tile is there", add, 1)),
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

// Where a block may have more, the turns of three tiles are on the way at a time; of few heads over
// rows in f8 a block has two teams.
TEST(SimulatorDecodeCudaLarge, Passes) {
  expect_passes_with_much_memory(decode_operation(), kQuickCases, 4);
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
