#include "tools/winnow/target.h"

#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace winnow::cli {
namespace {

using nlohmann::ordered_json;

constexpr GpuTarget kOthers[] = {{"NVIDIA H100", "sparse_mla::forward", "h128", 0.5},
                                 {"NVIDIA H100", "sparse_mla::forward", "h64", 0.9}};
constexpr PortableTarget kPortable[] = {{"sparse_mla::forward", "h128", 0.6},
                                        {"sparse_mla::decode", "h128", 0.9}};

testing::Benchmark on_gpu(const std::string& name) {
  testing::Benchmark benchmark;
  benchmark.name = name;
  benchmark.device = DeviceType::cuda;
  return benchmark;
}

// A result that takes 20 us, at 80 % of its ceiling.
ordered_json judged(const testing::Benchmark& benchmark, std::string_view gpu,
                    Backend backend = Backend::sm90) {
  ordered_json result = {{"seconds", 20e-6}, {"ratio", 0.8}};
  testing::Operation operation;
  operation.name = "sparse_mla::forward";
  judge(operation, benchmark, gpu, backend, result, kOthers, kPortable);
  return result;
}

TEST(Target, HoldsOnTheGpuForWhichItWasSet) {
  testing::Benchmark ratio = on_gpu("other"), time = on_gpu("other");
  ratio.target = 0.75;
  EXPECT_EQ(verdict(judged(ratio, "NVIDIA H200")), "75 % reached");
  ratio.target = 0.85;
  EXPECT_EQ(verdict(judged(ratio, "NVIDIA H200")), "85 % MISSED");
  time.target_seconds = 24e-6;
  EXPECT_EQ(verdict(judged(time, "NVIDIA H200")), "24.0 us reached");
  time.target_seconds = 16e-6;
  EXPECT_EQ(verdict(judged(time, "NVIDIA H200")), "16.0 us MISSED");
  EXPECT_EQ(judged(time, "NVIDIA H200")["reached"], false);
}

TEST(Target, SaysNothingOfOtherGpus) {
  testing::Benchmark ratio = on_gpu("other"), time = on_gpu("other");
  ratio.target = 0.85;
  time.target_seconds = 16e-6;
  for (const char* gpu : {"NVIDIA H100", "NVIDIA H200 NVL", ""}) {
    for (const testing::Benchmark& benchmark : {ratio, time}) {
      const ordered_json result = judged(benchmark, gpu);
      EXPECT_EQ(verdict(result), "no target for this GPU");
      EXPECT_FALSE(result.contains("reached") || result.contains("target") ||
                   result.contains("target_seconds"));
      EXPECT_EQ(result["target_gpus"], ordered_json({"NVIDIA H200"}));
    }
  }
}

TEST(Target, OtherGpusHaveTheirOwn) {
  testing::Benchmark benchmark = on_gpu("h128");
  benchmark.target = 0.85;
  EXPECT_EQ(verdict(judged(benchmark, "NVIDIA H100")), "50 % reached");
  EXPECT_EQ(verdict(judged(benchmark, "NVIDIA H200")), "85 % MISSED");
  EXPECT_EQ(judged(benchmark, "NVIDIA B200")["target_gpus"],
            ordered_json({"NVIDIA H200", "NVIDIA H100"}));
  benchmark = on_gpu("h64");
  EXPECT_EQ(verdict(judged(benchmark, "NVIDIA H100")), "90 % MISSED");
  EXPECT_EQ(verdict(judged(benchmark, "NVIDIA H200")), "no target for this GPU");
}

TEST(Target, PortableKernelsHaveTheirOwn) {
  testing::Benchmark benchmark = on_gpu("h128");
  benchmark.target = 0.85;
  for (const std::string_view gpu : portable_gpus()) {
    EXPECT_EQ(verdict(judged(benchmark, gpu, Backend::cuda)), "60 % reached");
  }
  EXPECT_EQ(verdict(judged(benchmark, "NVIDIA A100", Backend::cuda)), "no target for this GPU");
  // What is promised of others is no promise of theirs.
  benchmark.name = "h64";
  for (const char* gpu : {"NVIDIA H100", "NVIDIA H200"}) {
    EXPECT_EQ(verdict(judged(benchmark, gpu, Backend::cuda)), "");
  }
}

TEST(Target, OfTheCpuHoldsThere) {
  testing::Benchmark benchmark;
  benchmark.name = "f32";
  EXPECT_EQ(verdict(judged(benchmark, "", Backend::cpu)), "");
  benchmark.target = 0.75;
  EXPECT_EQ(verdict(judged(benchmark, "", Backend::cpu)), "75 % reached");
}

TEST(Target, NothingIsSaidWhereNothingWasPromised) {
  const ordered_json result = judged(on_gpu("other"), "NVIDIA H200");
  EXPECT_EQ(verdict(result), "");
  EXPECT_EQ(result.size(), 2u);
}

bool has_ceiling(std::string_view operation_name, std::string_view benchmark_name) {
  for (const testing::Operation& operation : testing::operations()) {
    if (operation.name != operation_name) continue;
    for (const testing::Benchmark& benchmark : operation.benchmarks) {
      if (benchmark.device == DeviceType::cuda && benchmark.name == benchmark_name &&
          benchmark.ceiling.kind != testing::Ceiling::Kind::none) {
        return true;
      }
    }
  }
  return false;
}

// A target of a benchmark that was renamed would never be looked at.
TEST(Target, NamesABenchmark) {
  for (const GpuTarget& target : gpu_targets()) {
    EXPECT_TRUE(has_ceiling(target.operation, target.benchmark))
        << target.operation << " " << target.benchmark;
    EXPECT_NE(target.gpu, kReferenceGpu);
    EXPECT_TRUE(0 < target.ratio && target.ratio < 2);
  }
  for (const PortableTarget& target : portable_targets()) {
    EXPECT_TRUE(has_ceiling(target.operation, target.benchmark))
        << target.operation << " " << target.benchmark;
    EXPECT_TRUE(0 < target.ratio && target.ratio < 1);
  }
}

}  // namespace
}  // namespace winnow::cli
