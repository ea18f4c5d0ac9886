#!/usr/bin/env bash
# Everything that CI runs, in one go: every check runs whatever the ones before it said, and a summary closes the output.
#
#   tools/run_checks.sh --lint                  style and types only
#   tools/run_checks.sh [pytest arguments]      these, the C++ kernels under sanitizers, then pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

names=() verdicts=() seconds=()
check() { # name, command...
  local name=$1 started=$SECONDS
  shift
  printf '\n--- %s\n' "$name"
  if "$@"; then verdicts+=(ok); else verdicts+=(FAILED); fi
  names+=("$name")
  seconds+=($((SECONDS - started)))
}

clang_format() {
  local files
  mapfile -t files < <(find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | sort)
  tools/in_env.sh clang-format --dry-run -Werror "${files[@]}"
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
run_pytest() { "$(tools/find_python.sh)" -m pytest "$@" 2>&1 | tee "$log"; }

check "ruff check" tools/in_env.sh ruff check .
check "ruff format" tools/in_env.sh ruff format --check --diff .
check "clang-format" clang_format
check "mypy" tools/in_env.sh mypy
if [[ ${1:-} != --lint ]]; then
  check "C++ kernels under ASan and UBSan" tools/run_asan.sh
  check "pytest" run_pytest "$@"
fi

printf '\n--- summary\n'
status=0
for i in "${!names[@]}"; do
  printf '%-7s %4d s  %s\n' "${verdicts[i]}" "${seconds[i]}" "${names[i]}"
  if [[ ${verdicts[i]} != ok ]]; then status=1; fi
done
tail -n 1 "$log" # pytest's closing line
exit "$status"
