// `winnow info`: what this build and this machine can do.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "tools/winnow/commands.h"
#include "tools/winnow/table.h"
#include <nlohmann/json.hpp>

#include "winnow/core/device.h"
#include "winnow/core/error.h"
#include "winnow/core/parallel.h"
#include "winnow/core/route.h"
#include "winnow/core/version.h"
#include "winnow/cpu/kernels.h"
#include "winnow/expert_parallel/layer/backend.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_library.h"

namespace winnow::cli {
namespace {

using nlohmann::ordered_json;

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// NVSHMEM, the transport between GPUs of several processes: loads the library to ask its version.
ordered_json nvshmem() {
  try {
    int major = 0, minor = 0, patch = 0;
    expert_parallel::nvshmem_library().version(&major, &minor, &patch);
    std::ostringstream version;
    version << major << "." << minor << "." << patch;
    return {{"supported", true}, {"version", version.str()}, {"reason", ""}};
  } catch (const Error& error) {
    return {{"supported", false}, {"version", ""}, {"reason", error.what()}};
  }
}

// The backends that implement an operation: a copy of the operations' own lists, with which
// python/tests/test_program.py compares it.
std::vector<Backend> implemented(const std::string& operation) {
  if (operation.starts_with("paged_xl::") || operation.starts_with("expert_parallel::") ||
      operation.starts_with("compressor::") || operation == "indexer::quantize" ||
      operation == "sparse_mla::store") {
    return {Backend::cuda, Backend::cpu};
  }
  if (operation == "sparse_mla::backward") {
    return {Backend::sm100, Backend::sm90, Backend::cuda, Backend::cpu};
  }
  return {Backend::sm90, Backend::cuda, Backend::cpu};
}

// The backend of a call on tensors there, or the reason why none runs it.
ordered_json choice(const std::string& operation, Device device) {
  const std::string wanted = "a backend for tensors on " + to_string(device);
  try {
    const bool is_layer =
        operation.starts_with("expert_parallel::") && operation != "expert_parallel::layout";
    const Backend backend =
        is_layer ? expert_parallel::choose_layer_backend(operation, device, std::nullopt)
                 : choose_backend(operation, device, {}, implemented(operation));
    return {{"backend", std::string(to_string(backend))}, {"reason", ""}};
  } catch (const Error& error) {
    // The error where no backend was forced: the reasons of all backends are what it got.
    const bool none_forced = error.details().wanted == wanted;
    return {{"backend", ""}, {"reason", none_forced ? error.details().got : error.what()}};
  }
}

ordered_json collect() {
  ordered_json info;
  info["version"] = WINNOW_VERSION;
  info["compiler"] = "g++ or compatible " __VERSION__;
  info["processor"] = processor_name();
  info["threads"] = num_threads();
  for (const CpuModule& module : cpu_modules()) {
    info["cpu_modules"].push_back({{"name", module.kernels->name},
                                   {"instructions", module.kernels->instructions},
                                   {"runs_here", module.runs_here},
                                   {"used", module.kernels == &cpu_kernels()}});
  }
  for (const BackendStatus& status : backends()) {
    info["backends"].push_back({{"name", std::string(to_string(status.backend))},
                                {"description", status.description},
                                {"supported", status.supported},
                                {"reason", status.reason}});
  }
  info["driver"] = gpus().driver;
  info["gpus"] = ordered_json::array();
  for (const Gpu& gpu : gpus().gpus) {
    info["gpus"].push_back({{"index", gpu.index},
                            {"name", gpu.name},
                            {"compute_capability", std::to_string(gpu.compute_major) + "." +
                                                       std::to_string(gpu.compute_minor)},
                            {"memory_bytes", gpu.memory_bytes}});
  }
  info["no_gpu_because"] = gpus().reason;
  info["nvshmem"] = nvshmem();
  info["libraries"] = {cpu_kernels().libraries};
  for (const testing::Operation& operation : testing::operations()) {
    ordered_json backends = ordered_json::array();
    for (const Backend one : implemented(operation.name)) {
      backends.push_back(std::string(to_string(one)));
    }
    info["operations"].push_back({{"name", operation.name},
                                  {"summary", operation.summary},
                                  {"backends", backends},
                                  {"cpu", choice(operation.name, {})},
                                  {"gpu", choice(operation.name, {DeviceType::cuda, 0})}});
  }
  return info;
}

void print(const ordered_json& info) {
  std::cout << "winnow " << info["version"].get<std::string>() << "\n\n";
  std::cout << "processor  " << info["processor"].get<std::string>() << ", " << info["threads"]
            << " threads\n";
  for (const auto& module : info["cpu_modules"]) {
    std::cout << "  module   " << module["name"].get<std::string>() << " ("
              << module["instructions"].get<std::string>() << ")"
              << (module["used"]        ? ": in use"
                  : module["runs_here"] ? ""
                                        : ": not on this processor")
              << "\n";
  }
  std::cout << "\n";
  Table backends({{"backend"}, {"supported"}, {"what it is, or why not"}});
  for (const auto& backend : info["backends"]) {
    const bool supported = backend["supported"];
    backends.add({backend["name"], supported ? "yes" : "no",
                  supported ? backend["description"] : backend["reason"]});
  }
  backends.print(std::cout);
  std::cout << "\n";
  if (info["gpus"].empty()) {
    std::cout << "GPUs       none: " << info["no_gpu_because"].get<std::string>() << "\n";
  } else {
    std::cout << "GPUs       driver for CUDA " << info["driver"].get<std::string>() << "\n";
    for (const auto& gpu : info["gpus"]) {
      std::cout << "  cuda:" << gpu["index"] << "   " << gpu["name"].get<std::string>() << ", "
                << "compute capability " << gpu["compute_capability"].get<std::string>() << ", "
                << gpu["memory_bytes"].get<std::int64_t>() / (1 << 30) << " GiB\n";
    }
  }
  const auto& transport = info["nvshmem"];
  std::cout << "NVSHMEM    "
            << (transport["supported"] ? transport["version"].get<std::string>()
                                       : "none: " + transport["reason"].get<std::string>())
            << "\n";
  std::cout << "libraries  ";
  for (const auto& library : info["libraries"]) std::cout << library.get<std::string>() << " ";
  std::cout << "\n\n";
  Table operations({{"operation"}, {"on the CPU"}, {"on a GPU"}, {"what it computes"}});
  std::vector<std::string> reasons;
  const auto cell = [&](const ordered_json& choice) -> std::string {
    if (choice["backend"] != "") return choice["backend"];
    const auto known =
        std::find(reasons.begin(), reasons.end(), choice["reason"].get<std::string>());
    const auto number = known - reasons.begin() + 1;
    if (known == reasons.end()) reasons.push_back(choice["reason"]);
    return "no (" + std::to_string(number) + ")";
  };
  for (const auto& operation : info["operations"]) {
    operations.add(
        {operation["name"], cell(operation["cpu"]), cell(operation["gpu"]), operation["summary"]});
  }
  operations.print(std::cout);
  for (std::size_t i = 0; i < reasons.size(); ++i) {
    std::cout << (i == 0 ? "\n" : "") << "(" << i + 1 << ") " << reasons[i] << "\n";
  }
}

}  // namespace

int run_info(bool json) {
  const ordered_json info = collect();
  if (json) {
    std::cout << info.dump(2) << "\n";
  } else {
    print(info);
  }
  return kOk;
}

}  // namespace winnow::cli
