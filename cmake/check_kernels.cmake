# Fails if a kernel holds what belongs into a wrapper of winnow/device: PTX instructions and shared
# memory, which a build for the host replaces there; and if a source outside of winnow/simulator knows
# that it may be simulated; or if a comparison of a pointer decides whether a tensor is present; or if a number is read
# from a text of another process without bounds; or if a wrapper has no micro-kernel, which shows that the simulator and
# a GPU do the same. Run as
#   cmake -DSOURCE_DIR=<repository> -P check_kernels.cmake
file(GLOB_RECURSE files RELATIVE ${SOURCE_DIR}
  ${SOURCE_DIR}/winnow/*.cu ${SOURCE_DIR}/winnow/*.cuh ${SOURCE_DIR}/winnow/*.h
  ${SOURCE_DIR}/winnow/*.cc ${SOURCE_DIR}/tools/*.cu ${SOURCE_DIR}/tools/*.cuh)
list(FILTER files EXCLUDE REGEX "^winnow/(core|device)/")  # no kernels stand in core
list(LENGTH files count)
if(count LESS 100)
  message(FATAL_ERROR "Only ${count} sources were found in ${SOURCE_DIR}: nothing is checked.")
endif()
set(found "")
foreach(file IN LISTS files)
  file(STRINGS ${SOURCE_DIR}/${file} lines REGEX "(^|[^A-Za-z0-9_])(asm|__asm__|__shared__)([^A-Za-z0-9_]|$)")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "//.*" "" code "${line}")
    if(code MATCHES "(^|[^A-Za-z0-9_])(asm|__asm__|__shared__)([^A-Za-z0-9_]|$)")
      string(APPEND found "  ${file}: ${line}\n")
    endif()
  endforeach()
endforeach()
if(found)
  message(FATAL_ERROR "PTX instructions and shared memory outside winnow/device:\n${found}"
    "A PTX instruction gets a wrapper in winnow/device/{common,sm80,sm90,sm100}; dynamic shared memory comes "
    "from dynamic_shared(), and WINNOW_BLOCK_SHARED declares static shared objects.")
endif()

# Absent tensors are told from empty ones in one place: Rows::present() (core/rows.h), which relies on the
# rule of views that an empty tensor has an address, too.
foreach(file IN LISTS files)
  file(STRINGS ${SOURCE_DIR}/${file} lines REGEX "\\.data(\\(\\))? *[!=]= *nullptr")
  if(lines AND NOT file MATCHES "^winnow/(python|simulator)/|_(test|gpu_test)\\.cc$")
    string(APPEND found "  ${file}: ${lines}\n")
  endif()
endforeach()
if(found)
  message(FATAL_ERROR "A tensor's pointer says whether it is present; ask present():\n${found}")
endif()

# Numbers in texts that other processes have written come from untrusted_number(), within bounds. The other files that
# may read numbers read the environment and /proc.
set(reads_numbers "transport/(untrusted|deadline)|rendezvous/(launch_environment|process)")
foreach(file IN LISTS files)
  if(NOT file MATCHES "^winnow/expert_parallel/" OR file MATCHES "/testing/|_(test|soak)\\.cc$|/(${reads_numbers})\\.cc$")
    continue()
  endif()
  file(STRINGS ${SOURCE_DIR}/${file} lines REGEX "from_chars|[^a-z](sto[idlu]|strto|ato[fil]|s?scanf|istringstream)")
  if(lines)
    string(APPEND found "  ${file}: ${lines}\n")
  endif()
endforeach()
if(found)
  message(FATAL_ERROR "A text of another process is read as a number; ask untrusted_number():\n${found}")
endif()

# What only one of the two compilers sees: conditions on it, and names of the simulator.
list(FILTER files INCLUDE REGEX "\\.(cu|cuh)$")
list(FILTER files EXCLUDE REGEX "^winnow/simulator/")
list(LENGTH files count)
if(count LESS 30)
  message(FATAL_ERROR "Only ${count} kernels were found in ${SOURCE_DIR}: nothing is checked.")
endif()
foreach(file IN LISTS files)
  file(STRINGS ${SOURCE_DIR}/${file} lines
    REGEX "^ *#.*(__CUDACC__|__CUDA_ARCH__|__NVCC__|__GNUC__|[Ss][Ii][Mm][Uu][Ll][Aa])|simulator::|WINNOW_SIMULA")
  foreach(line IN LISTS lines)
    string(APPEND found "  ${file}: ${line}\n")
  endforeach()
endforeach()
if(found)
  message(FATAL_ERROR "Kernels are the same for a GPU and for the simulator:\n${found}")
endif()

# Every device function of winnow/device is called in one of the conformance tests' micro-kernels.
file(GLOB micro_kernels ${SOURCE_DIR}/winnow/simulator/conformance_*.cu)
set(called "")
foreach(file IN LISTS micro_kernels)
  file(READ ${file} text)
  string(APPEND called "${text}")
endforeach()
file(GLOB wrappers RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/winnow/device/*/*.cuh)
set(count 0)
foreach(file IN LISTS wrappers)
  file(READ ${SOURCE_DIR}/${file} text)
  string(REGEX REPLACE "[][;]" " " text "${text}")  # they mean something in CMake's lists
  string(REGEX MATCHALL "__device__ __forceinline__ [^(]*\\(" functions "${text}")
  foreach(function IN LISTS functions)
    string(REGEX REPLACE ".*[^A-Za-z0-9_]([A-Za-z0-9_]+)\\($" "\\1" name "${function}")
    math(EXPR count "${count} + 1")
    if(NOT called MATCHES "[^A-Za-z0-9_]${name}[<(]")
      string(APPEND found "  ${file}: ${name}()\n")
    endif()
  endforeach()
endforeach()
if(count LESS 100)
  message(FATAL_ERROR "Only ${count} wrappers were found in ${SOURCE_DIR}: nothing is checked.")
endif()
if(found)
  message(FATAL_ERROR "Wrappers that no micro-kernel calls (winnow/simulator/conformance_*.cu):\n${found}"
    "One shows that the simulator and a GPU do the same.")
endif()
