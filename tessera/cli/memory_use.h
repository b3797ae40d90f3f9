// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cli {

// Resident memory of this process in MiB, now and at its highest; 0 where /proc
// does not tell.
double resident_mib();
double peak_resident_mib();

// The highest starts anew from what is resident now, after the allocator gave
// back what it keeps. False where the system forbids it.
bool reset_peak_resident();

// From now on the allocator keeps what is freed: a training step frees and
// allocates the same tensors as the one before, and pages that went back to the
// system would be fetched and cleared anew, one fault each.
void keep_freed_memory();

} // namespace tessera::cli
