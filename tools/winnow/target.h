// What the project promises of its benchmarks, on which GPU, and what `winnow bench` says of it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "winnow/testing/operation.h"

namespace winnow::cli {

// The GPU for which the targets were set that stand beside the benchmarks.
inline constexpr std::string_view kReferenceGpu = "NVIDIA H200";

// A target for another GPU: the least ratio of the ceiling.
struct GpuTarget {
  std::string_view gpu, operation, benchmark;
  double ratio;
};
std::span<const GpuTarget> gpu_targets();

// What is promised of the portable kernels (backend cuda), on the GPUs of portable_gpus(): beside a
// product with mma.sync, or a copy.
struct PortableTarget {
  std::string_view operation, benchmark;
  double ratio;
};
std::span<const PortableTarget> portable_targets();
std::span<const std::string_view> portable_gpus();

// Adds what is promised to a result that has "seconds" and, beside a ceiling, "ratio": "target" or
// "target_seconds", and "reached". `gpu` is the name that CUDA gives, or empty on the CPU. Where
// targets were set for other GPUs alone, "target_gpus" are their names. With the backend cuda,
// which a Hopper uses where it is forced, only portable targets count.
void judge(const testing::Operation& operation, const testing::Benchmark& benchmark,
           std::string_view gpu, Backend backend, nlohmann::ordered_json& result,
           std::span<const GpuTarget> others = gpu_targets(),
           std::span<const PortableTarget> portable = portable_targets());

// "56 % reached", "24.0 us MISSED", "no target for this GPU", or nothing.
std::string verdict(const nlohmann::ordered_json& result);

}  // namespace winnow::cli
