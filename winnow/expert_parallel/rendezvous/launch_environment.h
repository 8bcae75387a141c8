// The rank of this process, from the environment variables of `winnow launch` or torchrun.
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
// WINNOW_LOCAL_WORLD_SIZE; WINNOW_LOCAL_RANK, else the rank's index on its node. If only
// WINNOW_RENDEZVOUS is set, torchrun's RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and LOCAL_RANK are read.
// Absent if no variable of Winnow is set. Errors (winnow::Error): only some of the variables are
// set; an invalid value.
WINNOW_EXPORT std::optional<LaunchEnvironment> launch_environment();

// The name of the job, which is the same on every rank and differs between jobs: WINNOW_JOB, else
// torchrun's TORCHELASTIC_RUN_ID; empty if neither is set.
WINNOW_EXPORT std::string job_id();

}  // namespace winnow::expert_parallel
