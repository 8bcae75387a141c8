# Fails if a kernel is in no simulator test: a file of kernels that no library of simulated kernels is made of, or a
# __global__ function of which the libraries have no instance. Run as
#   cmake -DSOURCE_DIR=<repository> -DSOURCES=<files of the libraries, separated by |> -DLIBRARIES=<the libraries, too>
#         -DNM=<nm> -P check_simulated.cmake
cmake_minimum_required(VERSION 3.25)

# Rooms whose kernels are not simulated yet, and why. A room that is simulated may not stand here.
set(exceptions "")
# Kernels outside of the library: of a program and of an example, and a module that only NVSHMEM's compiler takes.
set(outside "^(examples/train_indexer/cuda|tools/winnow/l2_flush|winnow/.*nvshmem_module)\\.cu$")

# A kernel of NVSHMEM's fabric alone.
set(of_nvshmem quiet_kernel)

string(REPLACE "|" ";" SOURCES "${SOURCES}")
string(REPLACE "|" ";" LIBRARIES "${LIBRARIES}")
execute_process(COMMAND ${NM} --demangle --defined-only ${LIBRARIES}
  OUTPUT_VARIABLE symbols ERROR_QUIET RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${NM} reads none of ${LIBRARIES}: ${status}")
endif()
string(REGEX REPLACE "[][;]" " " symbols "${symbols}")  # they mean something in CMake's lists

file(GLOB_RECURSE files RELATIVE ${SOURCE_DIR}
  ${SOURCE_DIR}/winnow/*.cu ${SOURCE_DIR}/winnow/*.cuh ${SOURCE_DIR}/examples/*.cu ${SOURCE_DIR}/tools/*.cu)
list(FILTER files EXCLUDE REGEX "^winnow/simulator/|${outside}")
set(found "")
set(done "")
set(count 0)
foreach(file IN LISTS files)
  set(excepted "")
  foreach(exception IN LISTS exceptions)
    string(REGEX REPLACE ":.*" "" room "${exception}")
    if(file MATCHES "^winnow/${room}/")
      set(excepted ${room})
    endif()
  endforeach()
  if(file MATCHES "\\.cu$")
    if("${SOURCE_DIR}/${file}" IN_LIST SOURCES)
      if(excepted)
        list(APPEND done ${excepted})
      endif()
    elseif(NOT excepted)
      string(APPEND found "  ${file}\n")
    endif()
  endif()

  file(READ ${SOURCE_DIR}/${file} text)
  string(REGEX REPLACE "[][;]" " " text "${text}")
  string(REGEX REPLACE "__launch_bounds__\\(([^()]|\\([^()]*\\))*\\)" "" text "${text}")
  string(REGEX MATCHALL "__global__[^({]*\\(" kernels "${text}")
  string(REGEX MATCH "namespace (winnow::[a-z0-9_:]+) {" namespace "${text}")
  set(namespace "${CMAKE_MATCH_1}")
  foreach(kernel IN LISTS kernels)
    string(REGEX REPLACE ".*[^A-Za-z0-9_]([A-Za-z0-9_]+) *\\($" "\\1" name "${kernel}")
    math(EXPR count "${count} + 1")
    if(NOT excepted AND NOT name IN_LIST of_nvshmem AND NOT symbols MATCHES "${namespace}::([a-z0-9_]+::|\\(anonymous namespace\\)::)*${name}[<(]")
      string(APPEND found "  ${file}: ${name}()\n")
    endif()
  endforeach()
endforeach()
if(count LESS 40)
  message(FATAL_ERROR "Only ${count} kernels were found in ${SOURCE_DIR}: nothing is checked.")
endif()
if(found)
  message(FATAL_ERROR "Kernels that are in no test of the simulator:\n${found}"
    "Add them to winnow_simulated_kernels() and to a winnow_simulator_test() in winnow/simulator.")
endif()
list(REMOVE_DUPLICATES done)
if(done)
  message(FATAL_ERROR "${done}: simulated, and an exception in cmake/check_simulated.cmake nevertheless.")
endif()
