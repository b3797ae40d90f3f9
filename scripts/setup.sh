# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: brings a Debian 12 to where the project builds. Everything is checked first, so a second run takes no time.
#   setup_packages [EXTRA...]   installs the packages that are missing
#   setup_torch                 makes .venv with libtorch, unless Torch_DIR is given
#   setup_configure [ARGS...]   configures what `preset` names: release, unless the script sets another
#   setup_build TARGETS...      builds there
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
preset=release

say() { printf '\033[1m%s\033[0m\n' "== $*" >&2; }
fail() { printf '%s\n' "$*" >&2; exit 1; }

packages=(
  ca-certificates g++ cmake ninja-build ccache python3 python3-venv
  libcli11-dev libfmt-dev libspdlog-dev nlohmann-json3-dev libgtest-dev libgmock-dev libbenchmark-dev libgloo-dev
  openmpi-bin libopenmpi-dev mpich libmpich-dev
)

setup_packages() {
  local package missing=()
  for package in "${packages[@]}" "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  command -v apt-get >/dev/null || fail "setup: these packages are missing and there is no apt-get to install them: ${missing[*]}"
  local sudo=()
  if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null || fail "setup: not root and no sudo; have an administrator run: apt-get install ${missing[*]}"
    sudo=(sudo)
  fi
  say "installing ${missing[*]}"
  "${sudo[@]}" apt-get update -q
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

setup_torch() {
  if [[ -n ${Torch_DIR:-} ]]; then
    [[ -f $Torch_DIR/TorchConfig.cmake ]] || fail "setup: Torch_DIR=$Torch_DIR holds no TorchConfig.cmake; expected <libtorch>/share/cmake/Torch"
    return
  fi
  local stamp=.venv/requirements.installed
  cmp -s requirements.txt "$stamp" && return
  say "installing libtorch into .venv"
  [[ -x .venv/bin/python ]] || /usr/bin/python3 -m venv .venv
  # Which build comes is pip's setting (PIP_EXTRA_INDEX_URL, or pip.conf). A CUDA build needs a CUDA toolkit to configure.
  .venv/bin/python -m pip install -q -r requirements.txt
  cp requirements.txt "$stamp"
}

setup_configure() {
  local torch_dir=${Torch_DIR:-}
  if [[ -z $torch_dir ]]; then
    torch_dir=$(echo "$root"/.venv/lib/python3*/site-packages/torch/share/cmake/Torch)
  fi
  local log
  log=$(cmake --preset "$preset" "-DTorch_DIR=$torch_dir" "$@" 2>&1) || fail "$log"
}

setup_build() {
  local memory_gib jobs
  memory_gib=$(($(awk '/MemAvailable/ {print $2}' /proc/meminfo) / 1048576))
  jobs=$(nproc)
  # A test's source takes up to 1.5 GiB to compile.
  if ((memory_gib / 2 < jobs)); then
    jobs=$((memory_gib > 2 ? memory_gib / 2 : 1))
  fi
  cmake --build --preset "$preset" -j "$jobs" --target "$@"
}
