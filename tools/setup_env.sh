#!/usr/bin/env bash
# Prepare the interpreter that tools/find_python.sh names: dependencies, and fastpar as an editable install.
#
# An environment of the user's keeps the torch it has. .venv is created when it is missing; torch goes in first and on its
# own, because the version range in pyproject.toml alone could make pip fetch a build (CUDA, several GB) that nobody asked for.
# A stamp named after everything that decides the result makes the second run a no-op.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch_requirement=${TORCH:-torch==2.13.0}
triton_requirement=${TRITON:-triton==3.7.1}
python=$(tools/find_python.sh)
own_venv=$PWD/.venv/bin/python

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

stamp_path() {
  local key
  key=$({
    printf '%s\n' "$PWD" "$python" "$torch_requirement" "$triton_requirement"
    cat pyproject.toml setup.py _build/*.py tools/setup_env.sh tools/constraints.txt
  } | sha256sum | cut -c1-16)
  if [[ $python == "$own_venv" ]]; then echo ".venv/.setup-$key"; else echo "build/setup/$key"; fi
}

usable_base() {  # new enough, and able to make an environment with pip in it
  "$1" -c 'import sys; assert sys.version_info >= (3, 10); import ensurepip, venv' >/dev/null 2>&1
}

create_venv() {
  local base found
  for base in ${PYTHON:-} python3 python python3.13 python3.12 python3.11 python3.10; do
    if command -v "$base" >/dev/null && usable_base "$base"; then
      say "creating .venv with $("$base" --version) ($(command -v "$base"))"
      "$base" -m venv .venv
      return
    fi
  done
  found=$(python3 --version 2>&1 || true)
  die "fastpar needs Python 3.10 or newer with the venv module; python3 on PATH is: ${found:-missing}" \
    "tried python3, python, python3.13, python3.12, python3.11, python3.10." \
    "install one (Debian/Ubuntu: apt install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3.12"
}

has() {  # a package of $python, looked for without importing it
  [[ -x $python ]] && "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"
}

install() {  # -qq: errors only; a failing install must be readable
  "$python" -m pip install -qq --disable-pip-version-check --no-input "$@"
}

stamp=$(stamp_path)
if [[ -x $python && -e $stamp ]]; then
  exit 0
fi
if ! command -v "${CXX:-g++}" >/dev/null; then
  die "no C++ compiler: ${CXX:-g++} not found" "install one (Debian/Ubuntu: apt install g++), or name it: make setup CXX=clang++"
fi

started=$SECONDS
if [[ $python == "$own_venv" ]]; then
  if ! has pip; then create_venv; fi
  if ! has torch; then
    say "installing $torch_requirement"
    install "$torch_requirement"
  fi
else
  say "using $python, its torch stays as it is"
fi
torch_version=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')
if ! "$python" -c 'import sys; sys.exit(tuple(map(int, sys.argv[1].split(".")[:2])) < (2, 11))' "$torch_version"; then
  die "torch $torch_version in $python is too old: fastpar needs torch >= 2.11" \
    "upgrade it there, or deactivate that environment and let make create .venv"
fi

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
{
  cat tools/constraints.txt
  printf 'torch==%s\n' "$torch_version"
} >"$constraints"
requirements=("setuptools>=77" wheel)
if [[ $python == "$own_venv" ]] && ! has triton; then
  requirements+=("$triton_requirement") # CUDA builds of torch bring their own
fi
say "installing build tools${requirements[2]:+ and ${requirements[2]}}"
install -c "$constraints" "${requirements[@]}"
# Whoever works on the sources wants the CUDA ones checked whatever torch this is; a plain install leaves them out for a
# CPU build of torch.
if command -v nvcc >/dev/null; then export FASTPAR_CUDA=${FASTPAR_CUDA:-1}; fi
say "compiling the extension"
"$python" _build/native.py
say "installing fastpar (editable) with its test and lint tools"
install -c "$constraints" --no-build-isolation --editable '.[test,lint,examples]'

mkdir -p "$(dirname "$stamp")"
rm -f "$(dirname "$stamp")"/.setup-*
touch "$stamp"
say "ready in $((SECONDS - started)) s: $python, torch $torch_version"
