#!/usr/bin/env bash
# The tests of the C++ kernels against a library built with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   tools/run_asan.sh [pytest arguments]        default: the op tests, without their slow variants and without torch.compile,
#                                               eight parameters of each test: enough to take every path of the kernels
#   tools/run_asan.sh --build                   the library alone
#   tools/run_asan.sh --part NAME ...           those of the op tests that are of these parts (see tests/conftest.py)
#
# The sanitizer's runtime has to be in the process before Python itself, hence LD_PRELOAD. Leaks are not looked for: an
# interpreter and a torch that exit without freeing everything would drown ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(tools/find_python.sh)
library=$PWD/build/sanitize/_C.so
runtime() { "${CXX:-g++}" -print-file-name="$1"; }

if [[ $(runtime libasan.so) != /* ]]; then
  echo "asan: ${CXX:-g++} has no libasan.so; install GCC's sanitizer libraries, or set CXX to a g++ that has them" >&2
  exit 1
fi
"$python" _build/native.py --sanitize=address,undefined --output="$library"
if [[ ${1:-} == --build ]]; then exit; fi
if [[ $# -eq 0 || $1 == --part ]]; then
  set -- "$@" -q --at-most 8 -m "not slow and not gpu" -k "not compile and not triton" tests/ops/test_attention_kernels.py tests/ops/test_cross_entropy.py \
    tests/ops/test_cross_entropy_kernels.py tests/ops/test_dropout.py tests/moe/test_moe_rows.py tests/ops/test_rms_norm.py tests/ops/test_swiglu.py \
    tests/comm/test_shared_memory.py tests/comm/test_point_to_point.py
fi
FASTPAR_LIBRARY=$library LD_PRELOAD="$(runtime libasan.so) $(runtime libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  "$python" -m pytest -p no:cacheprovider "$@"
