# `cmake --install`: the libraries, the public headers, the CMake package, what pkg-config reads, and
# the program.
include(CMakePackageConfigHelpers)

option(WINNOW_STATIC_LIBRARY "Also make libwinnow_static.a, the whole library as one archive" OFF)

set(targets winnow)
foreach(isa IN LISTS WINNOW_CPU_ISAS)
  list(APPEND targets winnow_cpu_${isa})
endforeach()
install(TARGETS ${targets} EXPORT winnow LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
# Its test needs it, installed or not.
if(WINNOW_STATIC_LIBRARY OR (WINNOW_TESTS AND NOT WINNOW_SANITIZE))
  include(WinnowStatic)
endif()
if(WINNOW_STATIC_LIBRARY)
  install(TARGETS winnow_static EXPORT winnow ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET winnow_nvshmem)  # opened at run time: nobody links it
  install(TARGETS winnow_nvshmem LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
endif()
if(TARGET winnow_cli)
  install(TARGETS winnow_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

get_property(headers GLOBAL PROPERTY WINNOW_PUBLIC_HEADERS)
foreach(header IN LISTS headers)
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${PROJECT_SOURCE_DIR}/winnow/${header}
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/winnow/${folder})
endforeach()
install(FILES ${PROJECT_BINARY_DIR}/generated/winnow/core/version.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/winnow/core)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/winnow)
install(EXPORT winnow NAMESPACE winnow:: FILE winnow-targets.cmake DESTINATION ${package_folder})
file(WRITE ${PROJECT_BINARY_DIR}/winnow-config.cmake.in
     "@PACKAGE_INIT@\ninclude(CMakeFindDependencyMacro)\nfind_dependency(Threads)\ninclude(\"\${CMAKE_CURRENT_LIST_DIR}/winnow-targets.cmake\")\n")
configure_package_config_file(${PROJECT_BINARY_DIR}/winnow-config.cmake.in
  ${PROJECT_BINARY_DIR}/winnow-config.cmake INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/winnow-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/winnow-config.cmake
  ${PROJECT_BINARY_DIR}/winnow-config-version.cmake DESTINATION ${package_folder})

# Relative to where the file lies, so that the installed folder can be moved.
file(RELATIVE_PATH prefix_from_pc /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${PROJECT_SOURCE_DIR}/cmake/winnow.pc.in ${PROJECT_BINARY_DIR}/winnow.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/winnow.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/NOTICE
  ${PROJECT_SOURCE_DIR}/THIRD_PARTY DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/winnow)
