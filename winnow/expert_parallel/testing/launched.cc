// The problems of the room in a world of launched processes.
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/testing/all_to_all_check.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem.h"
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"

namespace winnow::expert_parallel {
namespace {

using testing::Comparison;

// This process as one rank of a launched world; made at the first use, kept to the end.
struct LaunchedWorld {
  explicit LaunchedWorld(DeviceType type) : device{type, 0} {
    const int rank = environment.rank, ranks = environment.world_size;
    if (type == DeviceType::cpu) {
      transport = create_shared_memory(*store, rank, ranks, Deadline(), "winnow-verify");
    } else {
      device.index = environment.local_rank;
      transport = create_nvshmem(store, rank, ranks, device, Deadline(), "winnow-verify");
    }
  }

  LaunchEnvironment environment = launch_environment().value();
  std::shared_ptr<Store> store = std::make_shared<FileStore>(environment.rendezvous);
  Device device;  // the rank's own
  std::shared_ptr<Transport> transport;
  int problems = 0;
};

// Failures as text, one per line: what, tab, detail.
std::string failures_of(const Comparisons& comparisons) {
  std::string text;
  for (const Comparison& one : comparisons.list()) {
    if (!one.passed) text += one.what + "\t" + one.detail + "\n";
  }
  return text;
}

Comparisons comparisons_from(const std::string& failures) {
  Comparisons comparisons;
  std::istringstream lines(failures);
  for (std::string what, detail; std::getline(lines, what, '\t') && std::getline(lines, detail);) {
    comparisons.add({what, 1, 0, false, detail});
  }
  return comparisons;
}

}  // namespace

Comparisons run_launched(DeviceType type, const RankPart& part) {
  static std::map<DeviceType, LaunchedWorld> worlds;
  LaunchedWorld& world = worlds.try_emplace(type, type).first->second;
  const int rank = world.environment.rank;
  Comparisons mine;
  try {
    mine = part(world.transport, world.store, world.device);
  } catch (const Error& error) {
    mine.add({"call", 1, 0, false, error.what()});
  }
  const auto key = [&](int of) {
    return "winnow-verify-results/" + std::to_string(world.problems) + "/" + std::to_string(of);
  };
  Comparisons all;
  all.add(mine, rank);
  if (rank != 0) world.store->set(key(rank), failures_of(mine));
  for (int other = 1; rank == 0 && other < world.environment.world_size; ++other) {
    const auto failures = world.store->get(key(other), Deadline());
    all.add(
        failures ? comparisons_from(*failures) : comparisons_from("report\tnone came in time\n"),
        other);
    world.store->remove(key(other));
  }
  ++world.problems;
  return all;
}

}  // namespace winnow::expert_parallel
