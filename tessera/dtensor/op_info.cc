// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/op_info.h>

#include <ATen/core/function_schema.h>
#include <tessera/sharding/propagate.h>

#include <algorithm>

namespace tessera {
namespace {

using Kind = OpInfo::ArgKind;

c10::TypePtr without_optional(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) {
    return optional->getElementType();
  }
  return type;
}

Kind list_kind(const c10::TypePtr& element) {
  switch (element->kind()) {
    case c10::TypeKind::TensorType:
      return Kind::kTensorList;
    case c10::TypeKind::OptionalType:
      return without_optional(element)->kind() == c10::TypeKind::TensorType
          ? Kind::kOptionalTensorList
          : Kind::kOpaque;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return Kind::kIntList;
    case c10::TypeKind::BoolType:
      return Kind::kBoolList;
    default:
      return Kind::kOpaque;
  }
}

Kind kind_of(const c10::Argument& argument) {
  const c10::TypePtr type = without_optional(argument.real_type());
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Kind::kTensor;
    case c10::TypeKind::ListType:
      return list_kind(type->expectRef<c10::ListType>().getElementType());
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return Kind::kInt;
    case c10::TypeKind::BoolType:
      return Kind::kBool;
    case c10::TypeKind::FloatType:
      return Kind::kReal;
    case c10::TypeKind::NumberType:
      return Kind::kScalar;
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      return Kind::kDtype;
    case c10::TypeKind::StringType:
      return Kind::kString;
    case c10::TypeKind::DeviceObjType:
      return Kind::kDevice;
    default:
      return Kind::kOpaque;
  }
}

bool holds_tensors(Kind kind) {
  return kind == Kind::kTensor || kind == Kind::kTensorList ||
      kind == Kind::kOptionalTensorList;
}

// The written argument that a returned alias stands for.
int alias_position(
    const c10::FunctionSchema& schema, const c10::Argument& result) {
  const c10::AliasInfo* info = result.alias_info();
  if (info == nullptr || !info->isWrite()) {
    return -1;
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* candidate = schema.arguments()[i].alias_info();
    if (candidate != nullptr && candidate->isWrite() &&
        candidate->beforeSets() == info->beforeSets()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

OpInfo::ResultKind result_kind(const c10::Argument& result) {
  const Kind kind = kind_of(result);
  if (kind == Kind::kTensor) {
    return OpInfo::ResultKind::kTensor;
  }
  return kind == Kind::kTensorList ? OpInfo::ResultKind::kTensorList
                                   : OpInfo::ResultKind::kOther;
}

// The fused optimizers' schemas say that they write the gradients. They do so
// only to leave them unscaled behind; that is no result anyone needs, and
// bringing it back to where a gradient lies would cost a collective each.
bool is_scratch(std::string_view op, std::string_view argument) {
  return op.starts_with("aten::_fused_") && argument == "grads";
}

} // namespace

OpInfo::OpInfo(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const c10::OperatorName& op_name = op.operator_name();
  name = op_name.overload_name.empty()
      ? op_name.name
      : op_name.name + "." + op_name.overload_name;
  const std::vector<int64_t> deciding = deciding_args(name);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::AliasInfo* alias = argument.alias_info();
    const Kind kind = kind_of(argument);
    const bool written = holds_tensors(kind) && alias != nullptr &&
        alias->isWrite() && !is_scratch(name, argument.name());
    const bool decides =
        std::find(deciding.begin(), deciding.end(), static_cast<int64_t>(i)) !=
        deciding.end();
    args.push_back({kind, written, decides});
    if (without_optional(argument.real_type())->kind() ==
        c10::TypeKind::GeneratorType) {
      generator_arg = static_cast<int>(i);
    }
    if (holds_tensors(kind)) {
      tensor_args.push_back(static_cast<int>(i));
    }
    if (written) {
      written_args.push_back(static_cast<int>(i));
      writes_lists = writes_lists || kind != Kind::kTensor;
    }
  }
  for (const c10::Argument& result : schema.returns()) {
    results.push_back({result_kind(result), alias_position(schema, result)});
    is_view = is_view ||
        (result.alias_info() != nullptr && !result.alias_info()->isWrite());
  }
  is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  is_inplace_view = op.hasTag(at::Tag::inplace_view);
}

} // namespace tessera
