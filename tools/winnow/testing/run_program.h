// Runs the program as a user does, for tests.
#pragma once

#include <cstdio>
#include <string>

#include <sys/wait.h>

namespace winnow::cli {

struct Result {
  int exit_code = -1;
  std::string output;  // standard output and standard error together, unless redirected
};

// Runs a command of the shell.
inline Result run_shell(const std::string& command) {
  Result result;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  char buffer[4096];
  for (std::size_t count; (count = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    result.output.append(buffer, count);
  }
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

// Runs the program through the shell; `environment` comes before it.
inline Result run(const std::string& arguments, const std::string& environment = "") {
  return run_shell(environment + " " WINNOW_PROGRAM " " + arguments + " 2>&1");
}

}  // namespace winnow::cli
