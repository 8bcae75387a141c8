// What a build says of sm100 whose nvcc was too old for it (CMakeLists.txt): on a Blackwell, asked
// for by name.
#include <array>

#include <gmock/gmock.h>

#include "winnow/core/error.h"
#include "winnow/core/route.h"
#include "winnow/simulator/launch.h"

namespace winnow {
namespace {

TEST(SimulatorOldToolkit, IsNamed) {
  simulator::settings().compute_capability = 100;
  simulator::settings().driver = "13.0";
  constexpr std::array kAll = {Backend::sm100, Backend::sm90, Backend::cpu};
  const RunOptions forced{.backend = Backend::sm100};
  std::string text;
  try {
    choose_backend("op", {DeviceType::cuda, 0}, forced, kAll);
  } catch (const Error& error) {
    text = error.what();
  }
  const char* const reason =
      "this build has no kernels for it, which want nvcc 12.9 or newer: it was made with nvcc "
      "12.8.93, and sm100 wants 10.0 or 10.3 (it was compiled and simulated, and has never run on "
      "hardware); the cpu backend works";
  EXPECT_EQ(backends()[0].reason, reason);
  EXPECT_FALSE(backends()[0].supported);
  EXPECT_THAT(text, ::testing::HasSubstr(std::string("sm100: ") + reason));
}

}  // namespace
}  // namespace winnow
