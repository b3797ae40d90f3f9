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

} // namespace tessera::cli
