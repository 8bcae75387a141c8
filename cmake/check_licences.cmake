# Fails where `cmake --install` left out a text of the licences, or another one than the checkout's.
#   cmake -DSOURCE=checkout -DFOLDER=where they are installed -P this
foreach(text IN ITEMS LICENSE NOTICE THIRD_PARTY)
  execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files ${SOURCE}/${text} ${FOLDER}/${text}
                  COMMAND_ERROR_IS_FATAL ANY)
endforeach()
