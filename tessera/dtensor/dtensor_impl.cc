// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/dtensor_impl.h>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/deferred_init.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace tessera {
namespace {

// Our backend's key and the autocast key of the local device.
constexpr c10::DispatchKeySet backend_keys(c10::DeviceType device) {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse2) |
      c10::DispatchKeySet(
             device == c10::kCUDA ? c10::DispatchKey::AutocastCUDA
                                  : c10::DispatchKey::AutocastCPU);
}

constexpr c10::DispatchKeySet all_keys(c10::DeviceType device) {
  return backend_keys(device) |
      c10::DispatchKeySet(c10::DispatchKey::AutogradPrivateUse2) |
      c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
}

c10::DispatchKeySet keys_of(SpecPtr spec) {
  return all_keys(spec->mesh.device_type());
}

// A tensor made in inference mode has neither autograd keys nor a version
// counter; ours follows its local.
c10::DispatchKeySet keys_like(const at::Tensor& local) {
  const c10::DeviceType device = local.device().type();
  return local.is_inference() ? backend_keys(device) : all_keys(device);
}

// TensorImpl's constructor wants a storage to take the device from; it is
// dropped at once.
c10::Storage device_storage() {
  static const c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      0,
      c10::DataPtr(nullptr, c10::Device(c10::kCPU)),
      nullptr,
      false);
  return storage;
}

} // namespace

// The base gets the keys of an inference tensor, so that it makes no version
// counter: ours is the local's.
DTensorImpl::DTensorImpl(
    Uninitialised /*unused*/, c10::DispatchKeySet keys, caffe2::TypeMeta dtype)
    : TensorImpl(
          TensorImpl::VIEW, device_storage(), backend_keys(c10::kCPU), dtype) {
  storage_ = c10::Storage();
  key_set_ = keys;
  set_storage_access_should_throw();
}

void DTensorImpl::set_metadata(SpecPtr spec) {
  spec_ = spec;
  data_type_ = c10::scalarTypeToTypeMeta(spec->dtype);
  device_opt_ = spec->mesh.device();
  set_sizes_and_strides(spec->sizes, spec->strides);
}

at::Tensor DTensorImpl::wrap(at::Tensor local, SpecPtr spec) {
  return DTensorPrototype::of(spec)->wrap(std::move(local));
}

at::Tensor DTensorImpl::wrap_deferred(
    std::shared_ptr<DeferredInit> deferred, SpecPtr spec) {
  auto impl = c10::make_intrusive<DTensorImpl>(
      Uninitialised{}, keys_of(spec), c10::scalarTypeToTypeMeta(spec->dtype));
  impl->set_metadata(spec);
  impl->set_version_counter(c10::VariableVersion(0));
  impl->deferred_ = std::move(deferred);
  return at::Tensor(std::move(impl));
}

void DTensorImpl::reset(at::Tensor local, SpecPtr spec) {
  local_ = std::move(local);
  deferred_ = nullptr;
  const bool allowed = allow_tensor_metadata_change();
  set_allow_tensor_metadata_change(true);
  set_metadata(spec);
  set_allow_tensor_metadata_change(allowed);
  shares_version_counter_ = false;
}

void DTensorImpl::resolve_local() {
  if (deferred_ == nullptr) {
    throw Error(
        "distributed tensor: its local tensor has been released; it was used "
        "after its last reference was dropped");
  }
  deferred_->materialise();
  reset(deferred_->local(), deferred_->spec());
}

template <typename Version>
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy(
    Version&& version_counter, bool allow_tensor_metadata_change) const {
  auto copy =
      c10::make_intrusive<DTensorImpl>(Uninitialised{}, key_set_, data_type_);
  copy_tensor_metadata(
      this,
      copy.get(),
      std::forward<Version>(version_counter),
      allow_tensor_metadata_change);
  copy->local_ = local_;
  copy->spec_ = spec_;
  copy->deferred_ = deferred_;
  copy->copied_view_ = copied_view_;
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter,
    bool allow_tensor_metadata_change) const {
  return shallow_copy(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter,
    bool allow_tensor_metadata_change) const {
  return shallow_copy(std::move(version_counter), allow_tensor_metadata_change);
}

void DTensorImpl::shallow_copy_from(
    const c10::intrusive_ptr<c10::TensorImpl>& impl) {
  if (!is_dtensor_impl(impl.get())) {
    throw UsageError(
        "set_data: got a plain tensor for a distributed one; use "
        "tessera::distribute or tessera::from_local first");
  }
  auto* source = static_cast<DTensorImpl*>(impl.get());
  copy_tensor_metadata(
      source, this, version_counter(), allow_tensor_metadata_change());
  local_ = source->local_;
  spec_ = source->spec_;
  deferred_ = source->deferred_;
  shares_version_counter_ = false;
}

void DTensorImpl::release_resources() {
  TensorImpl::release_resources();
  local_.reset();
  deferred_.reset();
}

const char* DTensorImpl::tensorimpl_type_name() const {
  return "a distributed tensor (it has no storage of its own: use "
         "tessera::local_of or tessera::to_local for this rank's part, "
         "tessera::print to print it, tessera::full_tensor for the whole, "
         "also to save it: torch::save cannot write distributed tensors)";
}

DTensorPrototype::DTensorPrototype(SpecPtr spec) : spec_(spec) {
  impl_ = c10::make_intrusive<DTensorImpl>(
      DTensorImpl::Uninitialised{},
      keys_of(spec),
      c10::scalarTypeToTypeMeta(spec->dtype));
  impl_->set_metadata(spec);
}

const DTensorPrototype* DTensorPrototype::of(SpecPtr spec) {
  static std::mutex mutex;
  static auto* table =
      new std::unordered_map<SpecPtr, const DTensorPrototype*>();
  std::lock_guard<std::mutex> lock(mutex);
  const DTensorPrototype*& slot = (*table)[spec];
  if (slot == nullptr) {
    slot = new DTensorPrototype(spec);
  }
  return slot;
}

at::Tensor DTensorPrototype::wrap(at::Tensor local) const {
  auto impl = c10::make_intrusive<DTensorImpl>(
      DTensorImpl::Uninitialised{}, keys_like(local), impl_->data_type_);
  c10::DispatchKeySet keys = impl->key_set_;
  DTensorImpl::copy_generic_tensor_metadata(impl_.get(), impl.get());
  impl->key_set_ = keys;
  impl->storage_access_should_throw_ = true;
  if (!local.is_inference()) {
    impl->set_version_counter(local.unsafeGetTensorImpl()->version_counter());
  }
  impl->shares_version_counter_ = true;
  impl->spec_ = spec_;
  impl->local_ = std::move(local);
  return at::Tensor(std::move(impl));
}

} // namespace tessera
