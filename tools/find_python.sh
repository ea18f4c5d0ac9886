#!/usr/bin/env bash
# Print the interpreter that every make target uses; tools/setup_env.sh prepares it.
#
#   1. $PYTHON, else the active environment (VIRTUAL_ENV, CONDA_PREFIX), if it already has torch: used as it is
#   2. .venv/bin/python: ours, whether or not it exists yet
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

has_torch() {  # looks for the package without importing it, which would cost seconds
  "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' >/dev/null 2>&1
}

candidates=()
if [[ -n ${PYTHON:-} ]]; then
  candidates+=("$(command -v "$PYTHON" || true)")
else
  if [[ -n ${VIRTUAL_ENV:-} ]]; then candidates+=("$VIRTUAL_ENV/bin/python"); fi
  if [[ -n ${CONDA_PREFIX:-} ]]; then candidates+=("$CONDA_PREFIX/bin/python"); fi
fi
for python in "${candidates[@]}"; do
  if [[ -x $python ]] && has_torch "$python"; then
    printf '%s\n' "$python"
    exit 0
  fi
done
printf '%s\n' "$root/.venv/bin/python"
