// What simulated libraries have in the place of winnow/core/device.cc and winnow/cpu: one GPU, a
// Hopper or a Blackwell, and no CPU backend.
#include "winnow/core/device.h"

#include "winnow/core/error.h"
#include "winnow/cpu/kernels.h"
#include "winnow/simulator/launch.h"

namespace winnow {

std::string to_string(Device device) {
  if (device.type == DeviceType::cpu) return "cpu";
  return "cuda:" + std::to_string(device.index);
}

const GpuList& gpus() {
  static const GpuList list = [] {
    Gpu gpu;
    gpu.index = 0;
    const int capability = simulator::settings().compute_capability;
    gpu.name = capability < 100 ? "simulated Hopper" : "simulated Blackwell";
    gpu.compute_major = capability / 10;
    gpu.compute_minor = capability % 10;
    GpuList all;
    all.driver = simulator::settings().driver;
    all.gpus.push_back(gpu);
    return all;
  }();
  return list;
}

const CpuKernels& cpu_kernels() {
  throw Error(ErrorCode::unsupported, "cpu_kernels", "a simulated library has no CPU backend");
}

}  // namespace winnow
