// The ranks of benchmarks on GPUs: alone, two ranks share each GPU of this machine; under `winnow
// launch` every process is a rank with a GPU of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "winnow/core/device.h"
#include "winnow/core/stream.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/expert_parallel/transport/transport.h"
#include "winnow/testing/operation.h"

namespace winnow::expert_parallel {

// Of ranks: those that are launched, each with a GPU, or those of this process.
struct BenchWorld {
  static constexpr int kRanksOnGpu = 2;

  bool launched = false;
  int ranks = 1, nodes = 1, ranks_on_gpu = 1;
  bool one_gpu() const { return ranks == ranks_on_gpu; }
  std::string text() const;  // "2 ranks on 2 GPUs"
};
// A launch that makes no sense is told when benchmarks run.
BenchWorld bench_world();

// This process in a launched world; kept to the end.
struct LaunchedRank {
  LaunchedRank();
  LaunchEnvironment environment;
  Device device;
  std::shared_ptr<Store> store;
  std::shared_ptr<Transport> transport;
};
LaunchedRank& launched_rank();

// In a launched world: plain copies of so many bytes, all ranks at once, each to the next one.
testing::Benchmark peer_copy_benchmark(const std::string& name, const BenchWorld& world,
                                       std::int64_t bytes);

// `stream` goes on after the first GPU's default one, and the other way round.
void follow_default(Device device, Stream stream);
void hold_default(Device device, Stream stream);

// The ranks of this process. OneRank has a device(), a stream() and enqueue(), which is timed.
template <class OneRank>
class BenchRanks {
 public:
  // make(transport, store, device) on every rank.
  template <class Make>
  explicit BenchRanks(const Make& make)
      : team_(bench_world().ranks), ranks_(static_cast<std::size_t>(team_.world().world_size())) {
    team_.run([&](int rank, const std::shared_ptr<Transport>& transport) {
      const Device device{DeviceType::cuda, rank / BenchWorld::kRanksOnGpu};
      ranks_[std::size_t(rank)] = make(transport, team_.world().store(), device);
    });
  }
  ~BenchRanks() {
    team_.run([&](int rank, const auto&) { ranks_[std::size_t(rank)].reset(); });
  }
  BenchRanks(const BenchRanks&) = delete;
  BenchRanks& operator=(const BenchRanks&) = delete;

  // No rank may wait for another one's end by way of the default stream.
  void run() {
    for (const auto& rank : ranks_) follow_default(rank->device(), rank->stream());
    team_.run([&](int rank, const auto&) { ranks_[std::size_t(rank)]->enqueue(); });
    for (const auto& rank : ranks_) hold_default(rank->device(), rank->stream());
  }

 private:
  RankTeam team_;
  std::vector<std::unique_ptr<OneRank>> ranks_;
};

// What is timed: enqueue() of this process's ranks. A rank that has a GPU for itself, and is
// `alone`, uses the default stream.
template <class OneRank, class... Options>
std::function<void()> prepare_ranks(const Options&... options) {
  const auto make = [options...](bool alone) {
    return [options..., alone](const std::shared_ptr<Transport>& transport,
                               const std::shared_ptr<Store>& store, Device device) {
      return std::make_unique<OneRank>(transport, store, device, alone, options...);
    };
  };
  if (!launch_environment()) {
    return [ranks = std::make_shared<BenchRanks<OneRank>>(make(false))] { ranks->run(); };
  }
  LaunchedRank& mine = launched_rank();
  return [rank = std::shared_ptr<OneRank>(make(true)(mine.transport, mine.store, mine.device))] {
    rank->enqueue();
  };
}

}  // namespace winnow::expert_parallel
