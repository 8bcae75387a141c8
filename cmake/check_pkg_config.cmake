# Compiles, links and runs a program with the flags that pkg-config gives for the installed package.
#   cmake -DPKG_CONFIG=program -DPC=folder of winnow.pc -DCXX=compiler -DCXX_FLAGS=flags
#         -DSOURCE=file -DPROGRAM=file -P this
set(ENV{PKG_CONFIG_PATH} ${PC})
foreach(what IN ITEMS cflags libs modversion)
  execute_process(COMMAND ${PKG_CONFIG} --${what} winnow OUTPUT_VARIABLE ${what}
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endforeach()
if(NOT modversion MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+$")
  message(FATAL_ERROR "pkg-config gives the version '${modversion}'")
endif()
get_filename_component(folder ${PROGRAM} DIRECTORY)
file(MAKE_DIRECTORY ${folder})
separate_arguments(flags UNIX_COMMAND "${CXX_FLAGS} ${cflags}")
separate_arguments(libraries UNIX_COMMAND "${libs} -Wl,-rpath,${PC}/..")
execute_process(COMMAND ${CXX} -std=c++20 ${flags} ${SOURCE} -o ${PROGRAM} ${libraries}
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
if(NOT output MATCHES "query 0: 2.0   query 1: 7.0")
  message(FATAL_ERROR "the program printed '${output}'")
endif()
