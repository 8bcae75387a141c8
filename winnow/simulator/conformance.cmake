# The conformance tests on a GPU: what the simulator's own run of them expects must hold there too.
winnow_kernels(winnow_conformance 90a-real
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_barrier.cu
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_basic.cu
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_copy.cu
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_matrix.cu
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_mma.cu)
add_executable(conformance_gpu_test
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_basic_test.cc
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_copy_test.cc
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_mma_test.cc
  $<TARGET_OBJECTS:winnow_conformance>)
winnow_gtest(conformance_gpu_test device gpu kernels)
target_link_libraries(conformance_gpu_test PRIVATE winnow::winnow CUDA::cudart_static)

# Those of sm100, for whoever has a Blackwell, and what its machine code must show without one.
if(WINNOW_WITH_SM100)
  winnow_kernels(winnow_conformance_sm100 "100a-real;103a-real"
    ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_sm100.cu)
  add_executable(conformance_sm100_gpu_test
    ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_sm100_test.cc
    $<TARGET_OBJECTS:winnow_conformance_sm100>)
  winnow_gtest(conformance_sm100_gpu_test device gpu kernels)
  target_compile_definitions(conformance_sm100_gpu_test PRIVATE WINNOW_CONFORMANCE_ON_GPU=1)
  target_include_directories(conformance_sm100_gpu_test SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(conformance_sm100_gpu_test PRIVATE winnow::winnow CUDA::cudart_static)

  # winnow_machine_code_test(NAME target kernel=pattern,pattern ...)
  function(winnow_machine_code_test name target)
    string(REPLACE ";" "|" expected "${ARGN}")
    add_test(NAME ${name}
      COMMAND ${CMAKE_COMMAND} -DOBJECT=$<TARGET_OBJECTS:${target}> -DARCHITECTURE=sm_100a
        "-DEXPECT=${expected}" -DSOURCE_DIR=${PROJECT_SOURCE_DIR}
        -P ${PROJECT_SOURCE_DIR}/cmake/check_sass.cmake)
    set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED" LABELS "machine_code;kernels")
  endfunction()
  set(pair "UTCHMMA[.]2CTA,UTCBAR[.]2CTA[.]MULTICAST,UTMALDG[.0-9D]*[.]2CTA,LDTM,UCGABAR_WAIT")
  winnow_machine_code_test(sm100_backward_machine_code winnow_sm100
    "scores_kernel=${pair},UTMALDG[.]2D[.]GATHER4[.]2CTA"
    "dq_kernel=${pair},UTMALDG[.]2D[.]GATHER4[.]2CTA"
    "dkv_kernel=${pair},LDTM[.]16dp256bit[.]x4,RED")
  winnow_machine_code_test(sm100_wrappers_machine_code winnow_conformance_sm100
    "product_kernelILi2=UTCHMMA[.]2CTA,UTCBAR[.]2CTA[.]MULTICAST,LDTM[.]x16"
    "product_kernelILi1=UTCHMMA,UTCBAR,LDTM[.]x16"
    "moves_kernel=STTM[.]x16,LDTM[.]x16,LDTM[.]16dp256bit[.]x4"
    "copy_kernel=UTCCP,STG[.]E[.]ENL2[.]256"
    "gather_kernel=UTMALDG[.]2D[.]GATHER4[.]2CTA,UTMALDG[.]2D[.]MULTICAST[.]2CTA,UTMALDG[.]2D[.]2CTA,UTMALDG[.]3D[.]2CTA")
endif()
