#!/usr/bin/env bash
# A wheel for an index, in dist/: one file for every Python and every torch that fastpar takes, on any Linux with glibc 2.28.
#
#   tools/build_wheel.sh        FASTPAR_CUDA=1 tools/build_wheel.sh: with the CUDA kernels, whatever torch is here
#
# _build/portable.py says how a library made here loads on older systems; auditwheel checks that it does, and that nothing
# but torch's own libraries is expected from outside. The check changes nothing in the wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(tools/find_python.sh)
policy=2_28

"$python" -m pip install -qq --disable-pip-version-check --no-input -c tools/constraints.txt auditwheel wheel
rm -rf build/lib build/lib.* build/bdist.* # setuptools would ship what was deleted since
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
FASTPAR_MANYLINUX=$policy "$python" -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation -w "$wheels" .
"$python" tools/check_wheel.py "manylinux_$policy" "$wheels"/*.whl
mkdir -p dist
mv "$wheels"/*.whl dist/
ls -l dist/*.whl
