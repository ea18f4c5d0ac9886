# fastpar: the commands people need. `make help` lists them.
#
# Variables: LAYOUT (of `make demo`), PYTHON (interpreter to use if it has torch, else to make .venv with), TORCH (default torch==2.13.0), TRITON, CXX, ARGS;
# for `make gpu`: PLAN, ONLY, PEERS, BUDGET (seconds), OUT, DRY_RUN.
SHELL := /bin/bash
PY = "$$(tools/find_python.sh)"
MARKERS := -m "not slow and not gpu"
ARGS ?=
LAYOUT ?= pp2 tp2 sp zbv mb4 zero1 full

.PHONY: help setup build demo check test test-all breaks gpu lint format docs bench asan abi wheel clean

help: ## this list
	@grep -hE "^[a-z-]+:.*## " $(MAKEFILE_LIST) | sed -E "s/^([a-z-]+):.*## /  make \1\t/" | expand -t 20

setup: ## create .venv (or use the active environment, if it has torch): torch, test tools, fastpar editable
	@tools/setup_env.sh

# Quick when nothing changed: only sources newer than the binary are compiled.
build: setup
	@$(PY) _build/native.py

TRAIN = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m torch.distributed.run --nproc-per-node 4 examples/train.py

demo: build ## train a small Llama on 4 CPU processes with everything at once (LAYOUT="..."), and compare with one process
	@$(TRAIN) --layout "$(LAYOUT)" $(ARGS)

check: build ## in 90 s: lint, types and the cheap tests; STEM=moe adds every test of the files with that in their names
	@tools/run_checks.sh --quick $(STEM)

test: build ## everything CI runs: lint, types, C++ under sanitizers, tests
	@tools/run_checks.sh $(MARKERS) $(ARGS)

test-all: build ## the same with the exhaustive variants of the tests
	@tools/run_checks.sh -m "not gpu" $(ARGS)

breaks: build ## plant the breaks of tools/breaks.py one by one, and see the tests notice each (hours on a busy machine)
	@nice -n 5 $(PY) tools/planted_breaks.py $(ARGS)

# Needs no network and installs nothing, so it does not go through `build`. DRY_RUN=1 prints the stages; OUT=folder is
# where logs and rows are packed; PLAN=check|bench|profile|changed-1|changed-2, ONLY=stages with commas between, PEERS=folder of wheels.
gpu: ## on a machine with a GPU, in 9 minutes: build, GPU tests, the main benches (PLAN=bench, profile: the others)
	@PYTHONPATH= $(if $(PYTHON),$(PYTHON),python3) tools/run_gpu.py $(if $(PLAN),--plan $(PLAN)) $(if $(ONLY),--only "$(ONLY)") \
	  $(if $(PEERS),--peers "$(PEERS)") $(if $(BUDGET),--budget $(BUDGET)) $(if $(DRY_RUN),--dry-run) $(ARGS)

# FASTPAR_CUDA=1 for one with the CUDA kernels, where nvcc is.
wheel: setup ## dist/*.whl: one manylinux_2_28 wheel for every Python and torch, checked by auditwheel
	@tools/build_wheel.sh

lint: setup ## ruff, clang-format, mypy, links and names in the docs
	@tools/run_checks.sh --lint

format: setup ## rewrite Python and C++ sources in the project style
	@tools/in_env.sh ruff check --fix-only --quiet .
	@tools/in_env.sh ruff format .
	@find csrc -name "*.cpp" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh" | xargs -r tools/in_env.sh clang-format -i

docs: build ## the API reference, in build/docs/index.html; fails on broken links and public names without docs
	@$(PY) tools/make_docs.py

bench: build ## the microbenchmarks; rows go to bench/results/
	@$(PY) -m fastpar.cli bench $(ARGS)

asan: setup ## the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	@tools/run_asan.sh $(ARGS)

abi: build ## the binary must use the LibTorch stable ABI only
	@tools/in_env.sh torch-abi-audit --check torch fastpar/_C.so

clean: ## remove build products and caches (not .venv)
	rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis fastpar/*.so
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
