#include "winnow/expert_parallel/testing/gpu_bench.h"

#include <algorithm>
#include <bit>
#include <optional>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/memory/cuda_memory.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem.h"

namespace winnow::expert_parallel {
namespace {

constexpr Device kFirst{DeviceType::cuda, 0};

std::optional<LaunchEnvironment> environment_if_good() {
  try {
    return launch_environment();
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::string BenchWorld::text() const {
  const int gpus = ranks / ranks_on_gpu;
  return std::to_string(ranks) + " ranks on " + std::to_string(gpus) +
         (gpus > 1 ? " GPUs" : " GPU") +
         (launched ? " and " + std::to_string(nodes) + " nodes" : std::string());
}

BenchWorld bench_world() {
  if (const auto environment = environment_if_good()) {
    const int ranks = environment->world_size;
    return {true, ranks, ranks / environment->local_world_size, 1};
  }
  // The experts can be shared by a power of two.
  const unsigned gpus = std::max(1u, unsigned(winnow::gpus().gpus.size()));
  return {false, BenchWorld::kRanksOnGpu * int(std::bit_floor(gpus)), 1, BenchWorld::kRanksOnGpu};
}

LaunchedRank::LaunchedRank()
    : environment(launch_environment().value()),
      device{DeviceType::cuda, environment.local_rank},
      store(std::make_shared<FileStore>(environment.rendezvous)),
      transport(create_nvshmem(store, environment.rank, environment.world_size, device, Deadline(),
                               "winnow-bench")) {}

LaunchedRank& launched_rank() {
  static LaunchedRank rank;
  return rank;
}

testing::Benchmark peer_copy_benchmark(const std::string& name, const BenchWorld& world,
                                       std::int64_t bytes) {
  testing::Benchmark benchmark;
  benchmark.name = name;
  benchmark.shape = world.text() + ", all at once, each to the next";
  benchmark.device = DeviceType::cuda;
  benchmark.queued = true;
  benchmark.bytes = double(bytes);
  benchmark.prepare = [bytes](const testing::Target&) -> std::function<void()> {
    LaunchedRank& mine = launched_rank();
    const auto to = mine.transport->allocate_cuda(mine.device, std::size_t(bytes), Deadline(),
                                                  "the target of copies");
    std::byte* next = to->peer((mine.environment.rank + 1) % mine.environment.world_size);
    if (next == nullptr) {
      throw Error(ErrorCode::unsupported, "bench", "no pointer to the next GPU");
    }
    const auto from = allocate_cuda_memory(mine.device, std::size_t(bytes));
    const auto stream = std::make_shared<CudaStream>(mine.device, Stream{});
    return [to, next, from, stream, bytes] { stream->copy(next, from.get(), std::size_t(bytes)); };
  };
  return benchmark;
}

void follow_default(Device device, Stream stream) { order(kFirst, {}, device, stream); }
void hold_default(Device device, Stream stream) { order(device, stream, kFirst, {}); }

}  // namespace winnow::expert_parallel
