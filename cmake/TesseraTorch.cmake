# SPDX-License-Identifier: Apache-2.0
# Finds libtorch for Tessera and for what is built on it.
#
# Where libtorch has CUDA, its own package file wants CUDA's compiler and the whole toolkit, which code that only calls libtorch does not need.
# So there its targets are taken from it directly.

# Makes what libtorch's targets name and do not define; its callers need nothing of these.
function(tessera_stand_in_for_targets targets_file)
  file(STRINGS ${targets_file} lines REGEX "INTERFACE_LINK_LIBRARIES")
  string(REGEX MATCHALL "[A-Za-z0-9_]+::[A-Za-z0-9_]+" names "${lines}")
  list(REMOVE_DUPLICATES names)
  foreach(name IN LISTS names)
    if(NOT TARGET ${name})
      add_library(${name} INTERFACE IMPORTED GLOBAL)
    endif()
  endforeach()
endfunction()

# Sets Torch_FOUND, Torch_DIR and Torch_VERSION and makes the targets torch and torch_library, and torch_cuda where libtorch has CUDA.
macro(tessera_find_torch)
  find_file(tessera_torch_config TorchConfig.cmake
    HINTS ${Torch_DIR} PATHS ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH PATH_SUFFIXES share/cmake/Torch NO_CACHE)
  get_filename_component(tessera_torch_root "${tessera_torch_config}/../../../.." ABSOLUTE)
  if(tessera_torch_config AND EXISTS ${tessera_torch_root}/lib/libtorch_cuda.so)
    set(Torch_DIR ${tessera_torch_root}/share/cmake/Torch)
    if(NOT TARGET torch)
      set(tessera_torch_targets ${tessera_torch_root}/share/cmake/Caffe2/Caffe2Targets.cmake)
      tessera_stand_in_for_targets(${tessera_torch_targets})
      include(${tessera_torch_targets})
      set_target_properties(torch PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES "${tessera_torch_root}/include;${tessera_torch_root}/include/torch/csrc/api/include")
    endif()
    include(${Torch_DIR}/TorchConfigVersion.cmake)
    set(Torch_VERSION ${PACKAGE_VERSION})
    set(Torch_FOUND TRUE)
  else()
    find_package(Torch QUIET)
  endif()
endmacro()
