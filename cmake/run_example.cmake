# Builds an example against the installed package, as a user would, and runs it; without the optimizations that
# take most of the compiler's time.
#   cmake -DEXAMPLE=folder -DBUILD=folder -DPREFIX=folders -DCXX=compiler -DNVCC=compiler or OFF
#         -DEXPECT=regex -P this
string(REPLACE ";" "\\;" PREFIX "${PREFIX}")
foreach(step IN ITEMS configure build run)
  if(step STREQUAL "configure")
    set(command ${CMAKE_COMMAND} -S ${EXAMPLE} -B ${BUILD} -G Ninja -DCMAKE_PREFIX_PATH=${PREFIX}
        -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=${CXX_FLAGS} -DCMAKE_BUILD_TYPE=Release
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" "-DCMAKE_CUDA_FLAGS_RELEASE=-O1 -DNDEBUG"
        -DCMAKE_CUDA_COMPILER=${NVCC})
  elseif(step STREQUAL "build")
    set(command ${CMAKE_COMMAND} --build ${BUILD})
  else()
    get_filename_component(name ${EXAMPLE} NAME)
    set(command ${BUILD}/${name} ${ARGUMENTS})
  endif()
  execute_process(COMMAND ${command} OUTPUT_VARIABLE output ERROR_VARIABLE output
                  RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${step} of ${EXAMPLE} ended with ${result}:\n${output}")
  endif()
endforeach()
message("${output}")
if(NOT output MATCHES "${EXPECT}")
  message(FATAL_ERROR "the output does not match: ${EXPECT}")
endif()
