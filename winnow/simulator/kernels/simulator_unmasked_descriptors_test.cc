// sparse_mla::backward of sm100, built with descriptors that keep an address as it is in one of its
// kernels at a time. In a cluster it has more than the 18 bits that they have room for.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/grid.h"
#include "winnow/simulator/launch.h"
#include "winnow/testing/operation.h"

namespace winnow::simulator {
namespace {

std::vector<std::int64_t> launches;  // those that have made descriptors, in this order
std::size_t unmasked = 0;            // the number among them of the one that keeps all bits

}  // namespace

// The sources that are compiled for this test ask for it.
std::uint32_t kept_bits() {
  const std::int64_t running = cluster->run->number;
  const auto found = std::find(launches.begin(), launches.end(), running);
  const auto number = static_cast<std::size_t>(found - launches.begin());
  if (found == launches.end()) launches.push_back(running);
  return number == unmasked ? ~0u : 0x3ffffu;
}

}  // namespace winnow::simulator

namespace winnow::sparse_mla {

testing::Operation backward_operation(std::int64_t most_queries);

namespace {

TEST(SimulatorUnmaskedDescriptors, AreFoundInEachKernel) {
  simulator::settings().compute_capability = 100;
  RunOptions forced;
  forced.backend = Backend::sm100;
  const testing::Operation operation = backward_operation(4);
  for (const std::string name : {"bf16-d512-h16-k100", "bf16-h128"}) {
    const auto one = std::find_if(operation.cases.begin(), operation.cases.end(),
                                  [&](const testing::Case& of) { return of.name == name; });
    ASSERT_NE(one, operation.cases.end()) << name;
    constexpr std::size_t kKernels = 3;  // scores, dq, dkv
    for (simulator::unmasked = 0; simulator::unmasked < kKernels; ++simulator::unmasked) {
      simulator::launches.clear();
      std::string report;
      try {
        one->run({DeviceType::cuda, forced});
      } catch (const simulator::Failure& failure) {
        report = failure.what();
      }
      EXPECT_THAT(report, ::testing::HasSubstr("matrix descriptor: bit 15 is set")) << name;
      EXPECT_EQ(simulator::launches.size(), simulator::unmasked + 1) << name;
    }
  }
}

}  // namespace
}  // namespace winnow::sparse_mla
