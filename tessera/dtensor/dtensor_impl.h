// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <tessera/mesh/tensor_spec.h>

#include <memory>
#include <string>

namespace tessera {

class DeferredInit;

// The tensor behind a distributed at::Tensor: global metadata outside, a plain
// local tensor and an interned spec inside.
//
// Its dispatch keys are our backend's, its autograd's, and the autocast key of
// the local device. It has no storage of its own. Its version counter is the
// local tensor's, so that a write through either is seen by both; a shallow
// copy (data(), detach()) has the counter that autograd gave it, and then
// writes bump the local's counter as well.
class DTensorImpl final : public c10::TensorImpl {
 public:
  // Wraps a local tensor of spec->local_sizes.
  static at::Tensor wrap(at::Tensor local, SpecPtr spec);
  // A tensor whose local does not exist yet; `deferred` makes it.
  static at::Tensor wrap_deferred(
      std::shared_ptr<DeferredInit> deferred, SpecPtr spec);

  // Null for a plain or undefined tensor.
  static DTensorImpl* get(const at::Tensor& tensor) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    return is_dtensor_impl(impl) ? static_cast<DTensorImpl*>(impl) : nullptr;
  }
  static bool is_dtensor_impl(const c10::TensorImpl* impl) {
    return impl->key_set().has_backend(c10::BackendComponent::PrivateUse2Bit);
  }

  SpecPtr spec() const {
    return spec_;
  }
  const at::Tensor& local() {
    if (C10_UNLIKELY(!local_.defined())) {
      resolve_local();
    }
    return local_;
  }
  const std::shared_ptr<DeferredInit>& deferred() const {
    return deferred_;
  }
  bool is_deferred() const {
    return !local_.defined();
  }

  // Replaces what the tensor is, keeping its identity: for operators that
  // change metadata in place, and for build.
  void reset(at::Tensor local, SpecPtr spec);

  // A write reached the local through this tensor.
  void bump_local_version() {
    if (!shares_version_counter_) {
      local_.unsafeGetTensorImpl()->bump_version();
    }
  }

  // Makes errors about missing storage name the calls that give data. Costs an
  // allocation, so only tensors that users get from our own calls have it.
  void explain_missing_storage() {
    release_storage_and_set_meta_custom_data_ptr_error_msg_(
        std::string("data_ptr: got ") + tensorimpl_type_name());
  }

  // A view whose input had to be moved is a copy: in-place writes to it would
  // be lost.
  bool is_copied_view() const {
    return copied_view_;
  }
  void mark_copied_view() {
    copied_view_ = true;
  }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter,
      bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter,
      bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(
      const c10::intrusive_ptr<c10::TensorImpl>& impl) override;
  void release_resources() override;

 protected:
  const char* tensorimpl_type_name() const override;

 private:
  friend class DTensorPrototype;
  struct Uninitialised {};
  template <typename Version>
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy(
      Version&& version_counter, bool allow_tensor_metadata_change) const;
  void set_metadata(SpecPtr spec);
  void resolve_local();

  at::Tensor local_;
  SpecPtr spec_ = nullptr;
  std::shared_ptr<DeferredInit>
      deferred_; // set while the local may still be shared with an
                 // unmaterialised record
  bool shares_version_counter_ = false;
  bool copied_view_ = false;

 public:
  // Without metadata; only this class can name the tag.
  DTensorImpl(
      Uninitialised /*unused*/,
      c10::DispatchKeySet keys,
      caffe2::TypeMeta dtype);
};

// The metadata of a spec, computed once and copied into every tensor that has
// it.
class DTensorPrototype {
 public:
  static const DTensorPrototype* of(
      SpecPtr spec); // interned for the life of the process

  SpecPtr spec() const {
    return spec_;
  }
  at::Tensor wrap(at::Tensor local) const;

 private:
  explicit DTensorPrototype(SpecPtr spec);

  SpecPtr spec_;
  c10::intrusive_ptr<DTensorImpl> impl_;
};

} // namespace tessera
