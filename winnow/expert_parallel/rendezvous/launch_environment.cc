#include "winnow/expert_parallel/rendezvous/launch_environment.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {
namespace {

constexpr const char* kOperation = "expert_parallel::launch_environment";

// What a launcher calls the numbers of a process.
struct Names {
  const char *rank, *world_size, *local_world_size, *local_rank;
};
constexpr Names kOwn{"WINNOW_RANK", "WINNOW_WORLD_SIZE", "WINNOW_LOCAL_WORLD_SIZE",
                     "WINNOW_LOCAL_RANK"};
constexpr Names kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"};
// In this order, since a launcher may itself be started by one that stands behind it.
constexpr Names kLaunchers[] = {
    kTorchrun,
    // Open MPI
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK"},
    // MPICH and Intel MPI (Hydra)
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
    // srun
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"}};

// An empty variable counts as not set.
std::optional<std::string> variable(const std::string& name) {
  const char* text = std::getenv(name.c_str());
  if (text == nullptr || *text == '\0') return std::nullopt;
  return text;
}

int number(const std::string& name, const std::string& text, int lowest, int highest,
           const std::string& wanted) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < lowest || value > highest) {
    throw Error(ErrorCode::invalid_argument, kOperation, name, wanted, "\"" + text + "\"");
  }
  return value;
}

std::string needed(const std::string& name, const std::string& wanted, const std::string& beside) {
  if (std::optional<std::string> text = variable(name)) return *text;
  throw Error(ErrorCode::invalid_argument, kOperation, name,
              wanted + ", since " + beside + " is set", "nothing");
}

}  // namespace

std::optional<LaunchEnvironment> launch_environment() {
  std::string set;  // the first of our variables that is there
  for (const char* name :
       {kOwn.rank, kOwn.world_size, kOwn.local_world_size, kOwn.local_rank, "WINNOW_RENDEZVOUS"}) {
    if (set.empty() && variable(name)) set = name;
  }
  if (set.empty()) return std::nullopt;
  const auto says_rank = [](const Names& names) { return variable(names.rank).has_value(); };
  const auto* const launcher = std::ranges::find_if(kLaunchers, says_rank);
  const bool own = variable(kOwn.rank) || variable(kOwn.world_size);
  const Names& names = own ? kOwn : launcher == std::end(kLaunchers) ? kTorchrun : *launcher;

  constexpr int kMost = std::numeric_limits<int>::max();
  LaunchEnvironment environment;
  environment.rendezvous = needed("WINNOW_RENDEZVOUS", "a directory that all ranks reach", set);
  const std::string size = names.world_size, rank = names.rank;
  environment.world_size = number(size, needed(size, "the number of ranks", set), 1, kMost,
                                  "a whole number of 1 or more");
  environment.rank =
      number(rank, needed(rank, "the rank of this process", set), 0, environment.world_size - 1,
             "in [0, " + std::to_string(environment.world_size) + ")");
  environment.local_world_size = environment.world_size;
  // One that says nothing of the nodes, as srun's PMI does, may have another behind it that numbers
  // the ranks alike.
  const auto says_node = [&](const Names& other) {
    return variable(other.local_world_size) && variable(other.rank) == variable(rank) &&
           variable(other.world_size) == variable(size);
  };
  const auto* const behind = std::find_if(launcher, std::end(kLaunchers), says_node);
  const Names& node = own || behind == std::end(kLaunchers) ? names : *behind;
  const std::string local =
      variable(kOwn.local_world_size) ? kOwn.local_world_size : node.local_world_size;
  if (const std::optional<std::string> text = variable(local)) {
    const std::string wanted =
        "a divisor of " + size + " " + std::to_string(environment.world_size);
    // srun writes "4(x2)" for two nodes, and has a comma where nodes have different numbers.
    const std::size_t end = std::min(text->find("(x"), text->size());
    environment.local_world_size =
        number(local, text->substr(0, end), 1, environment.world_size, wanted);
    const int nodes = environment.world_size / environment.local_world_size;
    if (environment.world_size % environment.local_world_size != 0 ||
        (end < text->size() && text->substr(end) != "(x" + std::to_string(nodes) + ")")) {
      throw Error(ErrorCode::invalid_argument, kOperation, local, wanted, "\"" + *text + "\"");
    }
  }
  environment.local_rank = environment.rank % environment.local_world_size;
  const std::string place = variable(kOwn.local_rank) ? kOwn.local_rank : node.local_rank;
  if (const std::optional<std::string> text = variable(place)) {
    environment.local_rank = number(place, *text, 0, kMost, "a whole number of 0 or more");
  }
  return environment;
}

std::string job_id() {
  std::string job;
  // torchrun calls every job "none" that was given no name.
  for (const char* name :
       {"WINNOW_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (job.empty()) job = variable(name).value_or("");
    if (job == "none") job.clear();
  }
  if (const auto slurm = variable("SLURM_JOB_ID"); job.empty() && slurm) {
    job = *slurm + "." + variable("SLURM_STEP_ID").value_or("");
  }
  for (const char* name : {"TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"}) {
    const std::string restarts = variable(name).value_or("0");
    if (!job.empty() && restarts != "0") job += "." + restarts;
  }
  return job;
}

}  // namespace winnow::expert_parallel
