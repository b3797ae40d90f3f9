#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the program and trains a small Llama on the King James text with two ranks, on a fresh Debian 12 too: first so that one sees it
# learn, then shortly in each way of synchronising gradients, side by side.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

setup_packages bible-kjv
setup_torch
say "building"
setup_configure
setup_build tessera_cli
text=build/demo/king_james.txt
if [[ ! -s $text ]]; then
  mkdir -p build/demo
  bible -f gen1:1-rev22:21 >"$text.part"
  mv "$text.part" "$text"
fi
say "training on $text with 2 ranks"
build/bin/tessera train --text "$text" --ranks 2 --log build/demo/log.jsonl
say "the ways to synchronise gradients, from the same seed"
build/bin/tessera train --text "$text" --ranks 2 --compare --json build/demo/compare.json
