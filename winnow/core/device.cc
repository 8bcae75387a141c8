#include "winnow/core/device.h"

#include <dlfcn.h>

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow {
namespace {

// The few driver functions that listing GPUs needs, with the types of <cuda.h> spelled out: the
// library must start on machines that have neither the header nor the driver.
struct Driver {
  int (*init)(unsigned flags) = nullptr;
  int (*version)(int*) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*device_name)(char*, int, int) = nullptr;
  int (*device_memory)(std::size_t*, int) = nullptr;
  int (*device_attribute)(int*, int attribute, int device) = nullptr;

  bool load(void* library) {
    const auto find = [library](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    return find(init, "cuInit") && find(version, "cuDriverGetVersion") &&
           find(device_count, "cuDeviceGetCount") && find(device_name, "cuDeviceGetName") &&
           find(device_memory, "cuDeviceTotalMem_v2") &&
           find(device_attribute, "cuDeviceGetAttribute");
  }
};

#if WINNOW_WITH_CUDA
constexpr int kLeastDriver = CUDART_VERSION / 1000 * 1000;  // that of its first minor version
#else
constexpr int kLeastDriver = 0;
#endif

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

constexpr int kComputeMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeMinor = 76;

GpuList ask_driver() {
  GpuList list;
  // Never closed: the driver does not support being unloaded.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    list.reason = "no CUDA driver (libcuda.so.1 was not found)";
    return list;
  }
  Driver driver;
  if (!driver.load(library)) {
    list.reason = "the CUDA driver lacks functions of CUDA 11";
    return list;
  }
  if (const int error = driver.init(0); error != 0) {
    list.reason = "the CUDA driver did not start (cuInit returned " + std::to_string(error) + ")";
    return list;
  }
  if (int version = 0; driver.version(&version) == 0) {
    list.driver = version_text(version);
    if (version < kLeastDriver) {
      list.reason = "the CUDA driver is one of CUDA " + list.driver + ", this build needs one of " +
                    version_text(kLeastDriver);
      return list;
    }
  }
  int count = 0;
  if (driver.device_count(&count) != 0 || count == 0) {
    list.reason = "the CUDA driver shows no GPU";
    return list;
  }
  for (int index = 0; index < count; ++index) {
    Gpu gpu;
    gpu.index = index;
    char name[256] = {};
    std::size_t memory = 0;
    if (driver.device_name(name, sizeof(name), index) == 0) gpu.name = name;
    if (driver.device_memory(&memory, index) == 0) gpu.memory_bytes = std::int64_t(memory);
    driver.device_attribute(&gpu.compute_major, kComputeMajor, index);
    driver.device_attribute(&gpu.compute_minor, kComputeMinor, index);
    list.gpus.push_back(gpu);
  }
  return list;
}

}  // namespace

std::string to_string(Device device) {
  const bool on_cpu = device.type == DeviceType::cpu;
  if (on_cpu && device.index == 0) return "cpu";
  return (on_cpu ? "cpu:" : "cuda:") + std::to_string(device.index);
}

const GpuList& gpus() {
  static const GpuList list = ask_driver();
  return list;
}

}  // namespace winnow
