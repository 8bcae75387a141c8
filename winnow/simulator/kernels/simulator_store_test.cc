// sparse_mla::store of CUDA in the simulator.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "winnow/simulator/testing/simulate.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/strided.h"
#include "winnow/testing/table.h"

namespace winnow::sparse_mla {

testing::Operation store_operation();

namespace {

using simulator::BugsOf;
using simulator::in_one_schedule;
using simulator::of_argument;
using simulator::of_threads;
using simulator::PassingCase;
using simulator::PlantedBug;
using simulator::saying;
using enum simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"fp8_656-rows", {"eager", "random:1"}},
    {"fp8_584-rows", {"random:2"}},
    {"bf16_576-skipped", {"random:3"}},
    {"bf16_512-i32-slots", {"eager"}},
    {"fp8_584-block3", {"eager"}},
    {"fp8_584-table", {"random:1"}},
    {"again300", {"random:2"}},
    {"again1100", {"random:2"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"fp8_656-whole-cache", {"random:4"}}, {"fp8_584-whole-cache", {"random:4"}},
    {"fp8_656-wide", {"random:5"}},        {"fp8_584-reversed", {"random:5"}},
    {"fp8_656-table", {"random:6"}},       {"again1101", {"random:7"}},
};
// Of several rows with the same slot the last one stays, whether slots are compared or a table says
// which it is, whatever that held before.
testing::CaseOutcome store_again(std::int64_t n, std::int64_t all_slots) {
  constexpr Device kGpu{DeviceType::cuda, 0};
  constexpr std::int64_t kColumns = 512;
  testing::Random random(7);
  Tensor rows(DType::bf16, {n, kColumns}), slots(DType::i32, {n});
  Tensor expected(DType::bf16, {2, all_slots / 2, 1, kColumns});
  testing::fill_normal(rows, random);
  const auto row_of = [](Tensor& tensor, std::int64_t row) {
    return static_cast<BFloat16*>(tensor.data()) + row * kColumns;
  };
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t slot = random.below(all_slots);
    slots.view().at<std::int32_t>(i) = static_cast<std::int32_t>(slot);
    std::copy_n(row_of(rows, i), kColumns, row_of(expected, slot));
  }
  const Tensor rows_there = rows.to(kGpu), slots_there = slots.to(kGpu);
  Tensor cache(DType::bf16, {2, all_slots / 2, 1, kColumns}, kGpu);
  StoreArgs args{
      .rows = rows_there, .slots = slots_there, .format = CacheFormat::bf16, .cache = cache};
  Tensor unwritten(DType::u8, {store_workspace_bytes(args)});
  testing::fill_unwritten(unwritten);
  Tensor workspace = unwritten.to(kGpu);
  args.workspace = workspace;
  store(args);
  testing::CaseOutcome outcome;
  testing::compare_bytes(outcome, "cache", cache.to({}), expected);
  return outcome;
}

testing::Operation store_and_again() {
  testing::Operation operation = store_operation();
  // In the last one most slots have one row, and a word of the table that nobody else writes.
  for (const auto& [n, slots] : {std::pair(300, 128), {1100, 128}, {1101, 2048}}) {
    operation.cases.push_back(
        {testing::numbered("again", n), "",
         [n = n, slots = slots](const testing::Target&) { return store_again(n, slots); }, true});
  }
  return operation;
}

const BugsOf kernel{"store_cuda.cu", "fp8_656-rows"}, table{"store_cuda.cu", "again1100"},
    compared{"store_cuda.cu", "again300"};
const BugsOf wide{"write_row.cuh", "fp8_656-rows"}, narrow{"write_row.cuh", "fp8_584-rows"},
    brain{"write_row.cuh", "bf16_576-skipped"};
const BugsOf unique{"store_cuda.cu", "again1101"};
constexpr std::size_t kSlots = 24, kLastRows = 48;  // in the parameters
// Where blocks run in turn, the last row is named last.
PlantedBug out_of_order(PlantedBug bug) {
  bug.schedules = {"random:3", "starved:0"};
  return bug;
}
constexpr const char* kName = "name_rows(const __grid_constant__";
constexpr const char* kRaise = "raise_rows(const __grid_constant__";
constexpr const char* kStore = "store_kernel(const __grid_constant__";
constexpr const char* kNamed = "static_cast<volatile std::uint32_t*>(p.last_rows)[slot] =";
constexpr const char* kF8 = "*reinterpret_cast<Share<std::uint8_t, 2 * kCount>*>(row + column) =";
constexpr const char* kLargest = "largest = max(largest, __shfl_xor_sync(";
const std::vector<PlantedBug> kQuickBugs = {
    in_one_schedule(compared("LaterRowsOfTheLane", "return !__any_sync(", drop)),
    narrow.undo("NoPadding", "scales[Row::kGroups] = 0;"),
    in_one_schedule(race(table("RowsRaisedByPlainStores", "atomicMax(p.last_rows + slot", weaken))),
};
const std::vector<PlantedBug> kThoroughBugs = {
    kernel("SlotOfTheLane", "const std::int64_t slot = __shfl_sync(", drop),
    kernel("SlotOfTheNextLane", "const std::int64_t slot = __shfl_sync(", add, 1),
    table.undo("RowsNotNamed", kNamed),
    table.move("RowsNamedInTheNextSlot", kNamed, 4),
    in_one_schedule(table("NamesOfTheNextBlock", kName, shift_block, 1)),
    race(in_one_schedule(table("NamesAside", kName, launch_astray))),
    race(in_one_schedule(table("RowsRaisedAside", kRaise, launch_astray))),
    in_one_schedule(unique("NamesOfOneBlockLess", kName, launch_blocks, -1)),
    in_one_schedule(unique("NamesOfOneWarpLess", kName, launch_threads, -32)),
    in_one_schedule(of_argument(0, unique("NamesOfOneRowLess", kName, launch_argument, -1), 0,
                                sizeof(std::int64_t))),
    in_one_schedule(of_argument(0, table("NamesInTheTableOfTheNextSlot", kName, launch_argument, 4),
                                kLastRows, sizeof(void*))),
    in_one_schedule(of_argument(0, unique("NamesFromTheNextSlot", kName, launch_argument, 8),
                                kSlots, sizeof(void*))),
    of_threads(0, 1, unique.undo("FirstRowsNotNamed", kNamed)),
    of_threads(224, 256, unique.undo("RowsOfTheLastWarpNotNamed", kNamed)),
    out_of_order(table("RaisedOfOneBlockLess", kRaise, launch_blocks, -1)),
    out_of_order(table("RaisedOfOneWarpLess", kRaise, launch_threads, -32)),
    out_of_order(of_argument(0, table("RaisedOfFewerRows", kRaise, launch_argument, -100), 0,
                             sizeof(std::int64_t))),
    in_one_schedule(of_argument(0,
                                table("RaisedInTheTableOfTheNextSlot", kRaise, launch_argument, 4),
                                kLastRows, sizeof(void*))),
    in_one_schedule(of_argument(0, table("RaisedFromTheNextSlot", kRaise, launch_argument, 4),
                                kSlots, sizeof(void*))),
    in_one_schedule(of_argument(0, table("RaisedFromTheSlotBefore", kRaise, launch_argument, -4),
                                kSlots, sizeof(void*))),
    out_of_order(of_threads(
        128, 256, table("RowsOfHalfABlockNotRaised", "atomicMax(p.last_rows + slot", drop))),
    in_one_schedule(
        of_threads(0, 1, table("FirstRowsRaisedTooFar", "atomicMax(p.last_rows + slot", add, 1))),
    in_one_schedule(table("StoreThreadsOneFurther", kStore, shift_thread, 1)),
    in_one_schedule(table("StoreOfOneBlockLess", kStore, launch_blocks, -1)),
    in_one_schedule(table("StoreOfOneWarpLess", kStore, launch_threads, -32)),
    race(in_one_schedule(table("StoreAside", kStore, launch_astray))),
    in_one_schedule(of_argument(0, table("StoreOfOneRowLess", kStore, launch_argument, -1), 0,
                                sizeof(std::int64_t))),
    in_one_schedule(table("LastRowOfTheNextSlot", "return p.last_rows[slot] == ", misread, 4)),
    in_one_schedule(kernel("PiecesOfTheNextLane",
                           "reinterpret_cast<const Piece*>(from + 16 * piece)", misread, 16)),
    out_of_order(table("RowsNotRaised", "atomicMax(p.last_rows + slot", drop)),
    table("RowsRaisedTooFar", "atomicMax(p.last_rows + slot", add, 1),
    wide("LargestOfTheLane", kLargest, drop),
    narrow("LargestOfTheNextLane", kLargest, add, 1),
    wide.undo("F8NotStored", kF8),
    narrow.move("F8OfTheNextLane", kF8, 8),
    wide.undo("ScalesNotStored", "reinterpret_cast<float*>(scales)[column / Row::kGroup] = scale;"),
    narrow.move("ScalesOfTheNextGroup", "scales[column / Row::kGroup] = sparse_mla::", 1),
    wide.undo("RopeNotStored", "*reinterpret_cast<Words*>(row + Row::kRopeOffset"),
    narrow.move("RopeOfTheNextLane", "*reinterpret_cast<Words*>(row + Row::kRopeOffset", 16),
    brain.undo("RowsNotStored", "if (inside) *reinterpret_cast<Words*>(row + 2 * column) = brain;"),
    of_threads(224, 256,
               brain.undo("RowsOfTheLastWarpNotStored",
                          "if (inside) *reinterpret_cast<Words*>(row + 2 * column) =")),
};
WINNOW_SIMULATOR_TESTS(SimulatorStore, store_and_again(), kQuickCases, kThoroughCases, kQuickBugs,
                       kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
