# How Winnow's own code is compiled, and the instruction sets of the CPU backend.

option(WINNOW_WERROR "Turn warnings into errors" OFF)
option(WINNOW_STATIC_RUNTIME "Link the C++ library into every object, for wheels that run elsewhere" OFF)
option(WINNOW_PRECOMPILE "Parse headers that many files share once: for builds from scratch" OFF)
option(WINNOW_CCACHE "Compile through ccache where it is installed" OFF)
if(WINNOW_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(WINNOW_CCACHE_PROGRAM ccache)
  if(WINNOW_CCACHE_PROGRAM)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${WINNOW_CCACHE_PROGRAM})
  endif()
endif()
if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
  set(WINNOW_PRECOMPILE OFF)  # it would not find again what it has compiled
endif()
set(WINNOW_SANITIZE "" CACHE STRING "Sanitizers for everything, e.g. address,undefined or thread")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(default_isas "x86_64_v4;x86_64_v3;baseline")
else()
  set(default_isas "baseline")
endif()
set(WINNOW_CPU_ISAS "all" CACHE STRING
    "Instruction sets that the CPU backend is built for, best first; all; native is the best of this processor")
# The flags of each; select.cc knows which processors have them.
# g++ 12 warns about its own AVX-512 header wherever Eigen uses it.
set(WINNOW_CPU_FLAGS_x86_64_v4 -march=x86-64-v4 -Wno-maybe-uninitialized)
set(WINNOW_CPU_FLAGS_x86_64_v3 -march=x86-64-v3)
set(WINNOW_CPU_FLAGS_baseline)

# The best set of this processor: what a compiler may use for it contains all that it may use for the set.
function(read_features result)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} ${ARGN} -dM -E -x c++ /dev/null
    OUTPUT_VARIABLE macros COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "__(AVX|FMA|BMI)[A-Z0-9]*__" features "${macros}")
  set(${result} ${features} PARENT_SCOPE)
endfunction()
set(WINNOW_NATIVE_ISA baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  read_features(here -march=native)
  foreach(isa IN ITEMS x86_64_v3 x86_64_v4)
    read_features(missing ${WINNOW_CPU_FLAGS_${isa}})
    list(REMOVE_ITEM missing ${here})
    if(NOT missing)
      set(WINNOW_NATIVE_ISA ${isa})
    endif()
  endforeach()
endif()
if(WINNOW_CPU_ISAS STREQUAL "all")
  set(WINNOW_CPU_ISAS ${default_isas})
elseif("native" IN_LIST WINNOW_CPU_ISAS)
  list(TRANSFORM WINNOW_CPU_ISAS REPLACE "^native$" ${WINNOW_NATIVE_ISA})
  list(REMOVE_DUPLICATES WINNOW_CPU_ISAS)
  message(STATUS "CPU backend: for ${WINNOW_CPU_ISAS} alone")
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

if(WINNOW_STATIC_RUNTIME)
  # Without what nobody calls, of which some wants the newest C library.
  add_link_options($<HOST_LINK:-static-libstdc++> LINKER:--gc-sections)
endif()

find_package(Threads REQUIRED)
find_package(Eigen3 3.4 REQUIRED NO_MODULE)

# Warnings and language level for a target of this repository.
function(winnow_compile target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/generated)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow $<$<BOOL:${WINNOW_WERROR}>:-Werror>)
  if(WINNOW_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=${WINNOW_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    target_link_options(${target} PRIVATE -fsanitize=${WINNOW_SANITIZE})
  endif()
  if(WINNOW_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# GCC 12 takes strings that inline functions of precompiled headers move for writes out of bounds.
set(precompiled_options "")
if(WINNOW_PRECOMPILE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(precompiled_options -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow)
endif()

# Headers that most files of a target include. Not by default: a file that does not include what it uses would
# compile.
function(winnow_precompile target)
  if(WINNOW_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE ${ARGN})
    target_compile_options(${target} PRIVATE ${precompiled_options})
  endif()
endfunction()

# The precompiled headers of another target, which has the same options.
function(winnow_precompile_as target other)
  if(WINNOW_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM ${other})
    target_compile_options(${target} PRIVATE ${precompiled_options})
  endif()
endfunction()

# Compiles the files of a target by groups, in builds from scratch: what they have in common costs once, which is half of
# the time. No group has two files of a family, as those may give the same name to things of their own.
function(winnow_compile_together target)
  if(NOT WINNOW_PRECOMPILE)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "^${PROJECT_SOURCE_DIR}/winnow/")
  foreach(source IN LISTS sources)
    string(REGEX REPLACE "^${PROJECT_SOURCE_DIR}/winnow/([^/]*)/.*" "\\1" family ${source})
    math(EXPR of_${family} "0${of_${family}} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${of_${family}})
  endforeach()
endfunction()

# Code that judges the library: AddressSanitizer watches what it hands over, while UBSan, a quarter of the
# compiler's time, is for the library.
function(winnow_judges target)
  if(WINNOW_SANITIZE)
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
endfunction()

# Code whose own speed does not matter. Under sanitizers it is not optimized at all: half the time of such a build
# went into optimizing assertions.
function(winnow_compile_quickly target)
  winnow_compile(${target})
  winnow_judges(${target})
  set(level -O1)
  if(WINNOW_SANITIZE)
    set(level -O0)
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${level}>)
endfunction()

# A program of GoogleTest's.
function(winnow_gtest_program target)
  winnow_compile_quickly(${target})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${precompiled_options}>")
  target_link_libraries(${target} PRIVATE GTest::gmock GTest::gtest_main)
endfunction()

# Labels of a program's tests for `ctest -L`: their room ("sparse_mla/forward"), their kind (unit, simulator, gpu,
# soak or program) and others. The target tests-sparse_mla-forward, which `make try` builds, is all programs of a
# room that need no GPU. (A list cannot be told to gtest_discover_tests.)
function(winnow_labels target room kind)
  set(file ${CMAKE_CURRENT_BINARY_DIR}/${target}_labels.cmake)
  file(WRITE ${file} "if(${target}_TESTS)
  set_tests_properties(\${${target}_TESTS} PROPERTIES LABELS \"${room};${kind};${ARGN}\")\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${file})
  while(room AND NOT kind STREQUAL "gpu")
    string(REPLACE "/" "-" name tests-${room})
    if(NOT TARGET ${name})
      add_custom_target(${name})
    endif()
    add_dependencies(${name} ${target})
    get_filename_component(room "${room}" DIRECTORY)
  endwhile()
endfunction()

# Runs a program's tests, or those of a filter, in five parts of about as many tests. Each has tests of all kinds, as
# tables go through two or four dtypes in turn.
function(winnow_gtest_in_parts target filter labels)
  foreach(part RANGE 4)
    add_test(NAME ${target}.${part} COMMAND ${target} ${filter})
    set_tests_properties(${target}.${part} PROPERTIES TIMEOUT ${WINNOW_TEST_TIMEOUT} LABELS "${labels}"
      ENVIRONMENT "GTEST_TOTAL_SHARDS=5;GTEST_SHARD_INDEX=${part}")
  endforeach()
endfunction()

# The same with tests, which CTest runs each by itself; the other arguments are for winnow_labels. But cases of a
# table take less time than their processes would: they run in parts, as under AddressSanitizer, where a process
# takes as long to start as most tests, all of a program do. A failure names its test there, too.
function(winnow_gtest target)
  winnow_gtest_program(${target})
  if(WINNOW_PRECOMPILE)
    if(NOT TARGET gtest_headers)  # without tests: a place for what all have in common
      file(WRITE ${PROJECT_BINARY_DIR}/gtest_headers.cc "")
      add_executable(gtest_headers ${PROJECT_BINARY_DIR}/gtest_headers.cc)
      winnow_gtest_program(gtest_headers)
      target_precompile_headers(gtest_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h>
        ${PROJECT_SOURCE_DIR}/winnow/testing/expect.h)
    endif()
    target_precompile_headers(${target} REUSE_FROM gtest_headers)
  endif()
  get_target_property(sources ${target} SOURCES)
  list(GET sources 0 source)
  file(STRINGS ${source} table REGEX "^WINNOW_CASE_TABLE" LIMIT_COUNT 1)
  set(filter "*")
  if(table)
    set(filter "-Table/*")
  endif()
  if(WINNOW_SANITIZE MATCHES "address")
    winnow_gtest_in_parts(${target} "" "${ARGN}")
  else()
    if(table)
      winnow_gtest_in_parts(${target} "--gtest_filter=Table/*" "${ARGN}")
    endif()
    gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST TEST_FILTER "${filter}"
      PROPERTIES TIMEOUT ${WINNOW_TEST_TIMEOUT})
  endif()
  winnow_labels(${target} ${ARGN})
endfunction()

# What a shared object shows is what a linker script says.
function(winnow_exports target map)
  target_link_options(${target} PRIVATE -Wl,--version-script=${map})
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${map})
endfunction()

# Where a program or library looks for others: places relative to itself, the same in the build tree as
# where it is installed. (CMake would write other paths into the build tree, to be replaced, and ends those
# with an empty element, which means the current directory.)
function(winnow_rpath target)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${ARGN}" BUILD_WITH_INSTALL_RPATH ON)
endfunction()
