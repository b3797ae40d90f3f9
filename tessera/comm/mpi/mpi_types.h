// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <mpi.h>
#include <tessera/comm/reduce_op.h>

#include <cstddef>

namespace tessera {

// Datatypes and operations of MPI, made once per process; called in an MpiTurn.

// For moving elements of that many bytes: 1, 2, 4, 8 or 16.
MPI_Datatype mpi_type_for_moving(std::size_t element_bytes);

// For reducing them. bfloat16 and float16 are two-byte types of our own.
MPI_Datatype mpi_type_for_reducing(c10::ScalarType dtype);

// MPI's own operation where it does what reduce_kernels.h says, else ours,
// which calls that: min and max of floats pass NaN on, bfloat16 and float16
// add in float32 and round once per pair. kAvg is the sum.
MPI_Op mpi_op(c10::ScalarType dtype, ReduceOp op);

// Frees them all, where they were made.
void free_mpi_types();

} // namespace tessera
