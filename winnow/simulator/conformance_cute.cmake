# Descriptors and layouts beside CuTe's: where CUTLASS's headers (the wheel nvidia-cutlass, which
# `tools/setup wheels` installs) and those of the CUDA toolkit are. They serve this test alone.
find_path(WINNOW_CUTE_INCLUDE cute/atom/mma_traits_sm100.hpp
  HINTS ${PROJECT_SOURCE_DIR}/.venv/headers/cutlass_library/source/include)
find_path(WINNOW_CUDA_INCLUDE cuda_runtime.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include)
if(WINNOW_CUTE_INCLUDE AND WINNOW_CUDA_INCLUDE AND NOT WINNOW_SANITIZE)
  add_library(conformance_cute OBJECT conformance_cute.cc)
  winnow_compile(conformance_cute)
  target_include_directories(conformance_cute SYSTEM PRIVATE
    ${WINNOW_CUTE_INCLUDE} ${WINNOW_CUDA_INCLUDE} ${WINNOW_CUDA_INCLUDE}/cccl)
  winnow_simulator_test(conformance_cute_test device "simulated_conformance_sm100;conformance_cute"
    conformance_cute_test.cc)
else()
  add_test(NAME conformance_cute_test COMMAND ${CMAKE_COMMAND} -E echo
    "SKIPPED: CUTLASS's headers are not there (`tools/setup wheels` installs them), nor those of CUDA, \
or this build has sanitizers")
  set_tests_properties(conformance_cute_test PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED")
endif()
