// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/call_key.h>

#include <c10/core/DefaultDtype.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/dtensor_impl.h>

namespace tessera {
namespace {

using Kind = OpInfo::ArgKind;

constexpr uint64_t kAbsent = 0;
constexpr uint64_t kDistributedTag =
    1; // low bits of a tensor's word; spec ids fill the rest
constexpr uint64_t kPlainTag = 2;
constexpr uint64_t kPresent = 3;

int64_t int_of(const c10::IValue& value) {
  if (C10_LIKELY(value.isInt())) {
    return value.toInt();
  }
  if (value.isBool()) {
    return value.toBool() ? 1 : 0;
  }
  return value.toSymInt().guard_int(__FILE__, __LINE__);
}

uint64_t bits_of(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

} // namespace

CallKey::CallKey(const OpInfo& info, const torch::jit::Stack& stack) {
  push(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));
  const c10::IValue* values = stack.data() + (stack.size() - info.args.size());
  for (size_t i = 0; i < info.args.size(); ++i) {
    push_argument(info.args[i], values[i]);
  }
}

void CallKey::push_heap(uint64_t word) {
  if (heap_.empty()) {
    heap_.assign(inline_, inline_ + kInline);
  }
  heap_.push_back(word);
}

void CallKey::push_tensor(const at::TensorBase& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (C10_LIKELY(DTensorImpl::is_dtensor_impl(impl))) {
    push((static_cast<DTensorImpl*>(impl)->spec()->id << 2) | kDistributedTag);
  } else if (!tensor.defined()) {
    push(kAbsent);
  } else {
    push_plain(tensor);
  }
}

void CallKey::push_plain(const at::TensorBase& tensor) {
  const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  push(
      kPlainTag | (static_cast<uint64_t>(tensor.scalar_type()) << 2) |
      (static_cast<uint64_t>(wrapped) << 16) |
      (static_cast<uint64_t>(tensor.dim()) << 17));
  for (int64_t size : tensor.sizes()) {
    push(static_cast<uint64_t>(size));
  }
  for (int64_t stride : tensor.strides()) {
    push(static_cast<uint64_t>(stride));
  }
}

void CallKey::push_argument(const OpInfo::Arg& arg, const c10::IValue& value) {
  if (value.isTensor()) {
    push_tensor(value.toTensor());
  } else if (value.isNone()) {
    push(kAbsent);
  } else if (arg.kind >= Kind::kInt && !value.isList()) {
    push_number(arg, value);
  } else {
    push_list(arg, value);
  }
}

void CallKey::push_number(const OpInfo::Arg& arg, const c10::IValue& value) {
  switch (arg.kind) {
    case Kind::kInt:
    case Kind::kBool:
    case Kind::kDtype:
      push(kPresent);
      push(static_cast<uint64_t>(int_of(value)));
      return;
    case Kind::kReal:
    case Kind::kScalar: {
      const uint64_t type = value.isDouble() ? 0
          : value.isInt()                    ? 1
          : value.isBool()                   ? 2
          : value.isComplexDouble()          ? 3
                                             : 4;
      push(kPresent | (type << 2));
      if (arg.deciding) {
        push(
            value.isComplexDouble() ? 0 : bits_of(value.toScalar().toDouble()));
      }
      return;
    }
    case Kind::kString:
      push_text(value.toStringRef());
      return;
    case Kind::kDevice: {
      const c10::Device device = value.toDevice();
      push(
          kPresent | (static_cast<uint64_t>(device.type()) << 2) |
          (static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16));
      return;
    }
    default:
      push(kPresent);
  }
}

void CallKey::push_list(const OpInfo::Arg& arg, const c10::IValue& value) {
  if (arg.kind == Kind::kOpaque) {
    push(kPresent);
    return;
  }
  const c10::ArrayRef<c10::IValue> items = value.toListRef();
  push(kPresent | (items.size() << 2));
  for (const c10::IValue& item : items) {
    if (item.isTensor()) {
      push_tensor(item.toTensor());
    } else if (item.isNone()) {
      push(kAbsent);
    } else {
      push(static_cast<uint64_t>(int_of(item)));
    }
  }
}

void CallKey::push_text(const std::string& text) {
  push(kPresent | (text.size() << 2));
  for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(
        &word, text.data() + i, std::min(sizeof(uint64_t), text.size() - i));
    push(word);
  }
}

namespace {

// A tensor that is replicated everywhere may join a call on another mesh; the
// others must share theirs.
class MeshChoice {
 public:
  explicit MeshChoice(const OpInfo& info) : info_(info) {}

  void add(const at::Tensor& tensor) {
    DTensorImpl* impl = DTensorImpl::get(tensor);
    if (impl == nullptr) {
      return;
    }
    const SpecPtr spec = impl->spec();
    const bool free = spec->is_replicated();
    if (!chosen_ || (chosen_free_ && !free)) {
      chosen_ = spec->mesh;
      chosen_free_ = free;
    } else if (!free && !(spec->mesh == chosen_)) {
      throw UsageError(fmt::format(
          "{}: tensors on {} and on {}; bring them to one mesh (full_tensor "
          "and distribute) first",
          info_.name,
          chosen_.str(),
          spec->mesh.str()));
    }
  }
  DeviceMesh chosen() const {
    return chosen_;
  }

 private:
  const OpInfo& info_;
  DeviceMesh chosen_;
  bool chosen_free_ = false;
};

} // namespace

DeviceMesh mesh_of_call(const OpInfo& info, const torch::jit::Stack& stack) {
  MeshChoice choice(info);
  const c10::IValue* values = stack.data() + (stack.size() - info.args.size());
  for (int position : info.tensor_args) {
    const c10::IValue& value = values[position];
    if (value.isTensor()) {
      choice.add(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) {
          choice.add(item.toTensor());
        }
      }
    }
  }
  return choice.chosen();
}

} // namespace tessera
