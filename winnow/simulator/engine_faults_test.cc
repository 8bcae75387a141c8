// Each rule that the engine checks, broken by a micro-kernel: the report begins with the check's
// name, and the device can be used further. Rules of single instructions have their tests beside
// them (instructions/).
#include "winnow/simulator/engine_faults.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "winnow/simulator/launch.h"

namespace winnow::engine_faults {
namespace {

class EngineFaults : public ::testing::TestWithParam<Fault> {};

TEST_P(EngineFaults, AreReportedByName) {
  const Fault& fault = GetParam();
  const std::unique_ptr<void, void (*)(void*)> memory(
      simulator::allocate(kFaultWords * sizeof(std::uint32_t)), simulator::free);
  auto* const words = static_cast<std::uint32_t*>(memory.get());
  simulator::settings().multiprocessors = 4;  // which clusters of eight blocks need
  for (const char* const schedule : {"eager", "late", "random:1", "random:2"}) {
    SCOPED_TRACE(schedule);
    simulator::settings().schedule = simulator::parse_schedule(schedule);
    std::memset(words, 0, kFaultWords * sizeof(std::uint32_t));
    std::string check = "none", report;
    try {
      fault.launch(words);
    } catch (const simulator::Failure& failure) {
      check = failure.check();
      report = failure.what();
    }
    EXPECT_EQ(check, fault.check) << report;
    EXPECT_THAT(report, ::testing::StartsWith(fault.check + ": "));
    EXPECT_THAT(report, ::testing::HasSubstr(fault.says));
    words[0] = words[1] = 7;
    launch_faultless(words);
    EXPECT_EQ(words[0], 0u);
    EXPECT_EQ(words[1], 1u);
  }
}

// Of the running thread, and of one that came before.
TEST(EngineReports, NameTheKernels) {
  const std::vector<Fault> all = faults();
  const auto fault = std::find_if(all.begin(), all.end(), [](const Fault& one) {
    return one.name == "EarlyKernelThatLoadsBeforeItsWait";
  });
  ASSERT_NE(fault, all.end());
  const std::unique_ptr<void, void (*)(void*)> words(
      simulator::allocate(kFaultWords * sizeof(std::uint32_t)), simulator::free);
  simulator::settings().schedule = {};
  try {
    fault->launch(static_cast<std::uint32_t*>(words.get()));
    FAIL() << "there was no report";
  } catch (const simulator::Failure& failure) {
    EXPECT_THAT(failure.what(),
                ::testing::ContainsRegex("by thread 1 .* in launch [0-9]+ \\(kernel_before\\)"));
    EXPECT_THAT(failure.what(),
                ::testing::ContainsRegex(
                    "in block 0 of launch [0-9]+ \\(faulty_kernel\\), schedule eager"));
  }
}

TEST(EngineClusters, AreAsLargeAsTheDeviceAndTheKernelAllow) {
  simulator::settings().multiprocessors = 8;
  EXPECT_TRUE(launches_in_cluster(8, false));
  EXPECT_FALSE(launches_in_cluster(9, false));
  EXPECT_TRUE(launches_in_cluster(16, true));
  EXPECT_FALSE(launches_in_cluster(17, true));
  simulator::settings().multiprocessors = 7;
  EXPECT_FALSE(launches_in_cluster(16, true));
  simulator::settings().multiprocessors = 2;
}

INSTANTIATE_TEST_SUITE_P(All, EngineFaults, ::testing::ValuesIn(faults()),
                         [](const auto& fault) { return fault.param.name; });

}  // namespace
}  // namespace winnow::engine_faults
