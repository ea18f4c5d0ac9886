"""Bad calls of every public op: the result is right, or a typed error says which argument is wrong. fuzz_calls.py
makes the calls, in a process of its own, so that a signal or a hang there is a failure here."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from fastpar import ops
from tests.project.fuzz_api import PARTS
from tests.project.fuzz_calls import GOOD, floats

ROOT = Path(__file__).resolve().parents[2]
# No functions of tensors: classes, and what times its machine.
OTHERS = {"measure_overlap"}
SEED = 14


def test_every_public_op_is_called() -> None:
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert functions - OTHERS == set(GOOD)


@pytest.mark.parametrize("name", GOOD)
def test_the_calls_that_are_made_bad_are_good(name: str) -> None:
    getattr(ops, name)(**GOOD[name]())


def bad_calls(names: list[str], count: int, deadline: float) -> list[dict[str, Any]]:
    """What went wrong in `count` calls of each: the calls, and how the process ended if not well."""
    command = [sys.executable, "-m", "tests.project.fuzz_calls", ",".join(names), str(SEED), str(count)]
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline)
    except subprocess.TimeoutExpired as error:
        last = (error.stderr or b"").decode().splitlines()[-1:]
        return [{"call": last, "wrong": "hangs"}]
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    found = [line for line in lines if "wrong" in line]
    if process.returncode != 0 or {"done": True} not in lines:
        found.append({"call": process.stderr.splitlines()[-30:], "wrong": f"ended with {process.returncode}"})
    return found


@pytest.mark.expensive
def test_350_bad_calls_of_every_op_are_right_or_typed_errors_that_name_an_argument() -> None:
    assert bad_calls(list(GOOD), 350, 240.0) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_1000_bad_calls_of_every_op_are_right_or_typed_errors_that_name_an_argument() -> None:
    assert bad_calls(list(GOOD), 1000, 800.0) == []


# ---- everything else that is public ----------------------------------------------------------------------------------

NAMES = {part: [f"{part}.{case}" for case in cases] for part, cases in PARTS.items()}


@pytest.mark.expensive
@pytest.mark.timeout(300)
def test_bad_calls_of_everything_public_are_right_or_typed_errors_that_name_an_argument() -> None:
    assert bad_calls([name for part in PARTS for name in NAMES[part]], 6, 280.0) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_350_bad_calls_of_everything_public_are_right_or_typed_errors_that_name_an_argument(part: str) -> None:
    assert bad_calls(NAMES[part], 350, 1700.0) == []


# ---- what the calls above do not make --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_torch_func_transforms_are_refused_by_name(transform: str) -> None:
    logits, target = torch.randn(3, 5), torch.tensor([0, 1, 2])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return ops.vocab_parallel_cross_entropy(x, target if x.dim() == 2 else target[0])

    calls = {
        "grad": lambda: torch.func.grad(loss)(logits),
        "vmap": lambda: torch.func.vmap(loss)(logits),
        "jvp": lambda: torch.func.jvp(loss, (logits,), (logits,)),
    }
    with pytest.raises(ValueError, match=r"vocab_parallel_cross_entropy: logits is inside a torch.func transform"):
        calls[transform]()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("op", [ops.rms_norm, ops.vocab_parallel_softmax])
def test_tangents_are_refused_where_they_would_be_lost(op: Any) -> None:
    x, weight = torch.randn(3, 5), [torch.randn(5)] if op is ops.rms_norm else []
    with forward_ad.dual_level():
        with pytest.raises(ValueError, match=rf"{op.__name__}: \w+ has a tangent of forward-mode differentiation"):
            op(forward_ad.make_dual(x, x), *weight)
        op(x, *weight)


def numbers_of(name: str) -> list[str]:
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    return [p.name for p in parameters if re.search(r"\b(int|float)\b", str(p.annotation))]


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name in GOOD for argument in numbers_of(name)])
def test_an_int_beyond_64_bits_or_beyond_all_floats_is_taken_or_refused_by_name(name: str, argument: str) -> None:
    for value in (2**64, -(2**64), 10**400, -(10**400)):
        error = ""
        try:
            getattr(ops, name)(**{**GOOD[name](), argument: value})
        except (TypeError, ValueError) as refused:
            error = str(refused)
        assert argument in error or (not error and abs(value) < 2**1000)


def test_an_int_beyond_64_bits_is_the_number_that_it_is() -> None:
    positions = torch.arange(3)
    for found, wanted in zip(
        ops.rotary_tables(positions, 4, theta=2**64), ops.rotary_tables(positions, 4, theta=2.0**64), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    given = {"logits": floats(3, 6), "top_k": 2}
    found = ops.vocab_parallel_top_k_top_p(**given, filter_value=-(2**64))
    torch.testing.assert_close(found, ops.vocab_parallel_top_k_top_p(**given, filter_value=-(2.0**64)), rtol=0, atol=0)


def test_a_range_of_two_numbers_is_a_type_error_that_says_what_it_must_be() -> None:
    with pytest.raises(TypeError, match=r"vocab_range must be \(an int, an int, an int\) or None, got tuple \(0, 5\)"):
        ops.vocab_parallel_softmax(torch.randn(3, 5), vocab_range=(0, 5))  # type: ignore[arg-type]


def test_options_that_are_handed_on_are_checked_too() -> None:
    x, weight, target, row = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 1, 2]), torch.zeros(3)
    with pytest.raises(TypeError, match="linear_cross_entropy_dgrad: z_loss must be a number, got str 'a'"):
        ops.linear_cross_entropy_dgrad(x, weight, target, row, row, z_loss="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ops.fastpar.moe_tokens_by_rank(torch.zeros(2, 1, dtype=torch.int64), 2**63 - 1, 1),
        lambda: torch.ops.fastpar.moe_tokens_by_rank(torch.zeros(2, 1, dtype=torch.int64), 2, 2**62),
        lambda: torch.ops.fastpar.moe_sort_pairs(torch.zeros(2, 1, dtype=torch.int64), 2**62),
        lambda: torch.ops.fastpar.vocab_embedding_backward(
            torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3), 2**63 - 1, 0, -1
        ),
    ],
)
def test_sizes_beyond_all_memory_are_errors_of_the_compiled_ops(call: Any) -> None:
    with pytest.raises(RuntimeError, match="fastpar: "):
        call()
