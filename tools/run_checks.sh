#!/usr/bin/env bash
# Everything that CI runs, in one go: every check runs whatever the ones before it said, and a summary closes the output.
#
#   tools/run_checks.sh --lint                  style and types only
#   tools/run_checks.sh [pytest arguments]      these, the C++ kernels under sanitizers, then pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

summary=$(mktemp) closing=$(mktemp) lanes=()
declare -A output_of
cleanup() {
  for lane in "${lanes[@]}"; do
    kill -- -"$lane" 2>/dev/null || true
    rm -f "${output_of[$lane]}"
  done
  rm -f "$summary" "$closing"
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

# Three lanes of what does not look at the clock. They begin together: one alone would leave a core idle now and then.
device_lane() { # pytest arguments...
  check "pytest, device code" run_pytest device "$@"
  check "pytest, plain" run_pytest plain "$@"
}

sanitizer_lane() {
  check "mypy" tools/in_env.sh mypy
  check "build of the C++ kernels under ASan and UBSan" env MAX_JOBS=1 tools/run_asan.sh --build
  check "C++ kernels under ASan and UBSan" tools/run_asan.sh --part plain --part ranks
}

ranks_lane() { # pytest arguments...
  check "pytest, ranks" run_pytest ranks "$@"
}

start() { # lane, arguments...
  local output
  output=$(mktemp)
  set -m # a process group of its own, which can be ended as a whole
  "$@" </dev/null >"$output" 2>&1 &
  set +m
  lanes+=($!)
  output_of[$!]=$output
}

check "ruff check" tools/in_env.sh ruff check .
check "ruff format" tools/in_env.sh ruff format --check --diff .
check "clang-format" clang_format
if [[ ${1:-} == --lint ]]; then
  check "mypy" tools/in_env.sh mypy
else
  # Threads that wait for others sleep meanwhile: spinning, they would take the core from those.
  export OMP_WAIT_POLICY=passive
  start sanitizer_lane
  start ranks_lane "$@"
  start device_lane "$@"
  for lane in "${lanes[@]}"; do
    wait "$lane" || true
    cat "${output_of[$lane]}"
  done
  unset OMP_WAIT_POLICY
  check "C++ kernels under ASan and UBSan, alone" tools/run_asan.sh --part alone
  check "pytest, alone" run_pytest alone "$@"
fi

printf '\n--- summary\n'
cat "$summary" "$closing"
! grep -q '^FAILED' "$summary"
