// The product of mma.sync that is a ceiling of `winnow bench`, in the simulator.
#include <string>
#include <vector>

#include "tools/winnow/testing/mma_product_test.h"

#include "winnow/simulator/testing/simulate.h"

namespace winnow::cli {
namespace {

using simulator::BugsOf;
using simulator::in_one_schedule;
using simulator::PassingCase;
using simulator::PlantedBug;
using simulator::saying;
using enum simulator::Plant::Action;
using Plan = MmaProduct::Plan;

testing::Operation product_operation() {
  testing::Operation operation;
  operation.name = "mma_product";
  const auto add = [&](const std::string& name, Plan plan, const ProductSize& size) {
    const auto run = [plan, size](const testing::Target&) { return compare_product(plan, size); };
    operation.cases.push_back({.name = name, .shape = {}, .run = run, .on_gpu = true});
  };
  add("tensor", Plan::tensor_192x256, {384, 256, 448});
  add("tensor-tail", Plan::tensor_192x256, {512, 256, 320});
  add("tensor-short", Plan::tensor_192x256, {128, 256, 128});
  add("tensor-large", Plan::tensor_192x256, {640, 512, 320});
  add("tensor-long", Plan::tensor_192x256, {384, 512, 576});
  add("threads-256", Plan::threads_128x256, {384, 256, 320});
  add("threads-256-large", Plan::threads_128x256, {640, 512, 320});
  add("threads-128", Plan::threads_128x128, {128, 768, 192});
  add("threads-128-long", Plan::threads_128x128, {384, 512, 448});
  return operation;
}

const std::vector<PassingCase> kQuickCases = {
    {"tensor", {"random:1"}},
    // Each block has a tile and half of the third one, which has rows beyond the last.
    {"tensor-tail", {"random:2"}},
    // More blocks than steps.
    {"tensor-short", {"late"}, 3},
    {"threads-256", {"random:3"}},
    {"threads-128", {"random:4"}, 4},
};
const std::vector<PassingCase> kThoroughCases = {
    {"tensor-large", {"eager", "late"}, 4}, {"tensor-long", {"starved:0", "starved:5"}, 3},
    {"threads-256-large", {"eager"}, 3},    {"threads-256", {"late"}, 4},
    {"threads-128-long", {"starved:3"}, 3},
};

constexpr const char* kProduct = "tools/winnow/mma_product.cuh";
const BugsOf tensor{"tools/winnow/mma_product_sm90.cu", "tensor-tail"},
    of_tensor{kProduct, "tensor-tail"}, threads{"tools/winnow/mma_product.cu", "threads-128", 4},
    of_threads{kProduct, "threads-128", 4};
constexpr const char* kCount = "unsigned* const count = product.steps_of_shared + shared_tile;";

const std::vector<PlantedBug> kQuickBugs = {
    in_one_schedule(race(of_threads("CountedWithoutAFence", kCount, drop, 0, 1))),
    in_one_schedule(
        race(of_threads("LastWithoutAFence", "static_cast<unsigned>(all);", drop, 0, 1))),
    in_one_schedule(race(of_threads("PlainSums", "reduce_add(to + i, d[i]);", weaken))),
    in_one_schedule(
        race(of_tensor("PlainSumsOfFour", "if constexpr (kAddsVectors) {", weaken, 0, 1))),
};
const std::vector<PlantedBug> kThoroughBugs = {
    tensor("NoWaitForFull", "mbarrier_wait(shared_.full()[slot(step)].address", drop),
    tensor("SwappedPhaseOfFull", "mbarrier_wait(shared_.full()[slot(step)].address", add, 1),
    tensor("NoWaitForEmpty", "mbarrier_wait(shared_.empty()[slot(next)].address", drop),
    tensor("TooFewBytes", "mbarrier_arrive_expect(full, kBytes);", add, -16),
    tensor("TooManyBytes", "mbarrier_arrive_expect(full, kBytes);", add, 16),
    tensor("NoCopyOfA", "tensor_load(shared_.a()[slot(step)].address", drop),
    tensor("CopyOfBElsewhere", "tensor_load(shared_.b()[slot(step)].address", add, 1024),
    tensor("CountOfEmpty", "mbarrier_init(shared.empty()[i].address", add, -1),
    tensor("NoRelease", "mbarrier_arrive_warp(shared_.empty()", drop),
    tensor("NoInitFence", "fence_mbarrier_init();", drop),
    of_tensor("NoProducts", "mma_m16n8k16<DType::bf16>(sums[block][2 * square + 1]", drop),
    of_tensor("OtherRows", "ldmatrix_x4(from.a.at(block, slice)", add, 16),
    threads("NoWaitForCopies", "cp_async_wait<S::kStages - 3>();", drop),
    threads("WaitForTheCopiesBefore", "cp_async_wait<S::kStages - 3>();", add, 1),
    threads("NoBarrierBehindCopies", "cp_async_wait<S::kStages - 3>();", drop, 0, 1),
    threads("NoCommit", "cp_async_commit();  // empty groups count, too", drop),
    threads("CopiesElsewhere", "cp_async(address + i * kAtOnce * kTileLine", add, 16),
    of_threads("NoBarrierBehindSums", "bool last = false;", drop, 0, -1),
    of_threads("CountedByPlainStores", "last = atomicAdd(count", weaken),
    of_threads("CountedTwice", "last = atomicAdd(count", add, 1),
    of_threads.undo("SumsNotCleared", "*place(block, n) = make_float4(0, 0, 0, 0);"),
    of_threads.undo("CountNotCleared", "if (last) *count = 0;"),
};

WINNOW_SIMULATOR_TESTS(SimulatorMmaProduct, product_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::cli
