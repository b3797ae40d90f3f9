// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/comm/mpi/mpi_runtime.h>
#include <tessera/comm/mpi/mpi_types.h>
#include <tessera/comm/reduce_kernels.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace tessera {
namespace {

using c10::ScalarType;

// MPI gives a function of ours no more than the datatype, so there is one per
// dtype and operation.
template <ScalarType dtype, ReduceOp op>
void combine(void* in, void* inout, int* count, MPI_Datatype* /*type*/) {
  const std::array<const std::byte*, 2> sources = {
      static_cast<const std::byte*>(in), static_cast<const std::byte*>(inout)};
  reduce_in_order(dtype, op, sources, static_cast<std::byte*>(inout), *count);
}

MPI_Op made(MPI_User_function* function) {
  MPI_Op op = MPI_OP_NULL;
  check_mpi(MPI_Op_create(function, 1, &op), "mpi: MPI_Op_create");
  return op;
}

MPI_Datatype made(int bytes) {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  check_mpi(
      MPI_Type_contiguous(bytes, MPI_BYTE, &type), "mpi: MPI_Type_contiguous");
  check_mpi(MPI_Type_commit(&type), "mpi: MPI_Type_commit");
  return type;
}

struct Types {
  MPI_Datatype bfloat16 = made(2);
  MPI_Datatype float16 = made(2);
  MPI_Datatype of_16_bytes = made(16);
  std::map<std::pair<ScalarType, ReduceOp>, MPI_Op> ops;

  Types() {
    add_minimum_and_maximum<ScalarType::Float>();
    add_minimum_and_maximum<ScalarType::Double>();
    add_minimum_and_maximum<ScalarType::BFloat16>();
    add_minimum_and_maximum<ScalarType::Half>();
    add_sum_and_product<ScalarType::BFloat16>();
    add_sum_and_product<ScalarType::Half>();
  }

  ~Types() {
    for (auto& [key, op] : ops) {
      MPI_Op_free(&op);
    }
    for (MPI_Datatype* type : {&bfloat16, &float16, &of_16_bytes}) {
      MPI_Type_free(type);
    }
  }
  Types(const Types&) = delete;
  Types& operator=(const Types&) = delete;

  template <ScalarType dtype>
  void add_minimum_and_maximum() {
    ops[{dtype, ReduceOp::kMin}] = made(&combine<dtype, ReduceOp::kMin>);
    ops[{dtype, ReduceOp::kMax}] = made(&combine<dtype, ReduceOp::kMax>);
  }
  template <ScalarType dtype>
  void add_sum_and_product() {
    ops[{dtype, ReduceOp::kSum}] = made(&combine<dtype, ReduceOp::kSum>);
    ops[{dtype, ReduceOp::kProduct}] =
        made(&combine<dtype, ReduceOp::kProduct>);
  }
};

// Made at first use, gone before MPI_Finalize.
std::unique_ptr<Types>& slot() {
  static auto* one = new std::unique_ptr<Types>;
  return *one;
}

const Types& types() {
  if (!slot()) {
    slot() = std::make_unique<Types>();
  }
  return *slot();
}

MPI_Op op_of_bools(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kMax ? MPI_BOR : MPI_BAND;
}

} // namespace

void free_mpi_types() {
  slot().reset();
}

MPI_Datatype mpi_type_for_moving(std::size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return MPI_BYTE;
    case 2:
      return MPI_INT16_T;
    case 4:
      return MPI_INT32_T;
    case 8:
      return MPI_INT64_T;
    case 16:
      return types().of_16_bytes;
    default:
      throw UsageError(
          "mpi: elements of " + std::to_string(element_bytes) +
          " bytes cannot be moved; convert the tensor");
  }
}

MPI_Datatype mpi_type_for_reducing(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return MPI_FLOAT;
    case ScalarType::Double:
      return MPI_DOUBLE;
    case ScalarType::BFloat16:
      return types().bfloat16;
    case ScalarType::Half:
      return types().float16;
    case ScalarType::Bool:
    case ScalarType::Byte:
      return MPI_UINT8_T;
    case ScalarType::Char:
      return MPI_INT8_T;
    case ScalarType::Short:
      return MPI_INT16_T;
    case ScalarType::Int:
      return MPI_INT32_T;
    case ScalarType::Long:
      return MPI_INT64_T;
    default:
      throw UsageError(
          std::string("mpi: dtype ") + c10::toString(dtype) +
          " cannot be reduced; convert it first");
  }
}

MPI_Op mpi_op(ScalarType dtype, ReduceOp op) {
  if (dtype == ScalarType::Bool) {
    return op_of_bools(op);
  }
  const ReduceOp plain = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  const auto own = types().ops.find({dtype, plain});
  if (own != types().ops.end()) {
    return own->second;
  }
  switch (plain) {
    case ReduceOp::kMin:
      return MPI_MIN;
    case ReduceOp::kMax:
      return MPI_MAX;
    case ReduceOp::kProduct:
      return MPI_PROD;
    default:
      return MPI_SUM;
  }
}

} // namespace tessera
