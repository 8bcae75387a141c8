# Fails where a file of winnow/ includes one that stands above it:
#   cmake -DROOT=<the repository> -P cmake/check_includes.cmake
cmake_minimum_required(VERSION 3.25)

# The rooms, level by level from the lowest. A file may include its own room and the levels below:
# of its own family (the first folder of its room) and of the shared families. A room that is not
# listed stands on the first level above its family's own files.
set(shared cache core cpu device)
set(levels
  "core"
  "cpu device/common"
  "cache device/sm80 device/sm90 simulator/instructions"
  "device/sm100"
  "compressor expert_parallel indexer paged_xl simulator sparse_mla"
  "expert_parallel/queue_buffers expert_parallel/routing"
  "expert_parallel/transport indexer/topk sparse_mla/backward sparse_mla/distribution"
  "expert_parallel/memory expert_parallel/rendezvous indexer/topk_paged"
  "expert_parallel/cuda expert_parallel/transport/mapped indexer/scores_paged"
  "expert_parallel/exchange"
  "expert_parallel/layer expert_parallel/transport/in_process expert_parallel/transport/nvshmem expert_parallel/transport/shared_memory"
  "expert_parallel/combine expert_parallel/dispatch expert_parallel/layout expert_parallel/notify"
  "expert_parallel/low_latency"
  "expert_parallel/all_to_all")
# These know every operation: the table of a CPU module, and the header that includes all others.
set(exempt cpu/module.cc winnow.h)
# Tests, what they and benchmarks share, the simulator, and the Python bindings. They may include every level of
# their family, and no file of the library may include them.
set(harness "(^|/)(testing|python|simulator)/|(^|/)test_[a-z_]+\\.h$|(^|/|_)(bench|cases|oracle|py|soak|test)\\.(cc|h)$")

set(level 0)
foreach(rooms IN LISTS levels)
  math(EXPR level "${level} + 1")
  separate_arguments(rooms)
  foreach(room IN LISTS rooms)
    set(level_of_${room} ${level})
  endforeach()
endforeach()

# A room of a family that is not listed: the level above the family.
macro(place room)
  if(NOT DEFINED level_of_${room})
    string(REGEX REPLACE "/.*" "" family_of_room ${room})
    math(EXPR level_of_${room} "${level_of_${family_of_room}} + 1")
  endif()
endmacro()

set(wrong "")
set(count 0)
file(GLOB_RECURSE files RELATIVE ${ROOT}/winnow ${ROOT}/winnow/*.h ${ROOT}/winnow/*.cuh
     ${ROOT}/winnow/*.cc ${ROOT}/winnow/*.cu)
foreach(file IN LISTS files)
  if(file IN_LIST exempt)
    continue()
  endif()
  get_filename_component(room ${file} DIRECTORY)
  string(REGEX REPLACE "/.*" "" family ${file})
  place(${room})
  file(STRINGS ${ROOT}/winnow/${file} lines REGEX "^ *# *include \"winnow/")
  foreach(line IN LISTS lines)
    math(EXPR count "${count} + 1")
    string(REGEX REPLACE "^[^\"]*\"winnow/([^\"]*)\".*" "\\1" included "${line}")
    get_filename_component(other_room ${included} DIRECTORY)
    string(REGEX REPLACE "/.*" "" other ${included})
    place(${other_room})
    set(why "")
    if(file MATCHES "${harness}")
      if(family MATCHES "^(compressor|expert_parallel|indexer|paged_xl|sparse_mla)$" AND
         other MATCHES "^(compressor|expert_parallel|indexer|paged_xl|sparse_mla)$" AND NOT other STREQUAL family)
        set(why "is of another family")
      endif()
    elseif(included MATCHES "${harness}")
      set(why "is for tests, benchmarks or bindings")
    elseif(room STREQUAL other_room)
    elseif(NOT other STREQUAL family AND NOT other IN_LIST shared)
      set(why "is of another family")
    elseif(NOT level_of_${other_room} LESS level_of_${room})
      set(why "does not stand below it")
    endif()
    if(why)
      string(APPEND wrong "  winnow/${file} includes winnow/${included}, which ${why}\n")
    endif()
  endforeach()
endforeach()
if(count LESS 1000)
  message(FATAL_ERROR "only ${count} includes were found in ${ROOT}/winnow")
elseif(wrong)
  message(FATAL_ERROR "Includes go downwards only:\n${wrong}")
endif()
message(STATUS "${count} includes, and none goes up")
