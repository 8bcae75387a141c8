// expert_parallel::AllToAll: configurations and versions that differ between ranks, and bad ones.
#include <chrono>
#include <optional>
#include <string>

#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/testing/all_to_all_ranks.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

struct Difference {
  std::string field, usual, other;  // and its values
  void (*change)(Config& config);
};

class Differing : public ::testing::TestWithParam<Difference> {};

TEST_P(Differing, IsNamedOnEveryRank) {
  const Ranks ranks(3);
  const auto outcomes = ranks.run([&](int rank) {
    Config config = small_config(3, std::chrono::seconds(20));
    config.experts = 6;
    config.arena_rows = 100;
    if (rank == 1) GetParam().change(config);
    ranks.layer(rank, config);
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    EXPECT_EQ(outcome.text, "expert_parallel::AllToAll: " + GetParam().field +
                                ": want the same on every rank, got " + GetParam().usual +
                                " (ranks 0, 2), " + GetParam().other + " (rank 1)");
    EXPECT_LT(outcome.seconds, 10);
  }
  // The same ranks agree the next time.
  expect_working(ranks, ranks.layers(small_config(3)));
}

INSTANTIATE_TEST_SUITE_P(
    Fields, Differing,
    ::testing::Values(
        Difference{"max_tokens", "4", "5", [](Config& config) { config.max_tokens = 5; }},
        Difference{"hidden", "16", "32", [](Config& config) { config.hidden = 32; }},
        Difference{"topk", "2", "3", [](Config& config) { config.topk = 3; }},
        Difference{"experts", "6", "12", [](Config& config) { config.experts = 12; }},
        Difference{"dtype", "f32", "bf16", [](Config& config) { config.dtype = DType::bf16; }},
        Difference{"weight_dtype", "f32", "bf16",
                   [](Config& config) { config.weight_dtype = DType::bf16; }},
        Difference{"local_world_size", "3", "1",
                   [](Config& config) { config.local_world_size = 1; }},
        Difference{"enable_local_combine", "false", "true",
                   [](Config& config) { config.enable_local_combine = true; }},
        Difference{"sm_count", "20", "24", [](Config& config) { config.sm_count = 24; }},
        Difference{"arena_rows", "100", "50", [](Config& config) { config.arena_rows = 50; }},
        Difference{"backend", "any", "cpu", [](Config& config) { config.backend = Backend::cpu; }},
        // Before anyone looks for a GPU.
        Difference{"device", "cpu", "cuda",
                   [](Config& config) { config.device.type = DeviceType::cuda; }}),
    [](const ::testing::TestParamInfo<Difference>& one) { return one.param.field; });

TEST(Config, BadValuesAreRefusedOnEveryRank) {
  const auto expect = [](const std::string& field, const auto& change) {
    const Ranks ranks(2);
    const auto outcomes = ranks.run([&](int rank) {
      Config config = small_config(2, std::chrono::seconds(20));
      change(config);
      ranks.layer(rank, config);
    });
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.code, ErrorCode::invalid_argument) << outcome.text;
      EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::AllToAll: " + field));
    }
  };
  expect("max_tokens", [](Config& config) { config.max_tokens = 0; });
  expect("hidden", [](Config& config) { config.hidden = 0; });
  expect("hidden", [](Config& config) { config.hidden = 6; });
  expect("topk", [](Config& config) { config.topk = 0; });
  expect("topk", [](Config& config) { config.topk = 33; });
  expect("experts", [](Config& config) { config.experts = 3; });
  expect("experts", [](Config& config) { config.experts = 0; });
  expect("dtype", [](Config& config) { config.dtype = DType::f8_e4m3; });
  expect("weight_dtype", [](Config& config) { config.weight_dtype = DType::i32; });
  expect("local_world_size", [](Config& config) { config.local_world_size = 3; });
  expect("arena_rows", [](Config& config) { config.arena_rows = -1; });
  expect("timeout", [](Config& config) { config.timeout = milliseconds(-1); });
}

TEST(Devices, ThatAreNotThereAreNamed) {
  const Ranks ranks(2);
  for (const Outcome& outcome : ranks.run([&](int rank) {
         Config config = small_config(2, std::chrono::seconds(20));
         config.device = {DeviceType::cuda, 1000};
         ranks.layer(rank, config);
       })) {
    EXPECT_EQ(outcome.code, ErrorCode::unsupported);
    EXPECT_THAT(outcome.text,
                ::testing::StartsWith("expert_parallel::AllToAll: backend: want a backend for "
                                      "tensors on cuda:1000, got cuda: "));
    const std::string reason = !built_with_cuda()    ? "this build has no kernels for it"
                               : gpus().gpus.empty() ? gpus().reason
                                                     : "this GPU is not visible to the process";
    EXPECT_THAT(outcome.text, HasSubstr(reason));
  }
}

TEST(Backends, TheForcedOneRunsOrIsRefused) {
  const Ranks ranks(2);
  const auto outcomes = [&](std::optional<Backend> backend) {
    return ranks.run([&](int rank) {
      Config config = small_config(2, std::chrono::seconds(20));
      config.backend = backend;
      const auto layer = ranks.layer(rank, config);
      EXPECT_EQ(layer->backend(), Backend::cpu);
      const Given given(kHere);
      EXPECT_EQ(layer->dispatch(given.args).backend, Backend::cpu);
    });
  };
  const auto refused = [&](const std::vector<Outcome>& all, ErrorCode code, const char* reason) {
    for (const Outcome& outcome : all) {
      EXPECT_EQ(outcome.code, code) << outcome.text;
      EXPECT_EQ(outcome.text, std::string("expert_parallel::AllToAll: backend: want ") + reason);
    }
  };
  for (const Outcome& outcome : outcomes(Backend::cpu)) EXPECT_EQ(outcome.text, "");
  refused(outcomes(Backend::cuda), ErrorCode::invalid_argument,
          "one that supports tensors on cpu, got cuda");
  refused(outcomes(Backend::sm90), ErrorCode::unsupported,
          "one that implements this operation (cuda, cpu), got sm90; did you mean cuda?");
  setenv("WINNOW_BACKEND", "cuda", 1);
  const std::vector<Outcome> by_environment = outcomes({});
  const std::vector<Outcome> by_config = outcomes(Backend::cpu);
  unsetenv("WINNOW_BACKEND");
  refused(by_environment, ErrorCode::invalid_argument,
          "one that supports tensors on cpu, got cuda");
  for (const Outcome& outcome : by_config) EXPECT_EQ(outcome.text, "");
}

}  // namespace
}  // namespace winnow::expert_parallel
