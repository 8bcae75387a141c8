# The conformance tests on a GPU: what the simulator's own run of them expects must hold there too.
winnow_kernels(winnow_conformance 90a-real
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_barrier.cu
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_basic.cu
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_copy.cu
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_matrix.cu)
add_executable(conformance_gpu_test
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_basic_test.cc
  ${PROJECT_SOURCE_DIR}/winnow/simulator/conformance_copy_test.cc
  $<TARGET_OBJECTS:winnow_conformance>)
winnow_compile(conformance_gpu_test)
target_link_libraries(conformance_gpu_test PRIVATE
  winnow::winnow GTest::gmock GTest::gtest_main CUDA::cudart_static)
gtest_discover_tests(conformance_gpu_test DISCOVERY_MODE PRE_TEST
  PROPERTIES TIMEOUT ${WINNOW_TEST_TIMEOUT})
