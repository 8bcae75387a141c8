// Records what the kernels of this machine's GPU give in the cases that the simulator is compared
// with:
//   simulator_record FOLDER COMMIT [cpu]
// writes one file for each operation; those of an H200 stand in winnow/simulator/recorded. COMMIT
// is the one that was built. With "cpu" the CPU backends take the place of the GPU, to try the
// program out.
#include <exception>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "winnow/core/device.h"
#include "winnow/simulator/testing/recorded.h"
#include "winnow/testing/operation.h"

namespace {

namespace simulator = winnow::simulator;
using winnow::DeviceType;

std::string describe(DeviceType device) {
  if (device == DeviceType::cpu) return "CPU";
  const winnow::GpuList& list = winnow::gpus();
  if (list.gpus.empty()) throw std::runtime_error("no GPU: " + list.reason);
  return list.gpus.front().name + ", driver of CUDA " + list.driver;
}

const winnow::testing::Operation& find(const std::string& name) {
  for (const winnow::testing::Operation& operation : winnow::testing::operations()) {
    if (operation.name == name) return operation;
  }
  throw std::runtime_error("no operation " + name);
}

void record_all(const std::filesystem::path& folder, const std::string& commit, DeviceType device) {
  const std::string machine = describe(device);
  std::filesystem::create_directories(folder);
  for (const auto& [name, cases] : simulator::recorded_operations()) {
    const std::filesystem::path path = simulator::recorded_path(folder, name);
    simulator::write_recording(
        path, {machine, commit, simulator::record(find(name), cases, {device, {}})});
    std::cout << path.string() << ": " << cases.size() << " cases, "
              << std::filesystem::file_size(path) << " bytes\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const bool on_cpu = arguments.size() == 3 && arguments[2] == "cpu";
  if (arguments.size() != 2 && !on_cpu) {
    std::cerr << "usage: simulator_record FOLDER COMMIT [cpu]\n";
    return 2;
  }
  try {
    record_all(arguments[0], arguments[1], on_cpu ? DeviceType::cpu : DeviceType::cuda);
  } catch (const std::exception& error) {
    std::cerr << "simulator_record: " << error.what() << '\n';
    return 1;
  }
}
