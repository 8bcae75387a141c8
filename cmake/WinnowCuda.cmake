# The CUDA side of the build: found where nvcc is, compiled even where no GPU is present.
#   WINNOW_CUDA=AUTO  kernels if nvcc is there;  ON  required;  OFF  CPU only
#   WINNOW_KERNELS_ONLY_COMPILE=ON  quick to compile, for builds that nobody runs on a GPU
set(WINNOW_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
option(WINNOW_KERNELS_ONLY_COMPILE
       "Compile kernels for the oldest of their architectures alone, without costly optimizations" OFF)

set(WINNOW_WITH_CUDA OFF)
if(NOT WINNOW_CUDA STREQUAL "OFF" AND NOT WINNOW_SANITIZE)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES OFF)  # every target names its own
    endif()
    enable_language(CUDA)
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know CUDA C++20
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    find_package(CUDAToolkit 12.8 REQUIRED)
    set(WINNOW_WITH_CUDA ON)
    # The kernels of sm100 are compiled where nvcc knows their instructions.
    set(WINNOW_WITH_SM100 OFF)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
      set(WINNOW_WITH_SM100 ON)
    else()
      message(STATUS "No kernels for sm100: they need nvcc 12.9 or newer")
    endif()
  elseif(WINNOW_CUDA STREQUAL "ON")
    message(FATAL_ERROR "WINNOW_CUDA is ON but no nvcc was found")
  else()
    message(STATUS "No CUDA kernels: no nvcc was found")
  endif()
endif()

# Kernels for an architecture or a list: winnow_kernels(winnow_sm90 90a-real a.cu b.cu)
function(winnow_kernels target architectures)
  # Code for one architecture is not compressed unless that is asked for; with -lineinfo it is five times as large.
  set(options -O3 -lineinfo --compress-mode=size)
  if(WINNOW_KERNELS_ONLY_COMPILE)
    list(GET architectures 0 architectures)
    if(NOT architectures MATCHES "^100")  # whose machine code has tests
      set(options --Ofast-compile=max)
    endif()
  endif()
  add_library(${target} OBJECT ${ARGN})
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES "${architectures}" CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
    POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}
                             ${PROJECT_BINARY_DIR}/generated)
  # NDEBUG in every build type: an assert's call makes ptxas serialise wgmma.
  target_compile_options(${target} PRIVATE ${options} -DNDEBUG -Xcompiler=-Wall,-Wextra
    $<$<BOOL:${WINNOW_WERROR}>:-Werror=all-warnings>)
endfunction()
