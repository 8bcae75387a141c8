// Where memory lives, and the GPUs that the machine has.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "winnow/core/export.h"

namespace winnow {

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  friend constexpr bool operator==(const Device&, const Device&) = default;
};

// "cpu" or "cuda:0".
WINNOW_EXPORT std::string to_string(Device device);

struct Gpu {
  int index = 0;
  std::string name;
  int compute_major = 0;  // 9 and 0 for sm_90
  int compute_minor = 0;
  std::int64_t memory_bytes = 0;
};

struct GpuList {
  std::vector<Gpu> gpus;
  std::string driver;  // CUDA version that the driver supports, "13.0"; empty without a driver
  std::string reason;  // why `gpus` is empty; empty otherwise
};

// Asks the CUDA driver, which is looked up at run time: works on machines without one. The answer
// of the first call is kept. Thread-safe. In a child of fork() CUDA cannot be used if the parent
// has called this with a driver present; the kept answer is still returned.
WINNOW_EXPORT const GpuList& gpus();

}  // namespace winnow
