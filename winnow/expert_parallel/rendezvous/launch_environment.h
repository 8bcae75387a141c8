// The rank of this process and the name of its job, from the environment variables of a launcher.
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

// WINNOW_RENDEZVOUS, beside it the numbers of WINNOW_RANK and WINNOW_WORLD_SIZE or else, if neither
// is set, those of torchrun, of mpirun (Open MPI; MPICH and Intel MPI) or of srun, whose variables
// transport.md lists. WINNOW_LOCAL_WORLD_SIZE and WINNOW_LOCAL_RANK come before the launcher's; the
// defaults are all ranks, and the rank's index on its node. Absent if no variable of Winnow but
// WINNOW_JOB is set. Errors (winnow::Error): only some of the variables are set; an invalid value.
WINNOW_EXPORT std::optional<LaunchEnvironment> launch_environment();

// The name of the job, which is the same on every rank and no other job has: WINNOW_JOB, else that
// of torchrun, Open MPI or srun; with the number of the restart, if there was one. Empty if there
// is none.
WINNOW_EXPORT std::string job_id();

}  // namespace winnow::expert_parallel
