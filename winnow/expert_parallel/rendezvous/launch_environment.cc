#include "winnow/expert_parallel/rendezvous/launch_environment.h"

#include <charconv>
#include <cstdlib>
#include <limits>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {
namespace {

constexpr const char* kOperation = "expert_parallel::launch_environment";

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
  for (const char* name : {"WINNOW_RANK", "WINNOW_WORLD_SIZE", "WINNOW_LOCAL_WORLD_SIZE",
                           "WINNOW_LOCAL_RANK", "WINNOW_RENDEZVOUS"}) {
    if (set.empty() && variable(name)) set = name;
  }
  if (set.empty()) return std::nullopt;
  // The rendezvous alone says that another launcher gives the numbers.
  const std::string prefix = set == "WINNOW_RENDEZVOUS" ? "" : "WINNOW_";

  constexpr int kMost = std::numeric_limits<int>::max();
  LaunchEnvironment environment;
  environment.rendezvous = needed("WINNOW_RENDEZVOUS", "a directory that all ranks reach", set);
  const std::string size = prefix + "WORLD_SIZE";
  environment.world_size = number(size, needed(size, "the number of ranks", set), 1, kMost,
                                  "a whole number of 1 or more");
  const std::string rank = prefix + "RANK";
  environment.rank =
      number(rank, needed(rank, "the rank of this process", set), 0, environment.world_size - 1,
             "in [0, " + std::to_string(environment.world_size) + ")");
  const std::string local = prefix + "LOCAL_WORLD_SIZE";
  environment.local_world_size = environment.world_size;
  if (const std::optional<std::string> text = variable(local)) {
    const std::string wanted =
        "a divisor of " + size + " " + std::to_string(environment.world_size);
    environment.local_world_size = number(local, *text, 1, environment.world_size, wanted);
    if (environment.world_size % environment.local_world_size != 0) {
      throw Error(ErrorCode::invalid_argument, kOperation, local, wanted, "\"" + *text + "\"");
    }
  }
  environment.local_rank = environment.rank % environment.local_world_size;
  const std::string place = prefix + "LOCAL_RANK";
  if (const std::optional<std::string> text = variable(place)) {
    environment.local_rank = number(place, *text, 0, kMost, "a whole number of 0 or more");
  }
  return environment;
}

std::string job_id() {
  for (const char* name : {"WINNOW_JOB", "TORCHELASTIC_RUN_ID"}) {
    if (const std::optional<std::string> text = variable(name)) return *text;
  }
  return {};
}

}  // namespace winnow::expert_parallel
