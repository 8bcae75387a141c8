// The product of mma.sync that is a ceiling of `winnow bench`, in the simulator.
#include "tools/winnow/testing/mma_product_test.h"

#include "winnow/simulator/launch.h"

namespace winnow::cli {
namespace {

using Plan = MmaProduct::Plan;

struct Simulated {
  const char* name;
  Plan plan;
  ProductSize size;
  int multiprocessors;
  const char* schedule;
};

class SimulatorMmaProduct : public ::testing::TestWithParam<Simulated> {};

TEST_P(SimulatorMmaProduct, IsRight) {
  const Simulated& one = GetParam();
  simulator::settings().multiprocessors = one.multiprocessors;
  simulator::settings().schedule = simulator::parse_schedule(one.schedule);
  expect_product(one.plan, one.size);
}

const Simulated kQuick[] = {
    {"Tensor", Plan::tensor_192x256, {384, 256, 448}, 2, "random:1"},
    // Each block has a tile and half of the third one, which has rows beyond the last.
    {"TensorTail", Plan::tensor_192x256, {512, 256, 320}, 2, "random:2"},
    // More blocks than steps.
    {"TensorShort", Plan::tensor_192x256, {128, 256, 128}, 3, "late"},
    {"Threads256", Plan::threads_128x256, {384, 256, 320}, 2, "random:3"},
    {"Threads128", Plan::threads_128x128, {128, 768, 192}, 4, "random:4"},
};
const Simulated kThorough[] = {
    {"TensorEager", Plan::tensor_192x256, {640, 512, 320}, 3, "eager"},
    {"TensorLate", Plan::tensor_192x256, {640, 512, 320}, 4, "late"},
    {"TensorLoaderStarved", Plan::tensor_192x256, {384, 512, 576}, 3, "starved:0"},
    {"TensorWarpStarved", Plan::tensor_192x256, {384, 512, 576}, 3, "starved:5"},
    {"ThreadsEager", Plan::threads_128x256, {640, 512, 320}, 3, "eager"},
    {"ThreadsLate", Plan::threads_128x256, {640, 512, 320}, 4, "late"},
    {"ThreadsWarpStarved", Plan::threads_128x128, {384, 512, 448}, 3, "starved:3"},
};

const auto name_of = [](const auto& one) { return std::string(one.param.name); };
INSTANTIATE_TEST_SUITE_P(Quick, SimulatorMmaProduct, ::testing::ValuesIn(kQuick), name_of);
INSTANTIATE_TEST_SUITE_P(Thorough, SimulatorMmaProduct, ::testing::ValuesIn(kThorough), name_of);

}  // namespace
}  // namespace winnow::cli
