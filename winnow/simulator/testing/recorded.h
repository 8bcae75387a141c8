// Outputs of the sm90 kernels that were recorded on a GPU: which cases, and their files, which
// stand in winnow/simulator/recorded. The simulator's outputs of the same cases are compared with
// them.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "winnow/testing/operation.h"

namespace winnow::simulator {

struct RecordedOperation {
  std::string name;  // "sparse_mla::forward"
  std::vector<std::string> cases;
};
// Every family of kernels that runs in the simulator, in small cases.
const std::vector<RecordedOperation>& recorded_operations();

// What one case gave.
struct RecordedCase {
  std::string name;
  std::string backend;                   // "sm90"
  std::vector<testing::Sample> samples;  // without tolerances
};

// The file of an operation: lines of text up to "data", then the samples' elements in their dtypes,
// little-endian, in the order of the lines.
struct Recording {
  std::string machine;  // "NVIDIA H200, driver of CUDA 13.0"
  std::string commit;   // whose kernels ran
  std::vector<RecordedCase> cases;
};

std::filesystem::path recorded_path(const std::filesystem::path& folder,
                                    const std::string& operation);
// Throw std::runtime_error, which names the file: it cannot be written, is not there, or is none.
void write_recording(const std::filesystem::path& path, const Recording& recording);
Recording read_recording(const std::filesystem::path& path);

// Runs the cases on `target`. Throws std::runtime_error where one is not in the table, fails, or
// runs on the CPU though a GPU is the target.
std::vector<RecordedCase> record(const testing::Operation& operation,
                                 std::span<const std::string> cases, const testing::Target& target);

}  // namespace winnow::simulator
