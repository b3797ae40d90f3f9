#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds everything and runs all tests, on a fresh Debian 12 too. Arguments go to ctest: scripts/test.sh -R mesh
set -euo pipefail
source "$(dirname "$0")/setup.sh"

setup_packages
setup_torch
say "building"
setup_configure ${TESSERA_CONFIGURE:-}
setup_build all tessera_checks
say "testing"
results=build/test-results
rm -rf "$results" && mkdir -p "$results"
status=0
ctest --test-dir build --parallel "$(nproc)" --output-on-failure --output-junit "$root/$results/ctest.xml" "$@" || status=$?
python3 scripts/count_tests.py "$results"
exit "$status"
