# SPDX-License-Identifier: Apache-2.0
# What the plug-in for GPUs is compiled with, where libtorch has CUDA: the target tessera_with_nccl. The parts of CUDA come from the folder
# beside libtorch into which pip puts them, else from a toolkit. The library itself needs none of them.
option(TESSERA_NCCL "Build the plug-in for NCCL where libtorch has CUDA" ON)

function(tessera_find_nccl)
  get_filename_component(pip ${TESSERA_TORCH_LIB_DIR}/../.. ABSOLUTE)
  file(GLOB folders ${pip}/nvidia/cu[0-9]* ${pip}/nvidia/cuda_runtime ${pip}/nvidia/cuda_cccl ${pip}/nvidia/cuda_nvcc ${pip}/nvidia/nccl)
  list(APPEND folders ${CUDAToolkit_ROOT} ${CUDA_TOOLKIT_ROOT_DIR} $ENV{CUDA_HOME} /usr/local/cuda)
  find_path(TESSERA_NCCL_INCLUDE_DIR nccl.h HINTS ${folders} PATH_SUFFIXES include)
  find_path(TESSERA_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${folders} PATH_SUFFIXES include)
  find_path(TESSERA_CUDA_CRT_INCLUDE_DIR crt/host_defines.h HINTS ${folders} PATH_SUFFIXES include)
  find_path(TESSERA_CUDA_CCCL_INCLUDE_DIR nv/target HINTS ${folders} PATH_SUFFIXES include/cccl include)
  find_library(TESSERA_CUDART NAMES libcudart.so.13 libcudart.so.12 cudart NAMES_PER_DIR HINTS ${folders} PATH_SUFFIXES lib lib64)
  foreach(part NCCL_INCLUDE_DIR CUDA_INCLUDE_DIR CUDA_CRT_INCLUDE_DIR CUDA_CCCL_INCLUDE_DIR CUDART)
    if(NOT TESSERA_${part})
      list(APPEND missing TESSERA_${part})
    endif()
  endforeach()
  if(missing)
    message(WARNING
      "libtorch has CUDA, but groups on GPUs are left out: ${missing} not found. Install pip's cuda-toolkit[cudart,crt,cccl] of libtorch's CUDA "
      "version beside libtorch, or pass -DCUDA_TOOLKIT_ROOT_DIR=<toolkit>; or turn this off with -DTESSERA_NCCL=OFF")
    return()
  endif()
  add_library(tessera_with_nccl INTERFACE)
  target_include_directories(tessera_with_nccl SYSTEM INTERFACE
    ${TESSERA_NCCL_INCLUDE_DIR} ${TESSERA_CUDA_INCLUDE_DIR} ${TESSERA_CUDA_CRT_INCLUDE_DIR} ${TESSERA_CUDA_CCCL_INCLUDE_DIR})
  target_link_libraries(tessera_with_nccl INTERFACE torch_cuda ${TESSERA_CUDART})
  message(STATUS "NCCL: ${TESSERA_NCCL_INCLUDE_DIR}, CUDA: ${TESSERA_CUDA_INCLUDE_DIR}")
endfunction()

if(TESSERA_NCCL AND TARGET torch_cuda)
  tessera_find_nccl()
endif()
