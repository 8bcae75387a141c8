// Which backend sparse_mla::backward gets on a Hopper, a Blackwell or another GPU, asked for sm100
// or not, and what the errors say. Each GPU is one of a process of its own: a library asks once.
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "winnow/core/error.h"
#include "winnow/simulator/launch.h"
#include "winnow/sparse_mla/backward/backward.h"

namespace winnow::sparse_mla {
namespace {

using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

BackwardArgs described_args() {
  // A dry run looks at no contents; any aligned address will do.
  void* const address = reinterpret_cast<void*>(std::uintptr_t{1} << 20);
  const Device gpu{DeviceType::cuda, 0};
  const auto described = [&](DType dtype, std::vector<std::int64_t> shape) {
    std::vector<std::int64_t> strides(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    return TensorView(address, dtype, shape, strides, gpu);
  };
  return {.q = described(DType::bf16, {4, 128, 576}),
          .kv = described(DType::bf16, {300, 1, 576}),
          .indices = described(DType::i32, {4, 1, 64}),
          .out = described(DType::bf16, {4, 128, 512}),
          .lse = described(DType::f32, {4, 128}),
          .d_out = described(DType::bf16, {4, 128, 512}),
          .dq = described(DType::bf16, {4, 128, 576}),
          .dkv = described(DType::f32, {300, 1, 576})};
}

// Ends the process after it has said which backend the call gets and how much workspace that wants,
// or the error, and then what backends() says of sm100.
[[noreturn]] void ask(int capability, const std::string& driver, std::optional<Backend> forced,
                      const char* environment = nullptr) {
  simulator::settings().compute_capability = capability;
  simulator::settings().driver = driver;
  if (environment != nullptr) setenv("WINNOW_BACKEND", environment, 1);
  RunOptions options{.backend = forced, .dry_run = true};
  try {
    const Backend backend = backward(described_args(), options);
    const std::int64_t bytes = backward_workspace_bytes(described_args(), options);
    std::fprintf(stderr, "gets %s, workspace %s\n", std::string(to_string(backend)).c_str(),
                 bytes > 0 ? "some" : "none");
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  const BackendStatus& sm100 = backends()[0];
  std::fprintf(stderr, "%s: %s", sm100.supported ? "supported" : "not supported",
               sm100.reason.c_str());
  std::exit(0);
}

// What the CPU and sm90 alone have is refused by the backend's name.
TEST(SimulatorBackends, RangesAndASecondSourceAreUnsupportedOnSm100) {
  const auto refuse = [](Backend backend, bool extra) {
    simulator::settings().compute_capability = backend == Backend::sm90 ? 90 : 100;
    simulator::settings().driver = "13.0";
    BackwardArgs args = described_args();
    if (extra) {
      args.extra_kv = args.kv;
      args.extra_indices = args.indices;
      args.dextra_kv = args.dkv;
    } else {
      args.key_start = args.key_end =
          ConstTensorView(args.lse.data(), DType::i32, {4}, args.q.device());
      args.indices = {};
    }
    try {
      backward(args, {.backend = backend, .dry_run = true});
      std::fprintf(stderr, "taken");
    } catch (const Error& error) {
      std::fprintf(stderr, "%s: %s", error.code() == ErrorCode::unsupported ? "unsupported" : "",
                   error.what());
    }
    std::exit(0);
  };
  const std::string start = "unsupported: sparse_mla::backward: sm100";
  EXPECT_EXIT(refuse(Backend::sm100, true), ExitedWithCode(0),
              HasSubstr(start + ": want no extra_kv, got a tensor"));
  EXPECT_EXIT(refuse(Backend::sm100, false), ExitedWithCode(0),
              HasSubstr(start + ": want the rows of each query as indices, got a range"));
  for (const bool extra : {false, true}) {
    EXPECT_EXIT(refuse(Backend::sm90, extra), ExitedWithCode(0), HasSubstr("taken"));
  }
}

constexpr const char* kNeverRan =
    "sm100 wants 10.0 or 10.3 (it was compiled and simulated, and has never run on hardware)";

void expect_answer(int capability, const std::string& driver, std::optional<Backend> forced,
                   const std::vector<std::string>& parts, const char* environment = nullptr) {
  std::vector<::testing::Matcher<const std::string&>> each;
  for (const std::string& part : parts) each.push_back(HasSubstr(part));
  EXPECT_EXIT(ask(capability, driver, forced, environment), ExitedWithCode(0),
              ::testing::AllOfArray(each));
}

TEST(SimulatorBackends, Sm100RunsWhereItIsForced) {
  for (const int capability : {100, 103}) {
    expect_answer(capability, "13.0", Backend::sm100, {"gets sm100, workspace some"});
    expect_answer(capability, "12.9", {}, {"gets sm100, workspace some", "supported: "}, "sm100");
  }
}

TEST(SimulatorBackends, NobodyGetsSm100Unasked) {
  expect_answer(100, "13.0", {}, {"gets cuda, workspace some"});
  expect_answer(90, "13.0", {}, {"gets sm90, workspace some"});
}

TEST(SimulatorBackends, CudaServesEveryGpu) {
  for (const int capability : {80, 86, 89, 100, 120}) {
    expect_answer(capability, "13.0", {}, {"gets cuda, workspace some"});
  }
  expect_answer(90, "13.0", {}, {"gets cuda, workspace some"}, "cuda");
  expect_answer(75, "13.0", {}, {"cuda:0 is simulated", "of compute capability 7.5"});
}

TEST(SimulatorBackends, OtherGpusAreNamedWithWhatWorks) {
  expect_answer(90, "13.0", Backend::sm100,
                {"sparse_mla::backward: backend: ",
                 "sm100: cuda:0 is simulated Hopper of compute capability 9.0, and ", kNeverRan,
                 "; the sm90 backend works", "not supported: "});
  // Neither a Hopper nor one of the Blackwells whose instructions these are.
  for (const int capability : {80, 89, 101, 120}) {
    expect_answer(capability, "13.0", Backend::sm100,
                  {"of compute capability " + std::to_string(capability / 10) + "." +
                       std::to_string(capability % 10),
                   kNeverRan, "; the cpu backend works", "not supported: "});
  }
}

TEST(SimulatorBackends, AnOldDriverIsNamed) {
  for (const char* const driver : {"12.8", "12.0", "11.8"}) {
    expect_answer(100, driver, Backend::sm100,
                  {"the CUDA driver is one of CUDA " + std::string(driver) +
                       ", and the kernels want one of 12.9",
                   kNeverRan, "; the cpu backend works", "not supported: "});
    // Of no consequence to anybody else.
    expect_answer(90, driver, {}, {"gets sm90, workspace some"});
  }
}

}  // namespace
}  // namespace winnow::sparse_mla
