"""The Triton kernels of mixture of experts where there is no GPU: in the interpreter, and compiled ahead of time.

Compiled is what the public functions would launch with the blocks that they choose on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.overlap_gemm_cases import MappedBuffer, create_files
from tests.triton_aot import HOPPER, LDS_LIMIT, MI300, SHARED_LIMIT, CompilingDriver, Target, compile_launch, loops
from tests.triton_interpreter import run_interpreted

triton = pytest.importorskip("triton")

from fastpar.kernels import (  # noqa: E402  (triton is optional)
    grouped_gemm,
    moe_push,
    moe_rows,
    moe_sort,
    overlap_gemm_buffer,
)
from fastpar.ops.moe import permute as row_ops  # noqa: E402
from fastpar.reference import moe_rows as row_reference  # noqa: E402

STEMS = ("moe_rows", "grouped_gemm", "moe_mlp", "moe_push")
CUDA = torch.device("cuda")
EXPERTS, TOKENS, ROWS, HIDDEN, FEATURES = 8, 512, 1024, 1024, 768


@pytest.mark.timeout(600)
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "slow"])
def test_kernels_match_the_reference_in_the_interpreter(slow: bool) -> None:
    run_interpreted(*(f"check_{stem}.py" for stem in STEMS), markers="slow" if slow else "not slow")


class _On:
    """What is looked at of a tensor on a device that this machine need not have."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_rows_of_cuda_tensors_go_to_triton_and_those_of_other_devices_to_plain_pytorch() -> None:
    cuda: Any = _On("cuda")
    meta: Any = _On("meta")
    assert row_ops._elsewhere(cuda) is moe_rows
    assert row_ops._elsewhere(cuda, takes=False) is row_reference
    assert row_ops._elsewhere(meta) is row_reference


# ---- ahead of time ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[HOPPER, MI300], ids=["sm_90", "gfx942"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """What Triton compiles for until the test ends."""
    monkeypatch.setattr(torch.version, "hip", None if request.param == HOPPER else "6.4")
    monkeypatch.setattr(moe_rows, "WARP_SIZE", request.param[2])
    monkeypatch.setattr(grouped_gemm, "_is_hopper", lambda device: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", CompilingDriver(request.param))
    chosen: Target = request.param
    return chosen


class Compiled:
    """In place of a module's `launch`: compiles, and keeps what the compiler reports by kernel."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.found: dict[str, dict[str, Any]] = {}

    def __call__(self, kernel: Any, programs: int, device: torch.device, *arguments: Any, **options: Any) -> None:
        if arguments and isinstance(arguments[0], dict):
            arguments, options = (), arguments[0]
        self.found[kernel.__name__] = compile_launch(kernel, self.target, programs, arguments, options)


def documented_registers() -> dict[str, int]:
    """From the table in the module's docstring."""
    rows = re.findall(r"^    (\w+_kernel) +(\d+) +0 spills$", grouped_gemm.__doc__ or "", re.MULTILINE)
    found = {kernel: int(registers) for kernel, registers in rows}
    assert len(found) == 4
    return found


def check(name: str, found: dict[str, Any], target: Target, allowed_spills: int = 0) -> None:
    assert found["spills"] <= allowed_spills, (name, found["spills"])
    assert found["shared"] <= (SHARED_LIMIT if target == HOPPER else LDS_LIMIT), (name, found["shared"])
    limit = 65536 // found["threads"] if target == HOPPER else 512 * 256 // found["threads"]
    assert found["registers"] <= limit, (name, found["registers"])


def products(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Calls of every function of grouped_gemm, with and without what they need not be given."""
    config = grouped_gemm.configuration
    groups = grouped_gemm.RowGroups(range(0, ROWS + 1, ROWS // EXPERTS), ROWS, torch.device("cpu"))
    x, rows = torch.zeros(TOKENS, HIDDEN, dtype=dtype), torch.zeros(ROWS, FEATURES, dtype=dtype)
    first, second = (torch.zeros(EXPERTS, *s, dtype=dtype) for s in ((2 * FEATURES, HIDDEN), (HIDDEN, FEATURES)))
    index, weights = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS)
    bias, hidden = torch.zeros(EXPERTS, 2 * FEATURES, dtype=dtype), torch.zeros(ROWS, 2 * FEATURES, dtype=dtype)
    factor, mean = torch.ones(1), max(groups.rows_per_expert, 512)  # so many that the grid is persistent
    grad = grouped_gemm.wgrad_configuration(2 * FEATURES, HIDDEN, dtype, CUDA, gathers=True)
    one, two = config(mean, FEATURES, dtype, CUDA), config(mean, FEATURES, dtype, CUDA, sums=2)
    dact = grouped_gemm.dact_configuration(mean, FEATURES, dtype, CUDA)
    act = {"activation": "swiglu", "index": index, "row_weights": weights}
    return {
        "gathered": lambda: grouped_gemm.grouped_linear(x, first, groups, bias, index=index, scale=weights, config=one),
        "act": lambda: grouped_gemm.grouped_linear_act(x, first, groups, **act, config=two),
        "act, interleaved": lambda: grouped_gemm.grouped_linear_act(
            x,
            first.transpose(1, 2),
            groups,
            bias,
            index=index,
            activation="clamped_swiglu",
            interleaved=True,
            transposed=True,
            config=grouped_gemm._one_tile_each(two),
        ),
        **{
            f"act, {name}": lambda name=name, weight=weight, config=config: grouped_gemm.grouped_linear_act(
                x, weight, groups, bias[:, : weight.shape[1]], **{**act, "activation": name}, config=config
            )
            for name, weight, config in (
                ("geglu", first, grouped_gemm._one_tile_each(two)),
                ("gelu", first[:, :FEATURES], grouped_gemm._one_tile_each(one)),
            )
        },
        "plain": lambda: grouped_gemm.grouped_linear(rows, second, groups, config=one),
        "dact": lambda: grouped_gemm.grouped_linear_dact(x, second, groups, hidden, **act, config=dact),
        "dact, interleaved": lambda: grouped_gemm.grouped_linear_dact(
            x,
            second,
            groups,
            hidden,
            **{**act, "activation": "clamped_swiglu"},
            interleaved=True,
            config=dact,
        ),
        "dgrad": lambda: grouped_gemm.grouped_linear(hidden, first, groups, transposed=True, config=one),
        "wgrad": lambda: grouped_gemm.grouped_wgrad(hidden, x, groups, right_index=index, factor=factor, config=grad),
        "bias_grad": lambda: grouped_gemm.grouped_bias_grad(hidden, groups, factor=factor),
    }


def check_product(name: str, found: dict[str, Any], target: Target, dtype: torch.dtype) -> None:
    text = found["ptx"]
    if target == MI300:
        assert "v_mfma" in text, name
        assert re.search(r"(?:global|buffer)_load_dwordx4", text), name
        return
    assert re.search(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x10\b", text), f"{name}: narrow loads"
    products_in = [loop for loop in loops(text) if "wgmma" in loop or "fma.rn.f32" in loop]
    assert products_in, name
    assert any("wgmma.mma_async" in loop for loop in products_in) == (dtype != torch.float32), name
    assert found["wide_stores"] > 0, name


def compile_products(
    monkeypatch: pytest.MonkeyPatch, target: Target, dtype: torch.dtype, names: tuple[str, ...]
) -> dict[str, int]:
    """Compile and check them; the most registers of a thread of every kernel."""
    registers: dict[str, int] = {}
    for name, call in products(dtype).items():
        if name not in names:
            continue
        compiled = Compiled(target)
        monkeypatch.setattr(grouped_gemm, "launch", compiled)
        call()
        for kernel, found in compiled.found.items():
            # Known: ptxas stops this one at 128 registers of its own accord.
            is_known = (name, kernel, dtype, target) == ("plain", "grouped_gemm_kernel", torch.float32, HOPPER)
            check(f"{name}: {kernel}", found, target, 28 if is_known else 0)
            if name != "dact, interleaved":  # which the table in the docstring does not have
                registers[kernel] = max(found["registers"], registers.get(kernel, 0))
            if kernel not in ("tile_table_kernel", "grouped_bias_grad_kernel"):
                check_product(name, found, target, dtype)
    return registers


@pytest.mark.timeout(600)
def test_products_compile_without_spills_to_tensor_core_loops(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    names = (
        ("gathered", "act", "act, interleaved", "act, geglu", "act, gelu", "dact", "dact, interleaved", "wgrad")
        if target == HOPPER
        else ("act", "wgrad")
    )
    registers = compile_products(monkeypatch, target, torch.bfloat16, names)
    if target == HOPPER:
        for kernel, documented in documented_registers().items():
            assert registers[kernel] <= documented, kernel


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_all_products_compile_in_every_dtype(
    monkeypatch: pytest.MonkeyPatch, target: Target, dtype: torch.dtype
) -> None:
    compile_products(monkeypatch, target, dtype, tuple(products(dtype)))


@pytest.mark.parametrize("num_tables", [1, 8])
def test_rows_are_moved_16_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, target: Target, num_tables: int) -> None:
    compiled = Compiled(target)
    monkeypatch.setattr(moe_rows, "launch", compiled)
    tables = [torch.zeros(16, HIDDEN, dtype=torch.bfloat16) for _ in range(num_tables)]
    index, weights = torch.zeros(64, 2, dtype=torch.int64), torch.zeros(64, 2)
    moe_rows.gather_rows(tables, index[:, 0], scale=weights[:, 0])
    moe_rows.sum_rows(tables, index, weights=weights, add=torch.zeros(64, HIDDEN, dtype=torch.bfloat16))
    moe_rows.dot_rows(torch.zeros(64, HIDDEN, dtype=torch.bfloat16), tables, index[:, 0])
    assert len(compiled.found) == 3
    for name, found in compiled.found.items():
        check(name, found, target)
        assert found["wide_loads"] > 0, name
        assert found["wide_stores"] > 0 or name == "dot_rows_kernel", name


def test_placing_kernels_compile_without_spills(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    compiled = Compiled(target)
    monkeypatch.setattr(moe_sort, "launch", compiled)
    moe_sort.place_pairs(torch.zeros(4096, 8, dtype=torch.int64), 256, torch.zeros(4096, 8))
    assert len(compiled.found) == 3
    for name, found in compiled.found.items():
        check(name, found, target)


WAITING = {"plan_kernel", "await_kernel"}
SIGNALLING = {"announce_kernel", "push_kernel", "show_kernel"}


def test_pushed_rows_are_written_wide_and_signalled_after_they_are_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Target
) -> None:
    compiled = Compiled(target)
    for module in (moe_push, moe_rows, moe_sort, overlap_gemm_buffer):
        monkeypatch.setattr(module, "launch", compiled)
    nbytes = 1 << 24
    symmetric = MappedBuffer(create_files(tmp_path, 2, nbytes), 0, nbytes)
    exchange = moe_push.PushExchange(
        overlap_gemm_buffer.OverlapBuffer(symmetric, flag_capacity=4),
        num_experts=EXPERTS, width=HIDDEN, dtype=torch.bfloat16, capacity=ROWS,
    )  # fmt: skip
    x, indices, weights = torch.zeros(64, HIDDEN).bfloat16(), torch.zeros(64, 2).long(), torch.zeros(64, 2)
    pushed = exchange.dispatch(x, indices, weights)
    exchange.give_back(pushed, exchange.empty_rows(), weights=weights)
    assert {*WAITING, *SIGNALLING, "slot_kernel"} <= set(compiled.found)
    for name, found in compiled.found.items():
        check(name, found, target)
        text = found["ptx"]
        if target == MI300:
            assert name not in WAITING or "buffer_inv sc0 sc1" in text, "reads after a wait may find stale lines"
            assert name not in SIGNALLING or "buffer_wbl2 sc0 sc1" in text, "a signal may overtake the data"
            continue
        if name in WAITING:
            assert re.search(r"(?:ld|atom)\.global\.(?:acquire\.sys|sys\.acquire)", text), name
        if name in SIGNALLING:
            signals = list(re.finditer(r"atom\.global\.(?:release\.sys|sys\.release)\.exch", text))
            assert signals, name
            if name != "show_kernel":  # whose data are those of earlier launches
                before = text[: signals[0].start()]
                assert before.rfind("bar.sync") > before.rfind("st.global"), "a signal may overtake the data"
    assert compiled.found["push_kernel"]["wide_loads"] > 0
    assert compiled.found["push_kernel"]["wide_stores"] > 0
    if target == HOPPER:
        counted = re.search(r"atom\.global\.(?:acq_rel\.sys|sys\.acq_rel)\.add", compiled.found["push_kernel"]["ptx"])
        assert counted, "the last program may not have seen what the others have stored"
