# libwinnow_static.a: the library and the modules of its CPU backend as one archive, from the objects of the
# shared ones. The modules are the same functions for several instruction sets, and templates of Eigen and
# of the C++ library are among them, which a linker would merge: a program would run code of AVX-512 on a
# processor without it. So each module becomes one object without groups to merge, which shows its
# table alone. (objcopy leaves unique symbols global: these get a name for each module.) NVSHMEM's module
# stays a shared object, which is opened at run time.
find_program(WINNOW_LD NAMES ld REQUIRED)

set(modules "")
foreach(isa IN LISTS WINNOW_CPU_ISAS)
  set(module ${PROJECT_BINARY_DIR}/static/winnow_cpu_${isa}.o)
  add_custom_command(OUTPUT ${module}
    COMMAND ${WINNOW_LD} -r --force-group-allocation -o ${module} $<TARGET_OBJECTS:winnow_cpu_${isa}>
    COMMAND ${CMAKE_NM} ${module} | awk "$2 == \"u\" {print $3, $3 \"_${isa}\"}" > ${module}.names
    COMMAND ${CMAKE_OBJCOPY} --keep-global-symbol=winnow_cpu_kernels_${isa}
      --redefine-syms=${module}.names ${module}
    DEPENDS $<TARGET_OBJECTS:winnow_cpu_${isa}>
    COMMAND_EXPAND_LISTS VERBATIM)
  list(APPEND modules ${module})
endforeach()
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/static)
set_source_files_properties(${modules} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)

set(kernels "")
foreach(target IN ITEMS winnow_cuda winnow_cuda80 winnow_expert_parallel winnow_sm90 winnow_sm100)
  if(TARGET ${target})
    list(APPEND kernels $<TARGET_OBJECTS:${target}>)
  endif()
endforeach()

add_library(winnow_static STATIC $<TARGET_OBJECTS:winnow> ${kernels} ${modules})
set_target_properties(winnow_static PROPERTIES LINKER_LANGUAGE CXX)
target_compile_features(winnow_static INTERFACE cxx_std_20)
target_include_directories(winnow_static INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/generated>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(winnow_static INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
if(WINNOW_WITH_CUDA)
  # By name: who links the archive needs no CUDA package of CMake, but this one library.
  target_link_libraries(winnow_static INTERFACE cudart_static rt)
  target_link_directories(winnow_static INTERFACE $<BUILD_INTERFACE:${CUDAToolkit_LIBRARY_DIR}>)
endif()

if(WINNOW_TESTS)
  # The smallest program, which runs without any library of Winnow's.
  add_executable(first_call_static ${PROJECT_SOURCE_DIR}/examples/first_call/main.cc)
  target_link_libraries(first_call_static PRIVATE winnow_static)
  add_test(NAME static_library COMMAND first_call_static)
  set_tests_properties(static_library PROPERTIES
    PASS_REGULAR_EXPRESSION "query 0: 2.0   query 1: 7.0" ENVIRONMENT LD_LIBRARY_PATH=)
endif()
