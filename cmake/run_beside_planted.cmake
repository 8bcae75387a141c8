# Runs the program in a folder where each library that it could look for is a planted one, which
# ends the process with 99 as soon as it is loaded.
#   cmake -DPROGRAM=file -DPLANTED=library -DNAMES=names -DFOLDER=folder -P this
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
foreach(name IN LISTS NAMES)
  configure_file(${PLANTED} ${FOLDER}/${name} COPYONLY)
endforeach()
foreach(argument IN ITEMS --version info)
  execute_process(COMMAND ${PROGRAM} ${argument} WORKING_DIRECTORY ${FOLDER} RESULT_VARIABLE result
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "winnow ${argument} beside planted libraries ended with ${result}:\n${output}")
  endif()
endforeach()
