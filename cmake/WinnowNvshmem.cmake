# NVSHMEM, for libwinnow_nvshmem: the transport between GPUs of several processes.
#   WINNOW_NVSHMEM=AUTO  built if NVSHMEM is there;  ON  required;  OFF  left out
# NVSHMEM is looked for in the folder (with include/ and lib/) that WINNOW_NVSHMEM_ROOT names, then
# in that of the environment variable NVSHMEM_HOME, then in the wheel nvidia-nvshmem-cu13 of Python.
set(WINNOW_NVSHMEM AUTO CACHE STRING "Build the NVSHMEM transport: AUTO, ON or OFF")
set(WINNOW_NVSHMEM_ROOT "" CACHE PATH "Where NVSHMEM's include and lib are; empty: looked for")

set(WINNOW_WITH_NVSHMEM OFF)
set(nvshmem_obstacle "")
if(WINNOW_NVSHMEM STREQUAL "OFF")
  set(nvshmem_obstacle "WINNOW_NVSHMEM is OFF")
elseif(NOT WINNOW_WITH_CUDA)
  set(nvshmem_obstacle "there are no CUDA kernels in this build")
elseif("$ENV{NVSHMEM_HOME}" MATCHES "^[^/]")
  set(nvshmem_obstacle "the environment variable NVSHMEM_HOME must be an absolute path, and is \"$ENV{NVSHMEM_HOME}\"")
else()
  set(roots ${WINNOW_NVSHMEM_ROOT} $ENV{NVSHMEM_HOME})
  foreach(python IN ITEMS ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/.venv/bin/python python3)
    # In pip's isolated build PYTHONPATH hides the installed packages; python -E ignores it.
    foreach(option IN ITEMS "" -E)
      execute_process(COMMAND ${python} ${option} -c
        "import importlib.util as u; print(*u.find_spec('nvidia.nvshmem').submodule_search_locations)"
        OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status ERROR_QUIET)
      if(status EQUAL 0)
        list(APPEND roots ${root})
      endif()
    endforeach()
  endforeach()
  # The wheel has no libnvshmem_host.so, only libnvshmem_host.so.3.
  find_path(nvshmem_include nvshmem.h PATHS ${roots} PATH_SUFFIXES include
            NO_DEFAULT_PATH NO_CACHE)
  find_file(nvshmem_host NAMES libnvshmem_host.so.3 PATHS ${roots} PATH_SUFFIXES lib lib64
            NO_DEFAULT_PATH NO_CACHE)
  find_file(nvshmem_device NAMES libnvshmem_device.a PATHS ${roots} PATH_SUFFIXES lib lib64
            NO_DEFAULT_PATH NO_CACHE)
  if(nvshmem_include AND nvshmem_host AND nvshmem_device)
    set(WINNOW_WITH_NVSHMEM ON)
    add_library(nvshmem_host SHARED IMPORTED)
    set_target_properties(nvshmem_host PROPERTIES IMPORTED_LOCATION ${nvshmem_host})
    add_library(nvshmem_device STATIC IMPORTED)
    set_target_properties(nvshmem_device PROPERTIES IMPORTED_LOCATION ${nvshmem_device}
      IMPORTED_LINK_INTERFACE_LANGUAGES CUDA)
  else()
    set(nvshmem_obstacle "NVSHMEM was not found: pip install nvidia-nvshmem-cu13==3.4.5, or set \
WINNOW_NVSHMEM_ROOT or the environment variable NVSHMEM_HOME")
  endif()
endif()
if(WINNOW_WITH_NVSHMEM)
  message(STATUS "NVSHMEM transport: built with ${nvshmem_include}")
elseif(WINNOW_NVSHMEM STREQUAL "ON")
  message(FATAL_ERROR "WINNOW_NVSHMEM is ON, but ${nvshmem_obstacle}")
else()
  message(STATUS "NVSHMEM transport: not built: ${nvshmem_obstacle}")
endif()

# A library of relocatable device code, linked with NVSHMEM's. It exports only the symbols of `map`.
function(winnow_nvshmem_library target source map)
  add_library(${target} SHARED ${source})
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES 90-real CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
    CUDA_SEPARABLE_COMPILATION ON CUDA_RESOLVE_DEVICE_SYMBOLS ON CUDA_VISIBILITY_PRESET hidden
    POSITION_INDEPENDENT_CODE ON VERSION ${WINNOW_SOVERSION} SOVERSION ${WINNOW_SOVERSION})
  # In a wheel Winnow's libraries lie in site-packages/winnow/lib. In the build tree, `nvshmem`
  # beside the libraries is a link to NVSHMEM's lib folder.
  winnow_rpath(${target} "$ORIGIN" "$ORIGIN/nvshmem" "$ORIGIN/../../nvidia/nvshmem/lib")
  get_filename_component(nvshmem_lib ${nvshmem_host} DIRECTORY)
  file(MAKE_DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY})
  file(CREATE_LINK ${nvshmem_lib} ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/nvshmem SYMBOLIC)
  winnow_exports(${target} ${map})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}
                             ${PROJECT_BINARY_DIR}/generated)
  target_include_directories(${target} SYSTEM PRIVATE ${nvshmem_include})
  target_compile_options(${target} PRIVATE -O3 -DNDEBUG -lineinfo -Xcompiler=-Wall,-Wextra
    $<$<BOOL:${WINNOW_WERROR}>:-Werror=all-warnings>)
  target_link_libraries(${target} PRIVATE nvshmem_device nvshmem_host CUDA::cudart_static)
endfunction()
