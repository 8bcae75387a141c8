# For checks of all kernels: `files`, relative to SOURCE_DIR, in which kernels of the simulator may stand, and
# `of_nvshmem`, the kernels in them that it does not run.

# Kernels outside of the library: of a program and of an example, and a module that only NVSHMEM's compiler takes.
set(outside "^(examples/train_indexer/cuda|tools/winnow/l2_flush|winnow/.*nvshmem_module)\\.cu$")
file(GLOB_RECURSE files RELATIVE ${SOURCE_DIR}
  ${SOURCE_DIR}/winnow/*.cu ${SOURCE_DIR}/winnow/*.cuh ${SOURCE_DIR}/examples/*.cu ${SOURCE_DIR}/tools/*.cu
  ${SOURCE_DIR}/tools/*.cuh)
list(FILTER files EXCLUDE REGEX "^winnow/simulator/|${outside}")

# A kernel of NVSHMEM's fabric alone.
set(of_nvshmem quiet_kernel)
