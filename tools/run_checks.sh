#!/usr/bin/env bash
# Everything that CI runs, in one go: every check runs whatever the ones before it said, and a summary closes the output.
#
#   tools/run_checks.sh --lint                  style and types only
#   tools/run_checks.sh --quick [STEM]          style, types, and the tests that need neither ranks nor devices nor time; with
#                                               STEM also all tests of the files that have it in their names
#   tools/run_checks.sh [pytest arguments]      everything: style, types, C++ kernels under sanitizers, pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Several hundred processes import the package and its tests: where none of them may keep bytecode, each compiles it again.
unset PYTHONDONTWRITEBYTECODE

summary=$(mktemp) closing=$(mktemp) quiet=$(mktemp) lanes=()
declare -A output_of
cleanup() {
  for lane in "${lanes[@]}"; do
    kill -- -"$lane" 2>/dev/null || true
    rm -f "${output_of[$lane]}"
  done
  rm -f "$summary" "$closing" "$quiet"
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

pytest_on() { # what is said of it, pytest arguments...
  local name=$1 log code=0
  shift
  log=$(mktemp)
  "$(tools/find_python.sh)" -m pytest "$@" 2>&1 | tee "$log" || code=$?
  printf '%s: %s\n' "$name" "$(tail -n 1 "$log")" >>"$closing"
  rm -f "$log"
  return $((code == 5 ? 0 : code)) # that there are none of those that were asked for is no failure
}

# Four lanes of what does not look at the clock (see tests/conftest.py). They begin together: one alone would leave a core
# idle now and then, and tests of ranks, which wait for each other and for deadlines, do so in two lanes. Lanes hold a
# lock that the tests with a clock wait for, in the second lane of ranks, whose processes are there already. What is one
# process at a time is in two lanes, which share the plain tests: in one, it would go on alone on its core when all
# others have ended.
device_lane() { # pytest arguments...
  check "mypy" tools/in_env.sh mypy
  check "API reference" "$(tools/find_python.sh)" tools/make_docs.py
  check "pytest, device code" pytest_on "device" --part device "$@"
  check "pytest, plain, half 1" pytest_on "plain, half 1" --shard 1/2 --part plain "$@"
}

plain_lane() { # pytest arguments...
  check "build of the C++ kernels under ASan and UBSan" env MAX_JOBS=1 tools/run_asan.sh --build
  check "C++ kernels under ASan and UBSan" tools/run_asan.sh --part plain --part ranks
  check "pytest, plain, half 2" pytest_on "plain, half 2" --shard 2/2 --part plain "$@"
}

ranks_lane() { # half, pytest arguments...
  local half=$1
  shift
  if [[ $half == 1 ]]; then
    check "pytest, ranks, half 1" pytest_on "ranks, half 1" --shard 1/2 --part ranks "$@"
  else
    check "pytest, ranks, half 2, and then clocks" \
      pytest_on "ranks, half 2, clock" --shard 2/2 --part ranks --part clock "--quiet-when=$quiet" "$@"
  fi
}

# Two halves of what is cheap, a core each.
quick_lane() { # half, pytest arguments...
  local half=$1
  shift
  if [[ $half == 1 ]]; then check "mypy" tools/in_env.sh mypy; fi
  check "pytest, cheap tests, half $half" pytest_on "cheap tests, half $half" -q --shard "$half/2" \
    -m "not (expensive or ranks or device or clock or slow or gpu)" "$@"
}

start() { # lane, arguments...
  local output held
  output=$(mktemp)
  exec {held}<"$quiet"
  if [[ "$1 ${2:-}" != "ranks_lane 2" ]]; then flock --shared "$held"; fi # until it ends, and all that it has started
  set -m # a process group of its own, which can be ended as a whole
  "$@" </dev/null >"$output" 2>&1 &
  set +m
  exec {held}<&-
  lanes+=($!)
  output_of[$!]=$output
}

finish() { # wait for the lanes, and show what they said
  for lane in "${lanes[@]}"; do
    wait "$lane" || true
    cat "${output_of[$lane]}"
  done
}

check "ruff check" tools/in_env.sh ruff check .
check "ruff format" tools/in_env.sh ruff format --check --diff .
if [[ ${1:-} != --quick ]]; then check "clang-format" clang_format; fi
if [[ ${1:-} == --lint ]]; then
  check "mypy" tools/in_env.sh mypy
  check "links and names in the docs" "$(tools/find_python.sh)" tools/make_docs.py --check
elif [[ ${1:-} == --quick ]]; then
  files=()
  if [[ -n ${2:-} ]]; then
    mapfile -t files < <(find tests -name "test_*$2*.py" | sort)
    if [[ ${#files[@]} == 0 ]]; then
      echo "run_checks: no test file has $2 in its name" >&2
      exit 2
    fi
  fi
  start quick_lane 1 "${files[@]/#/--ignore=}"
  start quick_lane 2 "${files[@]/#/--ignore=}"
  finish
  if [[ ${#files[@]} != 0 ]]; then
    check "pytest, $2" pytest_on "$2" -q -m "not slow and not gpu" "${files[@]}"
  fi
else
  # Threads that wait for others sleep meanwhile: spinning, they would take the core from those.
  export OMP_WAIT_POLICY=passive # as in tests/__init__.py; the programs of the plain lane as well
  start plain_lane "$@"
  start device_lane "$@"
  start ranks_lane 1 "$@"
  start ranks_lane 2 "$@"
  finish
  unset OMP_WAIT_POLICY
  check "C++ kernels under ASan and UBSan, clocks" tools/run_asan.sh --part clock
fi

printf '\n--- summary\n'
cat "$summary" "$closing"
! grep -q '^FAILED' "$summary"
