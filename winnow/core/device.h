// Devices that hold memory, and the GPUs of this machine.
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

// "cpu" or "cuda:0"; "cpu:5" if a CPU has an index other than 0.
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

// Queries the CUDA driver, which is loaded at run time, so that the call works on machines without
// a driver. The first call determines the answer. Thread-safe. A child of fork() cannot use CUDA if
// the parent called this function with a driver present; the parent's answer is still returned.
WINNOW_EXPORT const GpuList& gpus();

}  // namespace winnow
