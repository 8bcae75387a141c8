// sparse_mla::store of CUDA in the simulator.
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>

#include "winnow/simulator/testing/simulate.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"

namespace winnow::sparse_mla {

testing::Operation store_operation();

namespace {

using simulator::PassingCase;

const std::vector<PassingCase> kQuickCases = {
    {"fp8_656-rows", {"eager", "random:1"}}, {"fp8_584-rows", {"random:2"}},
    {"bf16_576-skipped", {"random:3"}},      {"bf16_512-i32-slots", {"eager"}},
    {"fp8_584-block3", {"eager"}},           {"fp8_584-table", {"random:1"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"fp8_656-whole-cache", {"random:4"}}, {"fp8_584-whole-cache", {"random:4"}},
    {"fp8_656-wide", {"random:5"}},        {"fp8_584-reversed", {"random:5"}},
    {"fp8_656-table", {"random:6"}},
};
// Of several rows with the same slot the last one stays, whether slots are compared or a table says
// which it is: the cache contains what the last rows alone leave there.
TEST(SimulatorStoreAgain, KeepsTheLastRow) {
  constexpr Device kGpu{DeviceType::cuda, 0};
  constexpr std::int64_t kSlots = 128;
  for (const std::int64_t n : {300, 1100}) {
    simulator::settings().schedule = simulator::parse_schedule("random:2");
    testing::Random random(7);
    Tensor rows(DType::bf16, {n, 512}), slots(DType::i32, {n}), last(DType::i32, {n});
    testing::fill_normal(rows, random);
    std::vector<std::int64_t> last_row(kSlots, -1);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t slot = random.below(kSlots);
      slots.view().at<std::int32_t>(i) = static_cast<std::int32_t>(slot);
      last_row[static_cast<std::size_t>(slot)] = i;
    }
    testing::fill_unwritten(last);  // all bits set: -1
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      const std::int64_t row = last_row[static_cast<std::size_t>(slot)];
      if (row >= 0) last.view().at<std::int32_t>(row) = static_cast<std::int32_t>(slot);
    }
    const Tensor rows_there = rows.to(kGpu);
    const auto stored = [&](const Tensor& at) {
      const Tensor slots_there = at.to(kGpu);
      Tensor cache(DType::bf16, {2, kSlots / 2, 1, 512}, kGpu);  // NaN until it is written
      StoreArgs args{
          .rows = rows_there, .slots = slots_there, .format = CacheFormat::bf16, .cache = cache};
      Tensor workspace(DType::u8, {store_workspace_bytes(args)}, kGpu);
      args.workspace = workspace;
      store(args);
      return testing::read(cache.to({}));
    };
    EXPECT_THAT(stored(slots),
                ::testing::Pointwise(::testing::NanSensitiveDoubleEq(), stored(last)))
        << n << " rows";
  }
}

class SimulatorStore : public ::testing::TestWithParam<PassingCase> {};
// Its warps share nothing, so there are no bugs of order to plant.
TEST_P(SimulatorStore, Passes) { simulator::expect_passes(store_operation(), GetParam()); }
constexpr auto kNameOf = [](const auto& info) { return simulator::test_name(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Smallest, SimulatorStore,
                         ::testing::Values(simulator::smallest(kQuickCases)), kNameOf);
INSTANTIATE_TEST_SUITE_P(Quick, SimulatorStore, ::testing::ValuesIn(kQuickCases), kNameOf);
INSTANTIATE_TEST_SUITE_P(Thorough, SimulatorStore, ::testing::ValuesIn(kThoroughCases), kNameOf);

}  // namespace
}  // namespace winnow::sparse_mla
