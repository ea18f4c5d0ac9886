"""One small call of every public op on a real device, in several processes: what `tests/gpu/test_gpu_smoke.py` judges.

    python -m tests.gpu.gpu_smoke cuda rms_norm swiglu        a line of JSON each

The cases are those of the rehearsal (tests/rehearsed/op_cases.py), and shapes that only a device refuses. Processes,
not threads: Triton compiles many kernels here, and an illegal access ends the context of its own process only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastpar import ops
from tests.rehearsed.op_cases import CASES as OP_CASES
from tests.rehearsed.op_cases import Maker, backward

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}  # others: sums of float32 in another order
FLOAT32 = 1e-3


def _at_the_limit_of_shared_memory(device: str) -> Sequence[Tensor]:
    """47.25 to 48 KiB of dynamic shared memory a block, which needs the opt-in beside static memory."""
    make = Maker(device)
    found: list[Tensor] = []
    for vocab in (24576, 49152):
        make.leaves = []
        logits = make.leaf(3, vocab, dtype=torch.bfloat16)
        found += backward(make, ops.vocab_parallel_cross_entropy(logits, make.ids(vocab, 3)))
    return found


CASES: dict[str, Callable[[str], Sequence[Tensor]]] = {
    **OP_CASES,
    "vocab_parallel_cross_entropy, at the limit of shared memory": _at_the_limit_of_shared_memory,
}


def problem_of(name: str, device: str) -> str:
    """What is wrong with a case on a device, against the CPU; or nothing."""
    case = CASES[name]
    try:
        expected, found = case("cpu"), case(device)
        if len(found) != len(expected):
            return f"{len(found)} results, {len(expected)} on the CPU"
        for ours, theirs in zip(found, expected, strict=True):
            tolerance = TOLERANCE.get(theirs.dtype, FLOAT32)
            torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)
    except Exception as error:  # all of them: the case failed, and the next one is run
        return f"{type(error).__name__}: {error}"
    return ""


def run_all(device: str, processes: int, names: Sequence[str] | None = None) -> dict[str, str]:
    """Case -> what is wrong with it. A process that dies costs the cases that it had not come to."""
    chosen = list(CASES if names is None else names)
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.gpu_smoke", device]
    running = [
        subprocess.Popen([*command, *chosen[i::processes]], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(min(processes, len(chosen)))
    ]
    found: dict[str, str] = {}
    for i, process in enumerate(running):
        out, errors = process.communicate()
        for line in out.decode().splitlines():
            if line.startswith('{"case"'):
                done = json.loads(line)
                found[done["case"]] = done["problem"]
        for name in chosen[i::processes]:
            last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
            found.setdefault(name, f"its process ended with status {process.returncode} before it was done: {last}")
    return found


if __name__ == "__main__":
    for given in sys.argv[2:]:
        print(json.dumps({"case": given, "problem": problem_of(given, sys.argv[1])}), flush=True)
