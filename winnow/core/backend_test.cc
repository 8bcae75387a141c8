// The list of backends and how a call chooses one.
#include "winnow/core/backend.h"

#include <cstdlib>

#include <gtest/gtest.h>

#include "winnow/core/route.h"
#include "winnow/testing/expect.h"

namespace winnow {
namespace {

constexpr Backend kCpuOnly[] = {Backend::cpu};
constexpr Backend kAll[] = {Backend::sm90, Backend::cuda, Backend::cpu};

class BackendTest : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv("WINNOW_BACKEND");
    unsetenv("WINNOW_CHECK");
  }
  void TearDown() override { SetUp(); }
};

TEST_F(BackendTest, NamesGoBothWays) {
  for (const Backend backend : kAll) EXPECT_EQ(backend_from_string(to_string(backend)), backend);
  testing::expect_error(
      [] { backend_from_string("hopper"); }, ErrorCode::invalid_argument,
      "backend_from_string: name: want one of sm100, sm90, cuda, cpu, got \"hopper\"");
  testing::expect_error(
      [] { backend_from_string("CPU"); }, ErrorCode::invalid_argument,
      "backend_from_string: name: want one of sm100, sm90, cuda, cpu, got \"CPU\"");
}

TEST_F(BackendTest, ListIsInOrderOfPriorityAndHonest) {
  const auto list = backends();
  ASSERT_EQ(list.size(), 4u);
  EXPECT_EQ(list[0].backend, Backend::sm100);
  for (std::size_t n = 0; n < 4; ++n) {
    if (n > 0) {
      EXPECT_EQ(to_string(list[n].backend), to_string(kAll[n - 1]));
    }
    EXPECT_FALSE(list[n].description.empty());
    EXPECT_EQ(list[n].supported, list[n].reason.empty()) << to_string(list[n].backend);
  }
  EXPECT_TRUE(list[3].supported);
  if (gpus().gpus.empty()) {
    EXPECT_FALSE(gpus().reason.empty());
    EXPECT_FALSE(list[0].supported);
    EXPECT_FALSE(list[1].supported);
    EXPECT_FALSE(list[2].supported);
    EXPECT_EQ(list[1].reason, list[2].reason);
  }
}

TEST_F(BackendTest, TensorsOnTheHostGoToTheCpu) {
  EXPECT_EQ(choose_backend("op", {}, {}, kCpuOnly), Backend::cpu);
  EXPECT_EQ(choose_backend("op", {}, {}, kAll), Backend::cpu);
  EXPECT_EQ(choose_backend("op", {}, testing::forced(Backend::cpu), kAll), Backend::cpu);
}

TEST_F(BackendTest, ForcedBackendWithoutTheOperation) {
  testing::expect_error([] { choose_backend("op", {}, testing::forced(Backend::sm90), kCpuOnly); },
                        ErrorCode::unsupported,
                        "op: backend: want one that implements this operation (cpu), got sm90");
  constexpr Backend kSome[] = {Backend::sm100, Backend::sm90, Backend::cpu};
  testing::expect_error([&] { choose_backend("op", {}, testing::forced(Backend::cuda), kSome); },
                        ErrorCode::unsupported,
                        "op: backend: want one that implements this operation (sm100, sm90, cpu), "
                        "got cuda; did you mean sm90?");
}

TEST_F(BackendTest, ForcedBackendThatCannotServeTheTensors) {
  testing::expect_error([] { choose_backend("op", {}, testing::forced(Backend::sm90), kAll); },
                        ErrorCode::invalid_argument,
                        "op: backend: want one that supports tensors on cpu, got sm90");
  testing::expect_error(
      [] { choose_backend("op", {DeviceType::cuda, 0}, testing::forced(Backend::cpu), kAll); },
      ErrorCode::invalid_argument,
      "op: backend: want one that supports tensors on cuda:0, got cpu");
}

TEST_F(BackendTest, GpuTensorsNeverFallBackToTheCpu) {
  const Device gpu{DeviceType::cuda, 0};
  testing::expect_error([&] { choose_backend("op", gpu, {}, kCpuOnly); }, ErrorCode::unsupported,
                        "op: backend: want a backend for tensors on cuda:0, got only cpu");
  if (!gpus().gpus.empty()) return;
  // The message of a machine without a GPU gives the reasons of the list.
  try {
    choose_backend("op", gpu, {}, kAll);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(int(error.code()), int(ErrorCode::unsupported));
    EXPECT_NE(std::string(error.what()).find(backends()[0].reason), std::string::npos)
        << error.what();
  }
}

TEST_F(BackendTest, EnvironmentForcesUnlessTheCallSaysOtherwise) {
  setenv("WINNOW_BACKEND", "sm90", 1);
  EXPECT_THROW(choose_backend("op", {}, {}, kCpuOnly), Error);
  EXPECT_EQ(choose_backend("op", {}, testing::forced(Backend::cpu), kCpuOnly), Backend::cpu);
  setenv("WINNOW_BACKEND", "cpu", 1);
  EXPECT_EQ(choose_backend("op", {}, {}, kCpuOnly), Backend::cpu);
  setenv("WINNOW_BACKEND", "", 1);
  EXPECT_EQ(choose_backend("op", {}, {}, kCpuOnly), Backend::cpu);
  setenv("WINNOW_BACKEND", "fpga", 1);
  testing::expect_error([] { choose_backend("op", {}, {}, kCpuOnly); }, ErrorCode::invalid_argument,
                        "op: WINNOW_BACKEND: want one of sm100, sm90, cuda, cpu, got \"fpga\"");
}

// Contents on the host are always checked. What checking mode does on a GPU is tested there.
TEST_F(BackendTest, ContentsOnTheHostAreChecked) {
  EXPECT_TRUE(checks_contents("op", {}, {}));
  EXPECT_TRUE(checks_contents("op", {}, {.check = true}));
  EXPECT_FALSE(checks_contents("op", {DeviceType::cuda, 0}, {}));
  setenv("WINNOW_CHECK", "0", 1);
  EXPECT_FALSE(checks_contents("op", {DeviceType::cuda, 0}, {}));
  EXPECT_TRUE(checks_contents("op", {}, {}));
}

TEST_F(BackendTest, CheckingModeIsZeroOrOne) {
  for (const char* value : {"maybe", "true", "10", "-1"}) {
    setenv("WINNOW_CHECK", value, 1);
    for (const Device device : {Device{}, Device{DeviceType::cuda, 0}}) {
      testing::expect_error([&] { checks_contents("op", device, {.check = true}); },
                            ErrorCode::invalid_argument,
                            "op: WINNOW_CHECK: want 0 or 1, got \"" + std::string(value) + "\"");
    }
    // Operations without contents to check do not ignore it.
    testing::expect_error([&] { choose_backend("op", {}, {}, kCpuOnly); },
                          ErrorCode::invalid_argument,
                          "op: WINNOW_CHECK: want 0 or 1, got \"" + std::string(value) + "\"");
  }
}

TEST_F(BackendTest, DevicesHaveNames) {
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{DeviceType::cuda, 3}), "cuda:3");
}

}  // namespace
}  // namespace winnow
