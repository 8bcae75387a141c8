// In the place of libwinnow_nvshmem: a library that cannot be loaded without its NVSHMEM.
#include "winnow/core/version.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_library.h"

extern "C" int stand_in_nvshmem_version();

namespace {

void version(int* major, int* minor, int* patch) {
  *major = stand_in_nvshmem_version();
  *minor = *patch = 0;
}

}  // namespace

extern "C" WINNOW_EXPORT const winnow::expert_parallel::NvshmemLibrary* winnow_nvshmem_library() {
  static winnow::expert_parallel::NvshmemLibrary library{};
  library.winnow_version = WINNOW_VERSION;
  library.version = version;
  return &library;
}
