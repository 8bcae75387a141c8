// NVSHMEM as libwinnow calls it: the functions of libwinnow_nvshmem, which is opened on first use.
// It is a library of its own because its kernels are linked with NVSHMEM's device code, and because
// libnvshmem_host.so is not on every machine. Internal.
#pragma once

#include <cstddef>
#include <string>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

struct FabricKernels;

inline constexpr const char* kNvshmemOperation = "expert_parallel::nvshmem";  // what errors name

struct NvshmemLibrary {
  static constexpr std::size_t kUniqueIdBytes = 128, kGpuIdBytes = 16;

  const char* winnow_version;
  // Those that return int: 0, or what the call gave. The first three need no GPU.
  void (*version)(int* major, int* minor, int* patch);
  int (*unique_id)(void* id);  // of a new world
  int (*gpu_id)(int device, void* id);
  int (*use_gpu)(int device);  // by the calling thread, before any of the following
  // Collective, without end where a rank does not come:
  int (*start)(const void* unique_id, int rank, int world_size);
  void* (*allocate)(std::size_t bytes);  // pages of zeros; null: this rank has no memory
  void (*free)(void* memory);            // when this GPU's work is done
  // Not collective. Null where that rank's memory cannot be pointed to.
  void* (*pointer)(void* memory, int rank);
  const FabricKernels* fabric;
};

// Where libnvshmem_host.so.3 is, if anybody knows: a folder, empty for unknown. For the process,
// from the next opening on. The Python package says what is along sys.path.
WINNOW_EXPORT void set_nvshmem_folder(const std::string& folder);

// Throws Error (unsupported) where there is none, each time. NVSHMEM is what this process has
// loaded already, else what is in the folder that was set, else in lib below the environment
// variable NVSHMEM_HOME, which must be an absolute path, else what the dynamic linker finds.
WINNOW_EXPORT const NvshmemLibrary& nvshmem_library();
WINNOW_EXPORT const NvshmemLibrary& open_nvshmem_library(const std::string& file);

}  // namespace winnow::expert_parallel
