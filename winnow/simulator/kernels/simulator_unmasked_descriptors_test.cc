// sparse_mla::backward of sm100, built with descriptors that keep an address as it is. In a cluster
// it has more than the 18 bits that they have room for.
#include <gmock/gmock.h>

#include "winnow/simulator/launch.h"
#include "winnow/testing/operation.h"

namespace winnow::sparse_mla {

testing::Operation backward_operation(std::int64_t most_queries);

namespace {

TEST(SimulatorUnmaskedDescriptors, AreFound) {
  simulator::settings().compute_capability = 100;
  RunOptions forced;
  forced.backend = Backend::sm100;
  int found = 0;
  for (const testing::Case& one : backward_operation(64).cases) {
    if (one.name != "bf16-d512-h16-k100" && one.name != "bf16-h128") continue;
    try {
      one.run({DeviceType::cuda, forced});
    } catch (const simulator::Failure& failure) {
      EXPECT_THAT(failure.what(), ::testing::HasSubstr("matrix descriptor: bit 15 is set"));
      ++found;
    }
  }
  EXPECT_EQ(found, 2);
}

}  // namespace
}  // namespace winnow::sparse_mla
