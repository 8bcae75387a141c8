// The subcommands of the program. Each returns the exit code; bad input throws winnow::Error.
#pragma once

#include <string>
#include <vector>

#include "tools/winnow/program.h"

#include "winnow/core/backend.h"
#include "winnow/testing/operation.h"

namespace winnow::cli {

// The operations that a name selects: "sparse_mla::forward", a family ("sparse_mla"), or all for
// "". Throws Error, in the name of the command, naming the known ones.
std::vector<const testing::Operation*> select_operations(const std::string& command,
                                                         const std::string& name);

struct RunWhere {
  std::string device = "auto";  // auto, cpu or cuda
  std::string backend;          // forces one; empty: the first that serves the device
};
// Throws Error (unsupported), in the name of the command, where `cuda` is requested and this
// machine has no GPU.
testing::Target make_target(const std::string& command, const RunWhere& where);

int run_info(bool json);

struct VerifyOptions {
  std::string operation;
  std::string only_case;
  RunWhere where;
  bool list = false;
  bool json = false;
};
int run_verify(const VerifyOptions& options);

struct BenchOptions {
  std::string operation;
  std::string only_benchmark;
  RunWhere where;
  bool all = false;
  bool check = false;
  bool json = false;
  double seconds = 0.2;  // least measured time of a repetition
  int repetitions = 7;
};
int run_bench(const BenchOptions& options);

struct ReplayOptions {
  std::string file;
  RunWhere where;
  bool check = false;       // of the contents of index tensors on a GPU
  double tolerance = 0.01;  // of the largest magnitude of an output
};
// Repeats a call that WINNOW_RECORD wrote down.
int run_replay(const ReplayOptions& options);

}  // namespace winnow::cli
