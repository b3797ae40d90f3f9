// SPDX-License-Identifier: Apache-2.0
// Counts heap allocations of a distributed operator on a cache hit.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>
#include <tessera/dtensor/dispatch_cases.h>
#include <tessera/tessera.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TESSERA_COUNTS_ALLOCATIONS 0
#else
#define TESSERA_COUNTS_ALLOCATIONS 1
#endif

#if TESSERA_COUNTS_ALLOCATIONS

namespace {
thread_local int64_t allocations = 0;
} // namespace

// The hook: every allocation of the process passes through these.
extern "C" {
void* __libc_malloc(size_t size); // NOLINT
void* __libc_calloc(size_t count, size_t size); // NOLINT
void* __libc_memalign(size_t alignment, size_t size); // NOLINT

void* malloc(size_t size) { // NOLINT
  ++allocations;
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) { // NOLINT
  ++allocations;
  return __libc_calloc(count, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) { // NOLINT
  ++allocations;
  *out = __libc_memalign(alignment, size);
  return *out == nullptr ? 12 : 0;
}
}

namespace tessera {
namespace {

// A boxed kernel that does nothing but forward.
void forward(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::DispatchKey::TESTING_ONLY_GenericMode);
  op.redispatchBoxed(
      keys &
          c10::DispatchKeySet(
              c10::DispatchKeySet::FULL_AFTER,
              c10::DispatchKey::TESTING_ONLY_GenericMode),
      stack);
}

// Allocations of one call; the least of several, since caches fill at times.
int64_t count(const DispatchCase& which, const DispatchOperands& operands) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < 8; ++i) {
    const int64_t before = allocations;
    const at::Tensor result = which.call(operands);
    least = std::min(least, allocations - before);
  }
  return least;
}

int64_t count_forwarded(
    const DispatchCase& which, const DispatchOperands& operands) {
  c10::impl::IncludeDispatchKeyGuard guard(
      c10::DispatchKey::TESTING_ONLY_GenericMode);
  return count(which, operands);
}

TEST(Allocations, ACacheHitAllocatesNothingButTheResult) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    at::NoGradGuard no_grad;
    for (const DispatchCase& which : dispatch_cases()) {
      const DispatchSignatures signatures =
          dispatch_signatures(which, mesh, false);
      for (size_t i = 0; i < signatures.plain.size(); ++i) {
        const int64_t forwarded = count_forwarded(which, signatures.plain[i]);
        ASSERT_GT(forwarded, 0); // the hook counts
        const int64_t result = which.writes ? 0 : 1;
        EXPECT_LE(count(which, signatures.distributed[i]), forwarded + result)
            << which.name << " signature " << i;
      }
    }
  });
}

} // namespace
} // namespace tessera

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::forward>());
}

#endif
