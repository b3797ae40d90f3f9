# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts where, and the package that find_package(tessera) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# libtorch's folder is spelled out: CMake leaves out of the link path whatever lies inside the source tree, as .venv does.
set_target_properties(tessera PROPERTIES INSTALL_RPATH ${TESSERA_TORCH_LIB_DIR})
set_target_properties(tessera_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${TESSERA_TORCH_LIB_DIR}")
install(TARGETS tessera EXPORT tesseraTargets FILE_SET HEADERS)
install(TARGETS tessera_cli)

set(tessera_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${tessera_package_dir})
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/tesseraConfig.cmake.in ${CMAKE_BINARY_DIR}/tesseraConfig.cmake INSTALL_DESTINATION ${tessera_package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_BINARY_DIR}/tesseraConfig.cmake ${CMAKE_BINARY_DIR}/tesseraConfigVersion.cmake cmake/TesseraTorch.cmake DESTINATION ${tessera_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
