# SPDX-License-Identifier: Apache-2.0
# Finds what the project builds on. libtorch comes from Torch_DIR when given, else from the .venv that the scripts make.
find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without this sloppiness ccache passes by whatever uses a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${TESSERA_CCACHE})
endif()

if(NOT Torch_DIR AND DEFINED ENV{Torch_DIR})
  set(Torch_DIR $ENV{Torch_DIR} CACHE PATH "Folder of TorchConfig.cmake")
elseif(NOT Torch_DIR)
  file(GLOB tessera_venv_torch ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
  list(APPEND CMAKE_PREFIX_PATH ${tessera_venv_torch})
endif()
include(TesseraTorch)
tessera_find_torch()
if(NOT Torch_FOUND)
  message(FATAL_ERROR
    "libtorch was not found; run scripts/test.sh, which makes a .venv with it, or pass -DTorch_DIR=<libtorch>/share/cmake/Torch")
endif()
if(Torch_VERSION VERSION_LESS 2.11 OR Torch_VERSION VERSION_GREATER_EQUAL 2.15)
  message(FATAL_ERROR
    "libtorch is ${Torch_VERSION} (${Torch_DIR}), Tessera needs 2.11 to 2.14; point Torch_DIR at one of these")
endif()
get_filename_component(TESSERA_TORCH_LIB_DIR ${Torch_DIR}/../../../lib ABSOLUTE)
message(STATUS "libtorch ${Torch_VERSION} in ${TESSERA_TORCH_LIB_DIR}")

find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_path(GLOO_INCLUDE_DIR gloo/config.h REQUIRED)
if(TESSERA_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(TESSERA_BUILD_TESTS OR TESSERA_UNITY)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
endif()
if(TESSERA_BUILD_BENCHMARKS)
  find_package(benchmark REQUIRED)
endif()

# libtorch ships headers of another fmt than the one spdlog was built with, and its folder is searched before the system's. This folder,
# searched before both, holds a link to the right ones.
get_target_property(tessera_fmt_include fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/include)
file(CREATE_LINK ${tessera_fmt_include}/fmt ${CMAKE_BINARY_DIR}/include/fmt SYMBOLIC)

# What every source of the project is compiled with.
add_library(tessera_build INTERFACE)
target_include_directories(tessera_build INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(tessera_build INTERFACE -Wall -Wextra -Wconversion -Wshadow)
if(TESSERA_WERROR)
  # gcc 12 sees overlaps and overflows in std::string that are not there (its bugs 105651 and 105329).
  target_compile_options(tessera_build INTERFACE -Werror -Wno-error=restrict -Wno-error=stringop-overflow -Wno-error=stringop-overread -Wno-error=array-bounds)
endif()
target_compile_definitions(tessera_build INTERFACE TESSERA_VERSION="${PROJECT_VERSION}")
target_link_libraries(tessera_build INTERFACE torch torch_library fmt::fmt spdlog::spdlog nlohmann_json::nlohmann_json)

if(TESSERA_SANITIZE)
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_compile_options(-Wno-maybe-uninitialized) # gcc 12 is often wrong about it in instrumented code
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
endif()
