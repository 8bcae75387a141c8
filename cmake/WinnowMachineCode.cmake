# Tests of the kernels' machine code, whatever the operation: check_descriptors.cmake on the objects, and on
# two texts of a disassembler, of which it must refuse the one.
function(winnow_descriptors_test name code)
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} "-DCODE=${code}" -DSOURCE_DIR=${PROJECT_SOURCE_DIR}
           -P ${PROJECT_SOURCE_DIR}/cmake/check_descriptors.cmake)
  set_tests_properties(${name} PROPERTIES LABELS "machine_code;kernels")
endfunction()

set(good [[
		Function : good_kernel
  /*0a10*/  LDGSTS.E.BYPASS.128 [R6+UR5+0x2c000], desc[UR16][R4.64+0x80], P0 ;  /* 0x2c0080 */
]])
set(bad [[
		Function : bad_kernel
  /*0a20*/  LDGSTS.E.BYPASS.LTC256B.128 [R6+UR0], desc[UR1][R4.64], P0 ;  /* 0x000000 */
]])
file(WRITE ${PROJECT_BINARY_DIR}/good.sass "${good}")
file(WRITE ${PROJECT_BINARY_DIR}/bad.sass "${good}${bad}")
winnow_descriptors_test(descriptors_good ${PROJECT_BINARY_DIR}/good.sass)
set_tests_properties(descriptors_good PROPERTIES PASS_REGULAR_EXPRESSION "^1 kernels are right")
winnow_descriptors_test(descriptors_bad ${PROJECT_BINARY_DIR}/bad.sass)
set_tests_properties(descriptors_bad PROPERTIES
  PASS_REGULAR_EXPRESSION "no GPU executes.*bad_kernel:.*UR1"
  FAIL_REGULAR_EXPRESSION "good_kernel;kernels are right")

if(WINNOW_WITH_CUDA)
  set(objects "")
  foreach(target IN ITEMS winnow_sm90 winnow_sm100 winnow_cuda winnow_cuda80 winnow_expert_parallel)
    if(TARGET ${target})
      list(APPEND objects $<JOIN:$<TARGET_OBJECTS:${target}>,|>)
    endif()
  endforeach()
  list(JOIN objects "|" objects)
  winnow_descriptors_test(descriptors "${objects}")
  set_tests_properties(descriptors PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED")
endif()
if(TARGET winnow_nvshmem)
  winnow_descriptors_test(descriptors_nvshmem $<TARGET_FILE:winnow_nvshmem>)
  set_tests_properties(descriptors_nvshmem PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED")
endif()
