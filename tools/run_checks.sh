#!/usr/bin/env bash
# Everything that CI runs, in one go: every check runs whatever the ones before it said, and a summary closes the output.
#
#   tools/run_checks.sh --lint                  style and types only
#   tools/run_checks.sh [pytest arguments]      these, the C++ kernels under sanitizers, then pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

summary=$(mktemp) closing=$(mktemp) beside=$(mktemp) beside_pid=
cleanup() {
  if [[ -n $beside_pid ]]; then kill -- -"$beside_pid" 2>/dev/null || true; fi
  rm -f "$summary" "$closing" "$beside"
}
trap cleanup EXIT

check() { # name, command...
  local name=$1 started=$SECONDS verdict=ok
  shift
  printf '\n--- %s\n' "$name"
  "$@" || verdict=FAILED
  printf '%-7s %4d s  %s\n' "$verdict" $((SECONDS - started)) "$name" >>"$summary"
}

clang_format() {
  local files
  mapfile -t files < <(find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | sort)
  tools/in_env.sh clang-format --dry-run -Werror "${files[@]}"
}

# One part of the tests (see tests/conftest.py). That a part has none of those that were asked for is no failure.
run_pytest() { # part, pytest arguments...
  local part=$1 log code=0
  shift
  log=$(mktemp)
  "$(tools/find_python.sh)" -m pytest --part "$part" "$@" 2>&1 | tee "$log" || code=$?
  printf '%s: %s\n' "$part" "$(tail -n 1 "$log")" >>"$closing"
  rm -f "$log"
  return $((code == 5 ? 0 : code))
}

run_beside() { # pytest arguments...
  check "mypy" tools/in_env.sh mypy
  check "build of the C++ kernels under ASan and UBSan" env MAX_JOBS=1 tools/run_asan.sh --build
  check "pytest, plain" run_pytest plain "$@"
}

check "ruff check" tools/in_env.sh ruff check .
check "ruff format" tools/in_env.sh ruff format --check --diff .
check "clang-format" clang_format
if [[ ${1:-} == --lint ]]; then
  check "mypy" tools/in_env.sh mypy
else
  # What keeps one core busy and does not look at the clock runs beside something of the same kind; the rest alone.
  # Threads that wait for others sleep meanwhile: spinning, they would take the core from those.
  set -m # a process group of its own, which can be ended as a whole
  OMP_WAIT_POLICY=passive run_beside "$@" </dev/null >"$beside" 2>&1 &
  beside_pid=$!
  set +m
  OMP_WAIT_POLICY=passive check "pytest, device code" run_pytest device "$@"
  wait "$beside_pid" || true
  beside_pid=
  cat "$beside"
  check "C++ kernels under ASan and UBSan" tools/run_asan.sh
  check "pytest, alone" run_pytest alone "$@"
fi

printf '\n--- summary\n'
cat "$summary" "$closing"
! grep -q '^FAILED' "$summary"
