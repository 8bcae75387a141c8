// Which rank this process is, as `winnow launch` and torchrun say it in the environment.
#pragma once

#include <optional>
#include <string>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

struct LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_world_size = 1;
  int local_rank = 0;      // among the processes of this machine: the index of the rank's GPU
  std::string rendezvous;  // the directory of a FileStore
};

// WINNOW_RANK, WINNOW_WORLD_SIZE, WINNOW_RENDEZVOUS and, if there is more than one node,
// WINNOW_LOCAL_WORLD_SIZE; WINNOW_LOCAL_RANK, else the rank's place on its node. With
// WINNOW_RENDEZVOUS alone: torchrun's RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and LOCAL_RANK. Absent if
// no variable of Winnow is set. Errors (winnow::Error): only some of them are set; a value that is
// no such number.
WINNOW_EXPORT std::optional<LaunchEnvironment> launch_environment();

}  // namespace winnow::expert_parallel
