#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds every room's tests under the sanitizers and runs them, on a fresh Debian 12 too.
#   scripts/sanitize.sh [asan-ubsan|tsan|all] [CTEST ARGUMENTS...]    all is the default: scripts/sanitize.sh tsan -R comm
# The tests of the package (consumer, includes, scripts) are left out: they show nothing new there. So are the plug-ins of MPI under
# ThreadSanitizer: MPI libraries are not built with it. The only suppressions are those of cmake/tsan.supp, for libtorch and OpenMP.
# Tests have an hour each, and run_ranks five times its deadline. GTEST_FILTER chooses other tests than those that can run:
#   GTEST_FILTER='ShmEngine.*' scripts/sanitize.sh tsan -R comm
set -euo pipefail
source "$(dirname "$0")/setup.sh"

presets=(asan-ubsan tsan)
case ${1:-all} in
  all) shift $(($# > 0)) ;;
  asan-ubsan | tsan) presets=("$1") && shift ;;
  -*) ;;
  *) fail "sanitize: got '$1', expected asan-ubsan, tsan or all, then ctest's arguments" ;;
esac

# What cannot run under a sanitizer, and why.
skipped=(
  'Faults.*' # a rank limits its address space, of which the sanitizer has taken terabytes; and it counts seconds
)
export GTEST_FILTER=${GTEST_FILTER:-"-$(IFS=:; echo "${skipped[*]}")"}

setup_packages
setup_torch
status=0
for preset in "${presets[@]}"; do
  say "building for $preset"
  setup_configure
  setup_build all
  say "testing under $preset"
  results=build-$preset/test-results
  rm -rf "$results" && mkdir -p "$results"
  ctest --preset "$preset" --output-junit "$root/$results/ctest.xml" "$@" || status=$?
  python3 scripts/count_tests.py "$results"
done
exit "$status"
