#include "winnow/expert_parallel/transport/nvshmem/nvshmem_library.h"

#include <cstdlib>
#include <mutex>
#include <string_view>

#include <dlfcn.h>

#include "winnow/core/error.h"
#include "winnow/core/version.h"

namespace winnow::expert_parallel {
namespace {

constexpr const char* kHostLibrary = "libnvshmem_host.so.3";

std::mutex g_mutex;
std::string g_folder;

// Throws Error where the variable is a relative path: what that means, and so whose code would run,
// changes with the current directory.
std::string known_folder() {
  const char* variable = std::getenv("NVSHMEM_HOME");
  const std::string home = variable == nullptr ? "" : variable;
  if (!home.empty() && home.front() != '/') {
    throw Error(ErrorCode::unsupported, kNvshmemOperation, "NVSHMEM_HOME", "an absolute path",
                "\"" + home + "\"");
  }
  const std::lock_guard lock(g_mutex);
  if (!g_folder.empty()) return g_folder;
  return home.empty() ? "" : home + "/lib";
}

// What is loaded is found by its name from then on, by libwinnow_nvshmem too.
void load_from(const std::string& folder) {
  if (folder.empty() || dlopen(kHostLibrary, RTLD_NOW | RTLD_NOLOAD) != nullptr) return;
  dlopen((folder + "/" + kHostLibrary).c_str(), RTLD_NOW | RTLD_LOCAL);
}

}  // namespace

void set_nvshmem_folder(const std::string& folder) {
  const std::lock_guard lock(g_mutex);
  g_folder = folder;
}

const NvshmemLibrary& open_nvshmem_library(const std::string& file) {
  // Read when NVSHMEM starts. NCCL, if NVSHMEM found it, would use multicast too.
  setenv("NVSHMEM_DISABLE_NVLS", "1", 1);
  setenv("NVSHMEM_DISABLE_NCCL", "1", 1);
  // Between GPUs of one machine NVSHMEM's proxy thread only asks, without a pause, whether some
  // rank wants to end all processes, in memory that is gone when this process ends: a crash then.
  setenv("NVSHMEM_DISABLE_LOCAL_ONLY_PROXY", "1", 1);
  // Never closed: NVSHMEM's threads and handlers stay.
  load_from(known_folder());
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(ErrorCode::unsupported, kNvshmemOperation,
                std::string("NVSHMEM cannot be loaded: ") + dlerror() +
                    " (pip install nvidia-nvshmem-cu13==3.4.5)");
  }
  const auto functions =
      reinterpret_cast<const NvshmemLibrary* (*)()>(dlsym(library, "winnow_nvshmem_library"));
  if (functions == nullptr) {
    throw Error(ErrorCode::unsupported, kNvshmemOperation, file + " is not a library of Winnow");
  }
  if (std::string_view(functions()->winnow_version) != WINNOW_VERSION) {
    throw Error(ErrorCode::unsupported, kNvshmemOperation,
                file + " is of Winnow " + functions()->winnow_version + ", not " WINNOW_VERSION);
  }
  return *functions();
}

const NvshmemLibrary& nvshmem_library() {
#ifdef WINNOW_NVSHMEM_LIBRARY
  static const NvshmemLibrary& library = open_nvshmem_library(WINNOW_NVSHMEM_LIBRARY);
  return library;
#else
  throw Error(ErrorCode::unsupported, kNvshmemOperation,
              "this build has no NVSHMEM: build with WINNOW_NVSHMEM=ON and "
              "nvidia-nvshmem-cu13==3.4.5 installed");
#endif
}

}  // namespace winnow::expert_parallel
