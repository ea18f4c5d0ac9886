#!/usr/bin/env bash
# Run a command with the tools of the project's environment first on PATH:  tools/in_env.sh ruff check .
set -euo pipefail
python=$("$(dirname "${BASH_SOURCE[0]}")/find_python.sh")
PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH exec "$@"
