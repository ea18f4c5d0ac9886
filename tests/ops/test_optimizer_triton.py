"""The Triton kernel of the optimizer steps where there is no GPU: in the interpreter, and compiled ahead of time.

Compiled is what the functions of fastpar.kernels.optimizer would launch: a stand-in for Triton's driver names the
target, and launches end with the compilation.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fastpar.contracts.optimizer import Step
from fastpar.contracts.optimizer_facts import facts_of
from tests.triton_aot import HOPPER, CompilingDriver, Target, compile_launch, each_target
from tests.triton_interpreter import run_interpreted

triton = pytest.importorskip("triton")

from fastpar.kernels import optimizer as kernels  # noqa: E402  (triton is optional)
from fastpar.kernels.optimizer_kernels import NUM_STATES  # noqa: E402

F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8


@pytest.mark.timeout(600)
def test_kernels_match_the_model_in_the_interpreter() -> None:
    run_interpreted("check_optimizer.py")


class Kind(NamedTuple):
    """A call: its rule (a key of RULES), dtypes, and whether it rounds stochastically."""

    rule: str
    param: torch.dtype = F32
    grad: torch.dtype = F32
    state: torch.dtype = F32
    output: torch.dtype | None = None
    is_split: bool = False
    is_stochastic: bool = False
    count: int = 5000


RULES = {"adamw": 0, "sgd": 1, "plain_sgd": 2, "lion": 3}
# with the registers of a thread on Hopper that each may have: at most 64, which leave room for four programs of 256
# threads on a multiprocessor, and at most 48 for five where no operand is float32 and a thread has half the bytes
KINDS = {
    Kind("adamw"): 48,
    Kind("adamw", F32, BF16, F32, BF16): 56,
    Kind("adamw", BF16, BF16, F32, is_split=True): 64,
    Kind("adamw", BF16, BF16, BF16, is_stochastic=True): 48,
    Kind("adamw", BF16, BF16, U8, is_split=True): 48,
    Kind("adamw", F32, F16, U8, F16): 48,
    Kind("lion", BF16, BF16, BF16, is_stochastic=True): 40,
    Kind("sgd", F32, F32, F32, BF16): 40,
    Kind("plain_sgd"): 32,
}


target = each_target(kernels)


def compiled(monkeypatch: pytest.MonkeyPatch, target: Target, kind: Kind, offset: int = 0) -> dict[str, Any]:
    """Registers, spills, ... of a call with one tensor that begins `offset` elements past an aligned address."""
    found: list[dict[str, Any]] = []
    kernel = kernels.optimizer_kernel

    class Launcher:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments, **options: found.append(
                compile_launch(kernel, target, grid[0], arguments, options)
            )

    def one(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(kind.count + 16, dtype=dtype)[offset : offset + kind.count]

    states = [[one(kind.state)] for _ in range(NUM_STATES[RULES[kind.rule]])]
    scales = [[torch.zeros(-(-kind.count // 256))] if kind.state == U8 else [] for _ in states]
    lists = ([one(kind.param)], [one(kind.grad)], *states, *scales)
    outputs = [] if kind.output is None else [one(kind.output)]
    remainders = [one(torch.int16)] if kind.is_split else []
    rounding = [5, 1, 2] if kind.is_stochastic else []
    scalars, tail = (torch.ones(1), torch.ones(1)), (list(range(len(outputs))), rounding, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "optimizer_kernel", Launcher())
        if kind.rule == "adamw":
            numbers = (1, 0.1, 0.9, 0.99, 1e-8, 0.1)
            kernels.adamw_step(*lists, outputs, remainders, *scalars, None, *tail, *numbers)
        elif kind.rule == "lion":
            kernels.lion_step(*lists, outputs, remainders, *scalars, *tail, 0.1, 0.9, 0.99, 0.1)
        elif kind.rule == "sgd":
            kernels.sgd_step(*lists, outputs, remainders, *scalars, *tail, 0.1, 0.9, 0.0, 0.1, False, False)
        else:
            kernels.sgd_step(*lists, [], [], outputs, remainders, *scalars, *tail, 0.1, 0.0, 0.0, 0.1, False, False)
    (report,) = found
    return report


# Accesses to global memory, by how many bytes of a thread they move: PTX, and the assembly of AMD.
LOADS = {
    16: r"ld\.global\S*\.(?:v4\.b32|v2\.b64)|(?:global|buffer)_load_dwordx4",
    8: r"ld\.global\S*\.v2\.b32|(?:global|buffer)_load_dwordx2",
}
STORES = {
    16: r"st\.global\S*\.(?:v4\.b32|v2\.b64)|(?:global|buffer)_store_dwordx4",
    8: r"st\.global\S*\.v2\.b32|(?:global|buffer)_store_dwordx2",
}


def assert_moved_together(assembly: str, accesses: dict[int, str], dtypes: list[torch.dtype | None]) -> None:
    """A thread's 4 elements of each of these tensors are one access: 16 bytes, 8, or (of codes, not looked for) 4."""
    for width, pattern in accesses.items():
        tensors = sum(dtype is not None and 4 * dtype.itemsize == width for dtype in dtypes)
        assert len(re.findall(pattern, assembly)) >= tensors


def cases() -> list[Any]:
    """Every kind; the most common ones in every run."""
    common = (
        Kind("adamw"),
        Kind("adamw", BF16, BF16, F32, is_split=True),
        Kind("adamw", BF16, BF16, U8, is_split=True),
    )
    marks = {kind: () if kind in common else (pytest.mark.slow,) for kind in KINDS}
    return [pytest.param(kind, marks=marks[kind], id="-".join(map(str, kind))) for kind in KINDS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", cases())
def test_kernels_compile_without_spills_and_with_wide_accesses(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: Kind
) -> None:
    found = compiled(monkeypatch, target, kind)
    assert found["spills"] == 0
    assert found["shared"] <= 64, "operands are exchanged through shared memory"
    states = [kind.state] * NUM_STATES[RULES[kind.rule]]
    remainder = torch.int16 if kind.is_split else None
    written = [kind.param, *states, kind.output, remainder]
    assert found["threads"] == kernels.CHUNK // 4
    assert_moved_together(found["ptx"], LOADS, [kind.param, kind.grad, *states, remainder])
    assert_moved_together(found["ptx"], STORES, written)
    if target != HOPPER:
        return
    assert found["registers"] <= KINDS[kind]
    assembly = found["ptx"]
    assert ".approx" not in assembly
    assert ".ftz" not in assembly
    assert not re.search(r"^\s*call", assembly, re.MULTILINE)
    # every multiply-add is one that the source names, for every element of a thread, in a chunk and in a masked block
    per_element = {"adamw": 4, "lion": 2, "sgd": 3, "plain_sgd": 2}[kind.rule]
    elements = kernels.CHUNK // found["threads"] + max(256 // found["threads"], 1)
    assert len(re.findall(r"fma\.rn\.f32", assembly)) == per_element * elements


def test_addresses_that_are_not_aligned_are_not_read_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", CompilingDriver(HOPPER))
    found = compiled(monkeypatch, HOPPER, Kind("adamw"), offset=1)
    assert (found["wide_loads"], found["wide_stores"], found["spills"]) == (0, 0, 0)


def test_programs_update_several_chunks_where_no_operand_is_float32() -> None:
    def programs(*lists: torch.Tensor) -> list[int]:
        param, grad, state = ([x] for x in lists)
        columns = kernels._columns(kernels.OptimizerTensors(param, grad, [state], [], [], []), [], [], None)
        return [group.programs for group in kernels.Tables().find(columns).groups]

    narrow, wide = (torch.zeros(9 * kernels.CHUNK, dtype=dtype) for dtype in (BF16, F32))
    assert programs(narrow, narrow, narrow) == [3]
    for lists in ((wide, narrow, narrow), (narrow, wide, narrow), (narrow, narrow, wide)):
        assert programs(*lists) == [9]


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("state", [F32, U8])
def test_tables_are_the_same_from_the_facts_that_checks_found(rule: str, state: torch.dtype) -> None:
    def some(dtype: torch.dtype, size: int = 300) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=dtype), torch.zeros(0, dtype=dtype), torch.zeros(3, dtype=dtype)]

    params, grads, remainders = [*some(BF16)[:2], torch.zeros(3)], some(F16), some(torch.int16)
    states = [some(state) for _ in range(NUM_STATES[RULES[rule]])]
    scales = [some(F32, 2) if state == U8 else [] for _ in states]
    outputs = [None, None, torch.zeros(3, dtype=F16)]
    step = Step(params, grads, states, scales, 1.0, None, outputs, remainders, None, ())
    facts = facts_of(step)
    assert facts is not None
    tensors = kernels.OptimizerTensors(params, grads, states, scales, outputs[2:], remainders)
    arguments = (tensors, [2], [7, 1, 2, 3, 4, 5, 6])
    seen = (facts.dtypes, facts.addresses)
    assert kernels._columns(*arguments, seen) == kernels._columns(*arguments, None)


# ---- the choice of kernels -------------------------------------------------------------------------------------------


def test_every_device_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpar.ops import _backends
    from fastpar.ops.optimizer import implementation
    from fastpar.reference import optimizer as reference

    on_cpu = implementation(torch.empty(0))
    assert on_cpu.adamw_step is torch.ops.fastpar.adamw_step.default
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda"))
    assert implementation(on_cuda) is kernels
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert implementation(on_cuda) is on_cpu, "the op, which a graph can hold"
        assert torch._C._dispatch_has_kernel_for_dispatch_key("fastpar::adamw_step", "CUDA")
    monkeypatch.setattr(_backends, "HAS_TRITON", False)
    assert implementation(on_cuda) is reference
    assert implementation(torch.empty(0, device="meta")) is reference
