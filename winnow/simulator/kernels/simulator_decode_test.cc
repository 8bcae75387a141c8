// sparse_mla::decode of sm90 in the simulator.
#include <algorithm>
#include <cmath>
#include <string>

#include "winnow/simulator/kernels/sparse_mla_simulation.h"
#include "winnow/sparse_mla/decode/decode_split_sm90.h"
#include "winnow/sparse_mla/decode/decode_step_cases.h"
#include "winnow/testing/expect.h"

namespace winnow::sparse_mla {

testing::Operation decode_operation();

namespace {

const std::vector<std::string> kFew = {"eager", "late", "random:1", "starved:9"};
const std::vector<std::string> kMany = {"eager",     "late",      "random:1",  "random:2",
                                        "random:3",  "random:4",  "random:5",  "starved:0",
                                        "starved:5", "starved:9", "starved:11"};

const std::vector<PassingCase> kQuickCases = {
    {"fp8_656-h64", kFew},
    {"fp8_584-h64", {"late", "random:2"}},
    {"bf16_576-h64", {"random:2"}},
    {"bf16_576-k512", {"late"}},
    {"bf16_512-k192", {"starved:9"}},
    {"fp8_656-odd-scales-h8", {"random:4"}},
    {"fp8_656-extra-sq2-length", kFew},
    {"fp8_584-extra-large", {"random:3"}},
    {"fp8_656-k2048", {"random:1"}},
    {"fp8_656-some-nothing", {"random:5", "starved:2"}},
    {"fp8_656-sq3-length-batch", {"random:3"}},
    {"fp8_584-parts-length-zero", {"late", "random:6"}},
    {"bf16_576-parts-nothing", {"eager"}},
    {"fp8_656-flash-mla-lse", {"late"}},
    {"fp8_656-flash-mla-lse-k2048", {"random:1"}, 4},
    {"fp8_584-flash-mla-lse-batch", {"late"}, 3},
    {"bf16_576-flash-mla-lse-batch", {"random:2"}, 12},
    {"fp8_576-paged-flash-mla-lse", {"random:5"}},
    {"fp8_656-h192", {"late"}},
    {"bf16_512-h192", {"random:1"}},
    {"fp8_656-paged-sq3", {"late", "random:2"}},
    {"bf16_576-paged-scattered", {"random:3"}},
    {"fp8_656-paged-length-out-of-range", {"random:4"}},
    {"bf16_576-paged-length-for-all-queries", {"random:3"}},
    {"bf16_576-paged-h128-batch", {"random:5"}},
    {"bf16_576-paged-no-block", {"eager"}},
    {"bf16_576-paged-block3", {"random:6"}},
    {"bf16_576-paged-long", {"random:2"}, 36},
    {"fp8_576-paged-sq3", {"late", "random:3"}},
    {"fp8_576-paged-h128-batch", {"random:4"}},
    {"fp8_576-paged-negative-q-scale", {"random:1"}, 36},
    {"fp8_656-k2048-batch", {"late"}, 6},
    {"fp8_656-k512", {"late"}, 1},
    {"fp8_584-h200-invariant", {"random:2"}, 16},
    {"bf16_576-extra-large", {"random:3"}, 20},
};
const std::vector<PassingCase> kThoroughCases = joined({
    under(kMany, "fp8_656-h128", "fp8_584-h96", "bf16_576-h128", "fp8_656-k0", "fp8_656-k100",
          "fp8_656-k512", "fp8_584-k2048", "fp8_656-extra-large", "fp8_584-extra-sq2-length",
          "bf16_512-extra-length-query", "fp8_656-sink-mixed-nothing",
          "fp8_656-length-out-of-range", "fp8_584-wide", "fp8_656-block1", "fp8_656-odd-scales-h64",
          "fp8_656-odd-scales-h128", "fp8_656-h128-length-batch", "fp8_584-h128-length-batch",
          "fp8_584-k2048-batch", "bf16_576-sq3-length-batch", "fp8_656-parts-h65",
          "fp8_656-parts-h1-length", "fp8_584-parts-nothing", "bf16_512-parts-length-one",
          "fp8_656-h300-extra", "fp8_584-h200-invariant", "fp8_656-paged", "fp8_656-paged-block3",
          "bf16_576-paged-block128", "bf16_576-paged-h70-ragged-batch",
          "fp8_656-paged-h70-ragged-batch", "bf16_576-paged-wide", "fp8_656-paged-reversed",
          "fp8_576-paged-scattered", "fp8_576-paged-block3", "fp8_576-paged-block128",
          "fp8_576-paged-length-query", "fp8_576-paged-h70-ragged-batch",
          "fp8_576-paged-kv-scale-batch", "fp8_576-paged-no-scale", "fp8_576-paged-wide"),
    {{"fp8_656-parts-invariant-h100", kMany, 16},
     {"bf16_512-h200-invariant", {"late", "random:3"}, 16},
     {"bf16_576-paged-length-query", kMany, 36},
     {"bf16_576-paged-long", kMany, 36},
     {"fp8_656-paged-long", kMany, 36},
     {"fp8_576-paged-long", kMany, 36},
     {"fp8_656-h128-k512", kMany, 36},
     {"fp8_584-parts-invariant-h100", kMany, 36},
     {"fp8_656-paged-wide", kMany, 36},
     {"fp8_584-h128-k512", kMany, 8},
     {"bf16_576-k2048", kMany, 12}},
});

constexpr const char* kRows = "decode_rows_sm90.cuh";
constexpr const char* kTurn = "decode_turn_sm90.cuh";
constexpr const char* kKernel = "decode_sm90.cuh";
constexpr const char* kLogits = "decode_logits_sm90.cuh";
constexpr const char* kConsumers = "attention_sm90.cuh";
const std::vector<std::string> kBugSchedules = {"eager", "late", "random:1", "random:2"};

// In fp8_656-k512 every slot is used again: 8 tiles a query, all in one block.
PlantedBug bug(const char* name, const char* text, Action action, std::int64_t addend = 0,
               int below = 0) {
  return {name,
          "fp8_656-k512",
          {.file = kRows, .text = text, .action = action, .addend = addend, .below = below},
          kBugSchedules,
          {},
          1};
}
// In a case of several items a block.
PlantedBug in_items(PlantedBug bug) {
  bug.of_case = "fp8_656-extra-sq2-length";
  return bug;
}
PlantedBug of_consumers(PlantedBug bug) {
  bug.plant.file = kConsumers;
  return bug;
}
PlantedBug of_turn(PlantedBug bug) {
  bug.plant.file = kTurn;
  return bug;
}
PlantedBug of_logits(PlantedBug bug) {
  bug.plant.file = kLogits;
  return bug;
}
PlantedBug of_kernel(PlantedBug bug) {
  bug.plant.file = kKernel;
  return bug;
}

// Of one query in 4 parts.
const BugsOf merge_few{"decode_merge_sm90.cuh", "fp8_656-k2048-batch", 3};
// Of one query in 7 parts; in 33, of which 16 are merged at a time.
const BugsOf merge{"decode_merge_sm90.cuh", "fp8_656-k2048-batch", 6},
    merge_many{"decode_merge_sm90.cuh", "fp8_656-k2048-batch", 33};

// Of blocks side by side: four of 8 tiles each, then one a tile, then four of 128 columns, whose
// stages are used four times.
const BugsOf logits_of_chain{kLogits, "fp8_656-k2048", 4};
const BugsOf consumers_of_chain{kConsumers, "fp8_656-k2048", 4};
const BugsOf chain{"decode_chain_sm90.cuh", "fp8_656-k2048", 4};

// Of consumers with orders of their own: 20 tiles a query, whose slots are used again.
const BugsOf orders{kKernel, "bf16_576-paged-h128-batch"};

// Of rows that are in f8 from end to end: the last group of a tile has further arrivals.
const BugsOf turn576{kTurn, "fp8_576-paged-h128-batch"},
    consumers576{kConsumers, "fp8_576-paged-h128-batch"};

constexpr const char* kMergeBegins = "head = blockIdx.x % heads, head_block = head / kHeads;";
const std::vector<PlantedBug> kQuickBugs = {
    saying("proxy fence: wgmma",
           of_logits(bug("NoProxyFence", "CacheFormat::bf16) fence_proxy_async", drop))),
    race(of_turn(bug("NoWaitForLandedRows", "shared.landed()[slot][group].wait", drop))),
    in_one_schedule(race(merge_few("MergeFewBeforeTheParts",
                                   "first_head = blockIdx.x % blocks * kFewHeads,", drop, 0, 4))),
    in_one_schedule(race(merge("MergeBeforeTheParts", kMergeBegins, drop, 0, 3))),
    in_one_schedule(race(
        chain("WeightsBeforeTheLogits", "wait_for_kernel_before();  // for the logits", drop))),
    in_one_schedule(race(
        chain("ValuesBeforeTheWeights", "wait_for_kernel_before();  // only the weights", drop))),
    in_one_schedule(
        of_consumers(bug("CountOfEmptyTooSmall", "shared.empty()[slot][group].init", add, -1))),
    in_one_schedule(consumers_of_chain("CountOfEmptyLogitRowsTooSmall",
                                       "shared.empty()[slot][group].init", add, -1)),
    in_one_schedule(
        consumers576("CountOfFullOf576TooSmall", "shared.full()[slot][group].init", add, -1)),
    race(turn576("NoWaitForLandedRowsOf576", "shared.landed()[slot][group].wait", drop)),
    in_one_schedule(chain("CountOfEmptyValuesTooSmall", "shared.empty()[at].init", add, -1)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    turn576("NoUpperValuesOf576", "st_shared(to + turned_[1]", drop),
    turn576("SwappedPhaseOfLandedRowsOf576", "shared.landed()[slot][group].wait", add, 1),
    turn576("NoArrivalOfValuesOf576", "full()[slot][group].arrive_warp", drop),
    orders("EarlyReleaseOfTheFirstHalf", "wgmma_wait<1>();  // the first half", drop),
    orders("EarlyReleaseOfTheSecondHalf", "wgmma_wait<1>();  // the second half", drop),
    saying("setmaxnreg: ",
           of_kernel(bug("TooManyRegisters", "setmaxnreg_dec<kBringRegisters", add, 8))),
    of_consumers(bug("NoWaitForEmptySlot", "shared.empty()[kSlot][group].wait", drop)),
    of_consumers(bug("SwappedPhaseOfSlots", "shared.empty()[kSlot][group].wait", add, 1)),
    of_turn(bug("SwappedPhaseOfLandedRows", "shared.landed()[slot][group].wait", add, 1)),
    of_consumers(bug("NoArrivalOfCopies", "landed[group].arrive_cp_async", drop)),
    bug("NoArrivalOfRelease", "landed[group].arrive()", drop),
    bug("CountOfLandedTooSmall", "shared.landed()[slot][group].init", add, -1),
    bug("NoScales", "cp_async_zfill<128>(to + 16", drop),
    bug("ScalesElsewhere", "cp_async_zfill<128>(to + 16", add, 16),
    of_turn(bug("NoArrivalOfValues", "full()[slot][group].arrive_warp", drop)),
    of_turn(bug("ValuesElsewhere", "st_shared(to + turned_[0]", add, 32)),
    of_turn(bug("NoUpperValues", "st_shared(to + turned_[1]", drop)),
    of_turn(bug("LateValues", "st_shared(to + turned_[0]", delay)),
    race(of_turn(bug("ValuesStoredTooEarly", "__syncwarp();  // all lanes", drop))),
    in_items(of_consumers(bug("NoMask", "shared.mask()[kSlot].store", drop))),
    in_items(bug("SwappedPhaseOfQueries", "shared.q_free().wait", add, 1)),
    saying("mbarrier: ", of_kernel(bug("NoInitFence", "fence_mbarrier_init();", drop))),
    of_kernel(bug("NoBarrierAfterInit", "__syncthreads();  // the barriers", drop)),
    in_items(of_consumers(bug("CountOfQFreeTooLarge", "shared.q_free().init", add, 1))),
    of_consumers(bug("CountOfFullTooSmall", "shared.full()[slot][group].init", add, -1)),
    in_items(of_logits(bug("NoWaitForQueries", "shared.q_full()[group].wait", drop))),
    in_items(of_logits(bug("SwappedPhaseOfQueriesThere", "shared.q_full()[group].wait", add, 1))),
    in_items(of_kernel(bug("NoReleaseOfQueries", "if (tile + 2 >= tiles) shared.q_free()", drop))),
    in_items(race(bug("QueriesReplacedTooEarly", "shared.q_free().wait", drop))),
    race(merge("MergeBeforeTheSumsAreThere", "staged[quarter][1][eighth] =", drop, 0, 1)),
    merge("MergeWithWeightsOfTheLane", "__shfl_sync(kFullWarp, scaled, static_cast<int>(", drop),
    merge("MergeWithWeightsOfTheNextPart",
          "__shfl_sync(kFullWarp, scaled, static_cast<int>(quarter +", add, 1),
    merge.undo("MergeOfSumsNotStaged", "staged[quarter][0][eighth] ="),
    merge.move("MergeOfSumsOfTheNextThread", "staged[quarter][1][eighth] =", 16),
    merge.undo("MergedRowsNotStored", "*reinterpret_cast<std::uint32_t*>(params.out.at("),
    merge.move("MergedRowsOfTheNextColumns", "*reinterpret_cast<std::uint32_t*>(params.out.at(", 4),
    in_one_schedule(merge_many("MergeManyWithWeightsOfTheLane",
                               "__shfl_sync(kFullWarp, scaled, static_cast<int>(quarter +", drop)),
    in_one_schedule(merge_many("MergeManyBeforeTheParts", kMergeBegins, drop, 0, 3)),
    of_logits(bug("NoWaitForRows", "shared.full()[consumer][kGroup].wait", drop)),
    of_consumers(bug("EarlyRelease", "wgmma_wait<1 + kBehind>", drop)),
    logits_of_chain.undo("LogitsNotStored", "logits[128 * k + thread] ="),
    logits_of_chain.move("LogitsOfTheNextThread", "logits[128 * k + thread] =", 16),
    logits_of_chain("EarlyReleaseOfLogitRows", "wgmma_wait<0>();", add, 1),
    consumers_of_chain("NoReleaseOfLogitRows", "shared.empty()[slot][kGroup].arrive_warp", drop),
    race(chain("WeightsOverLogits", "__syncthreads();  // all threads have read", drop)),
    chain.move("WeightsOfTheNextColumns", "*reinterpret_cast<uint4*>(place + chunk_offset", 16),
    chain.undo("ReferencesNotStored", "references[row + 8 * r] ="),
    chain.move("SumsOfTheNextThread", "sums[thread] =", 8),
    chain("NoWaitForEmptyValues", "shared.empty()[at].wait(stage.parity() ^ 1, \"values\"", drop),
    chain("NoWaitForEmptyWeights", "shared.empty()[at].wait(stage.parity() ^ 1, \"weights\"", drop),
    chain("NoWaitForWeights", "shared.weights_full()[at].wait", drop),
    chain("SwappedPhaseOfWeights", "shared.weights_full()[at].wait", add, 1),
    chain("FewerBytesOfWeights", "full.arrive_expect", add, -16),
    chain("NoWaitForValues", "shared.values_full()[at].wait", drop),
    chain("NoArrivalOfTurnedValues", "shared.values_full()[at].arrive_warp", drop),
    chain("NoWaitForLandedValues", "shared.landed()[at].wait", drop),
    chain("NoArrivalOfLandedValues", "shared.landed()[at].arrive_cp_async", drop),
    saying("proxy fence: wgmma",
           chain("NoProxyFenceOfValues", "CacheFormat::bf16) fence_proxy_async", drop)),
    chain("EarlyReleaseOfValues", "wgmma_wait<0>();", add, 1),
    chain("NoReleaseOfValues", "shared.empty()[at].arrive_warp", drop),
    saying("mbarrier: ", chain("NoInitFenceOfValues", "fence_mbarrier_init();", drop)),
};

constexpr Device kGpu{DeviceType::cuda, 0};

void run(DecodeArgs args) {
  Tensor workspace(DType::u8, {decode_workspace_bytes(args)}, kGpu);
  args.workspace = workspace;
  decode(args);
}

// That a call for some of the queries or heads of another one gives these the same bits.
void expect_same(DecodeArgs some, const TensorView& expected, const TensorView& expected_lse,
                 const std::string& what) {
  const auto like = [](const TensorView& view) {
    return testing::on(
        kGpu, testing::make_output(view.dtype(), {view.shape().begin(), view.shape().end()},
                                   Layout::dense));
  };
  const StridedTensor out = like(expected), lse = like(expected_lse);
  some.out = out.view;
  some.lse = lse.view;
  run(some);
  EXPECT_EQ(testing::read(testing::on({}, out).view), testing::read(expected)) << what;
  EXPECT_EQ(testing::read(testing::on({}, lse).view), testing::read(expected_lse)) << what;
}

// With batch_invariant it must not show whether one block has all of a query, or many work on it
// side by side, and how many.
void expect_same_chain(DecodeCase shape, std::initializer_list<int> multiprocessors) {
  simulator::settings().schedule = simulator::parse_schedule("random:6");
  simulator::settings().multiprocessors = 2;
  shape.lengths = Lengths::ragged;
  const DecodeStep all = DecodeStep(shape).on(kGpu);
  run(all.args());
  const StridedTensor together = testing::on({}, all.out), lse = testing::on({}, all.lse);
  for (const int count : multiprocessors) {
    simulator::settings().multiprocessors = count;
    expect_same(all.args(), together.view, lse.view,
                shape.name + testing::numbered(", multiprocessors ", count));
  }
  for (std::int64_t i = 0; i < shape.b; ++i) {
    DecodeArgs args = all.args();
    for (ConstTensorView* view : {&args.q, &args.indices, &args.topk_length, &args.extra_indices,
                                  &args.extra_topk_length}) {
      if (view->present()) *view = view->slice(0, i, i + 1);
    }
    expect_same(args, together.view.slice(0, i, i + 1), lse.view.slice(0, i, i + 1),
                shape.name + testing::numbered(", sequence ", i));
  }
  simulator::settings().multiprocessors = 2;
}

// Where the rows of the second cache begin, and in which slot, hangs on the lengths.
const DecodeCase kChain = {
    .name = "chain", .b = 3, .h_q = 9, .topk = 740, .blocks = 12, .extra_topk = 40};

// Several queries in one launch with a segment of one tile or more for each block, in blocks of
// two chunks of columns; one query with blocks of one chunk.
TEST(SimulatorDecodeChain, DoesNotChangeTheBits) {
  using namespace decode_sm90_detail;
  ASSERT_FALSE(works_side_by_side(13, 3, 2));
  ASSERT_TRUE(works_side_by_side(13, 3, 36) && chain_split(13, 3, 1, 36).column_blocks == 8);
  ASSERT_TRUE(works_side_by_side(13, 3, 12) && chain_split(13, 3, 1, 12).column_blocks == 4);
  ASSERT_EQ(chain_split(13, 1, 1, 36).segment_tiles, 1);
  expect_same_chain(kChain, {36});
}

TEST(ThoroughDecodeChain, DoesNotChangeTheBits) {
  expect_same_chain(kChain, {16, 36});
  expect_same_chain({.name = "chain-two",
                     .format = CacheFormat::bf16,
                     .b = 4,
                     .h_q = 5,
                     .topk = 520,
                     .blocks = 18,
                     .extra_topk = 130,
                     .extra_blocks = 5,
                     .sink = Sink::finite},
                    {16, 36});
  expect_same_chain({.name = "chain-narrow",
                     .format = CacheFormat::bf16,
                     .columns = 512,
                     .b = 2,
                     .h_q = 17,
                     .topk = 700,
                     .blocks = 18,
                     .choice = Choice::scattered,
                     .logits = 30},
                    {16, 36});
  expect_same_chain({.name = "chain-heads",
                     .format = CacheFormat::fp8_584,
                     .b = 2,
                     .h_q = 66,
                     .topk = 1990,
                     .blocks = 32,
                     .sink = Sink::mixed,
                     .logits = 30},
                    {16, 36});
}

// Nor do further blocks of 64 heads.
TEST(SimulatorDecodeHeads, DoNotChangeTheBitsOfOthers) {
  simulator::settings().schedule = simulator::parse_schedule("random:7");
  const DecodeStep all =
      DecodeStep(
          {.name = "heads", .b = 1, .h_q = 130, .topk = 460, .blocks = 8, .sink = Sink::finite})
          .on(kGpu);
  run(all.args());
  const StridedTensor together = testing::on({}, all.out), lse = testing::on({}, all.lse);
  for (const std::int64_t first : {0, 60, 128}) {
    const std::int64_t end = std::min<std::int64_t>(first + 64, 130);
    DecodeArgs args = all.args();
    args.q = args.q.slice(2, first, end);
    args.attn_sink = args.attn_sink.slice(0, first, end);
    expect_same(args, together.view.slice(2, first, end), lse.view.slice(2, first, end),
                testing::numbered("heads from ", first));
  }
}

// One query of five blocks of heads, in more parts than merge_few_kernel() takes.
TEST(SimulatorDecodeHeads, OfManyBlocksInManyParts) {
  ASSERT_EQ(
      decode_sm90_detail::fastest_split(10, 1, decode_sm90_detail::resident_groups(5, 36)).groups,
      5);
  simulator::expect_passes(decode_operation(), {"fp8_656-h300-batch", {"late"}, 36});
}
TEST(ThoroughDecodeHeads, OfManyBlocksInManyParts) {
  simulator::expect_passes(decode_operation(), {"fp8_656-h300-batch", {"eager", "random:8"}, 36});
}

// On tensors that are only described.
TEST(SimulatorDecodeHeads, AsManyAsTheKernelsCount) {
  const auto ask = [](std::int64_t b, std::int64_t h_q, std::int64_t topk) {
    const auto view = [](DType type, std::initializer_list<std::int64_t> shape) {
      return TensorView(reinterpret_cast<void*>(4096), type, shape, kGpu);
    };
    const DecodeArgs args{.q = view(DType::bf16, {b, 1, h_q, 576}),
                          .cache = view(DType::u8, {6, 64, 1, 656}),
                          .indices = view(DType::i32, {b, 1, topk}),
                          .out = view(DType::bf16, {b, 1, h_q, 512})};
    decode(args, {.dry_run = true});
  };
  constexpr std::int64_t kLimit = std::int64_t{1} << 23, kMostRows = std::int64_t{1} << 30;
  ask(kLimit, 128, kLimit);
  ask(1, kMostRows, 1);
  ask(0, kMostRows, 1);
  const auto refused = [&](std::int64_t b, std::int64_t h_q, std::int64_t topk,
                           const std::string& sizes) {
    testing::expect_error([&] { ask(b, h_q, topk); }, ErrorCode::unsupported,
                          "sparse_mla::decode: sm90: want topk, extra_topk and b * s_q up to 2^23, "
                          "and b * s_q * h_q up to 2^30, got " +
                              sizes);
  };
  refused(1, 1, kLimit + 1, "topk 8388609, extra_topk 0, b 1, s_q 1, h_q 1");
  refused(kLimit + 1, 1, 1, "topk 1, extra_topk 0, b 8388609, s_q 1, h_q 1");
  refused(kLimit, 129, 1, "topk 1, extra_topk 0, b 8388608, s_q 1, h_q 129");
  refused(1, kMostRows + 1, 1, "topk 1, extra_topk 0, b 1, s_q 1, h_q 1073741825");
}

// A part's sum beyond f32 must not take the bits of the other columns, which share its power of
// two.
TEST(SimulatorDecodeSplit, AnInfiniteSumStaysInItsColumn) {
  simulator::settings().schedule = simulator::parse_schedule("eager");
  simulator::settings().multiprocessors = 8;
  constexpr std::int64_t kColumn = 7;
  const auto run_with = [&](float value) {
    DecodeStep step({.name = "infinite",
                     .format = CacheFormat::bf16,
                     .b = 1,
                     .topk = 460,
                     .blocks = 8,
                     .poison = false,
                     .batch_invariant = false});
    for (std::int64_t h = 0; h < 8; ++h) step.q.view.at<BFloat16>(0, 0, h, kColumn) = {};
    for (std::int64_t block = 0; block < 8; ++block) {
      for (std::int64_t row = 0; row < 64; ++row) {
        step.chosen.cache.view.at<BFloat16>(block, row, 0, kColumn) = BFloat16(value);
      }
    }
    const DecodeStep there = step.on(kGpu);
    EXPECT_GT(decode_workspace_bytes(there.args()), 0) << "there are no parts";
    run(there.args());
    return testing::on({}, there.out);
  };
  const StridedTensor large = run_with(3e38f), small = run_with(1.0f);
  simulator::settings().multiprocessors = 2;
  for (std::int64_t h = 0; h < 8; ++h) {
    EXPECT_EQ(static_cast<float>(small.view.at<BFloat16>(0, 0, h, kColumn)), 1.0f);
    EXPECT_TRUE(std::isinf(static_cast<float>(large.view.at<BFloat16>(0, 0, h, kColumn))));
    for (std::int64_t c = 0; c < 512; ++c) {
      if (c == kColumn) continue;
      EXPECT_EQ(large.view.at<BFloat16>(0, 0, h, c).bits, small.view.at<BFloat16>(0, 0, h, c).bits)
          << "head " << h << ", column " << c;
    }
  }
}

WINNOW_SIMULATOR_TESTS(SimulatorDecode, decode_operation(), kQuickCases, kThoroughCases, kQuickBugs,
                       kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
