// A rank as a user's program would be one, for the tests of `winnow launch`: joins the world,
// passes a barrier and then behaves as its arguments say: launch_rank MODE [RANK].
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>

#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"

int main(int argc, char** argv) {
  using namespace winnow::expert_parallel;
  const std::string mode = argc > 1 ? argv[1] : "barrier";
  const int chosen = argc > 2 ? std::atoi(argv[2]) : -1;
  try {
    const LaunchEnvironment environment = launch_environment().value();
    FileStore store(environment.rendezvous);
    const auto transport = create_shared_memory(store, environment.rank, environment.world_size,
                                                Deadline(std::chrono::seconds(60)));
    const Topology topology(environment.world_size, environment.local_world_size);
    Communicator communicator(transport, topology, Deadline(std::chrono::seconds(60)));
    communicator.world_barrier(Deadline(std::chrono::seconds(60)), "launch_rank");
    // One write, so that the lines of several ranks do not mix.
    const std::string line = "rank " + std::to_string(communicator.rank()) + " of " +
                             std::to_string(environment.world_size) + " on node " +
                             std::to_string(communicator.node()) + "\n";
    if (write(STDOUT_FILENO, line.data(), line.size()) < 0) return 1;
    if (chosen == communicator.rank()) {
      if (mode == "exit") std::exit(3);
      if (mode == "kill") raise(SIGKILL);
      if (mode == "stop") raise(SIGSTOP);
    }
    if (mode == "sleep") {
      for (;;) pause();
    }
    communicator.world_barrier(Deadline(), "launch_rank");
    return 0;
  } catch (const winnow::Error& error) {
    const std::string line = std::string(error.what()) + "\n";
    return write(STDERR_FILENO, line.data(), line.size()) < 0 ? 1 : 5;
  }
}
