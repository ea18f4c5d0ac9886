#!/usr/bin/env bash
# What only a GPU can tell: `make gpu`. One machine with one GPU, torch with CUDA, nvcc and pytest; no network; 8 minutes.
#
#   tools/run_gpu.sh [--dry-run] [pytest arguments]       PYTHON=python3 PEERS=folder/of/wheels BUDGET=480 tools/run_gpu.sh
#
# Stages run one after the other whatever the ones before said, each under its own time limit and all under BUDGET
# seconds; a summary closes the output, and the exit status is 0 only if every stage was fine. fastpar is used from this
# folder, not installed. PEERS holds wheels of the libraries to bench against (liger-kernel, cut-cross-entropy,
# megatron-core); they are unpacked under build/, without what they depend on. Rows go to bench/results/<gpu>/.
#
# Exit status 2: no Python with torch, or no GPU; nothing was run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
budget=${BUDGET:-480} peers=${PEERS:-}
dry_run=no
if [[ ${1:-} == --dry-run ]]; then
  dry_run=yes
  shift
fi

has_torch() { "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' >/dev/null 2>&1; }

# An interpreter that has torch already: the one of every other make target, else the system's.
python=$(tools/find_python.sh)
if ! has_torch "$python"; then python=$(command -v python3 || true); fi
if [[ -z $python ]] || ! has_torch "$python"; then
  echo "gpu: no Python with torch found; name one: make gpu PYTHON=/path/to/python3" >&2
  exit 2
fi
export PYTHON=$python MAX_JOBS=${MAX_JOBS:-$(nproc)} PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD:$PWD/build/gpu/peers${PYTHONPATH:+:$PYTHONPATH}

names=() verdicts=() seconds=() status=0
deadline=$((SECONDS + budget))

stage() { # name, limit in seconds, command...
  local name=$1 limit=$2 started=$SECONDS left=$((deadline - SECONDS)) code=0
  shift 2
  if [[ $dry_run == yes ]]; then
    printf '%-38s %4d s  %s\n' "$name" "$limit" "$*"
    return
  fi
  names+=("$name")
  if ((left < 5)); then
    verdicts+=("not run: out of time") seconds+=(0) status=1
    return
  fi
  printf '\n--- %s (at most %d s)\n' "$name" "$((limit < left ? limit : left))"
  timeout --kill-after=5 "$((limit < left ? limit : left))" "$@" || code=$?
  seconds+=($((SECONDS - started)))
  case $code in
    0) verdicts+=(ok) ;;
    124 | 137) verdicts+=("STOPPED after its time") status=1 ;;
    *) verdicts+=("FAILED, exit status $code") status=1 ;;
  esac
}

leave_out() { # name, reason
  if [[ $dry_run == yes ]]; then
    printf '%-38s         left out: %s\n' "$1" "$2"
  else
    names+=("$1") verdicts+=("left out: $2") seconds+=(0)
  fi
}

bench() { # what, limit, name of the bench, flags...
  local what="bench $3: $1" limit=$2 name=$3
  shift 3
  if [[ -e bench/bench_$name.py ]]; then
    stage "$what" "$limit" "$python" -m fastpar.cli bench "$name" --device cuda --dtype bf16 --ranks 1 \
      --blocks 5 --iters 4 "$@"
  else
    leave_out "$what" "no bench/bench_$name.py"
  fi
}

if [[ $dry_run == no ]]; then
  if ! "$python" -c 'import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"gpu: torch {torch.__version__} of {sys.executable} sees no CUDA device; these stages need one")
print(f"gpu: {torch.cuda.get_device_name()}, torch {torch.__version__}, {sys.executable}")'; then
    exit 2
  fi
  # What an install maps fastpar.kernels to; kernels/ itself must not be a package (see setup.py).
  if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("fastpar.kernels") is None)'; then
    ln -s ../kernels/triton fastpar/kernels
    trap 'rm -f fastpar/kernels' EXIT
  fi
fi

mapfile -t gpu_tests < <(grep -l 'mark\.gpu' tests/test_*.py)
pytest=("$python" -m pytest -q -p no:cacheprovider -m gpu)

stage "build" 120 "$python" _build/native.py
if [[ -n $peers ]]; then
  stage "unpack peers" 20 "$python" -m pip install -q --disable-pip-version-check --no-input --no-index --no-deps \
    --no-compile --upgrade --target build/gpu/peers "$peers"/*.whl
fi
stage "doctor" 30 "$python" -m fastpar.cli doctor
stage "tests" 150 "${pytest[@]}" "${gpu_tests[@]}" "$@"

# The sanitizer runs the tests whose names say that they are small; a test costs it seconds. Without torch's caching
# allocator every tensor is an allocation of its own, so that a step past its end is seen.
if command -v compute-sanitizer >/dev/null || [[ $dry_run == yes ]]; then
  sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --print-limit 20)
  stage "memcheck" 75 "${sanitizer[@]}" --tool memcheck "${pytest[@]}" -k small "${gpu_tests[@]}"
  # Hazards in shared memory; only the compiled kernels, whose mangled names hold their namespace.
  stage "racecheck" 45 "${sanitizer[@]}" --tool racecheck --kernel-name kns=fastpar \
    "${pytest[@]}" -k small "${gpu_tests[@]}"
else
  leave_out "compute-sanitizer" "not on PATH"
fi

bench "one rank" 90 cross_entropy --tokens 8192 --vocab 32000,128256,262144
bench "a rank of two" 90 cross_entropy --tokens 8192 --vocab 32768,131072,262144 --virtual-ranks 2
bench "one rank" 75 linear_cross_entropy --tokens 8192 --hidden 4096 --vocab 128256
bench "rows" 30 rms_norm --tokens 4096 --hidden 4096
bench "virtual ranks" 60 symmetric --virtual-ranks 2,4,8 --kib 1,16,64,1024,16384 --settings hot
bench "virtual ranks, norm" 30 symmetric --norm --virtual-ranks 8 --kib 64,1024 --settings hot
bench "packed" 30 swiglu --tokens 8192 --features 16384
bench "link is memory" 90 overlap_gpu --shapes 8192x2048x8192 --no-memory
bench "link is PCIe" 45 overlap_gpu --shapes 8192x16384x8192 --virtual-ranks 2 --op gather --link pcie --no-memory
experts=(moe --tokens 32768 --hidden 2048 --ffn 768 --experts 128 --top-k 8 --passes forward,both)
bench "experts" 75 "${experts[@]}" --only fastpar,torch,GEMMs
bench "experts, Liger" 120 "${experts[@]}" --only fastpar,Liger # which tunes its kernels first
bench "rows of tokens" 30 permute --tokens 4096 --hidden 7168 --top-k 8 --experts 256
bench "router" 45 moe_route --dtype fp32 --presets deepseek_v3 --tokens 4096 --experts 256
bench "virtual ranks" 45 moe_push --virtual-ranks 8 --tokens 4096 --hidden 7168 --top-k 8
bench "options" 45 linear_cross_entropy --tokens 8192 --hidden 4096 --vocab 128256 --options --no-memory
bench "options" 30 cross_entropy --tokens 8192 --vocab 131072 --options --no-memory

if [[ $dry_run == yes ]]; then
  printf 'all of them within %d s\n' "$budget"
  exit 0
fi
printf '\n--- summary (%d s)\n' "$SECONDS"
for i in "${!names[@]}"; do
  printf '%4d s  %-38s %s\n' "${seconds[i]}" "${names[i]}" "${verdicts[i]}"
done
exit "$status"
