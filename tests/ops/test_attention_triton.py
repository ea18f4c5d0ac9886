"""Attention's Triton kernels where there is no GPU: tables of steps, the interpreter, and compiled ahead of time.

Compiled is what the ops would launch with the blocks that they choose on a GPU; test_gpu_attention.py runs it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastpar.ops import _attention_cuda
from tests.ops.attention_triton_cases import table, visible
from tests.triton_aot import (
    HOPPER,
    LDS_LIMIT,
    SHARED_LIMIT,
    Target,
    compile_launch,
    each_target,
)
from tests.triton_interpreter import run_interpreted

triton = pytest.importorskip("triton")

from fastpar.kernels import attention, attention_steps  # noqa: E402  (triton is optional)
from fastpar.kernels.attention_steps import HostTables, StepShape, make_steps  # noqa: E402

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.timeout(600)
def test_kernels_match_float64_in_the_interpreter() -> None:
    run_interpreted("check_attention.py")


# ---- tables of steps -------------------------------------------------------------------------------------------------


def covered(blocks: Tensor, runs: Tensor, shape: StepShape, columns: int) -> Tensor:
    """How often a pair is visible in the runs of one batch row: int64 [rows, columns]."""
    count = torch.zeros(shape.rows, columns, dtype=torch.int64)
    assert sorted(blocks[:, 0].tolist()) == list(range(len(blocks)))
    for block, whole, masked, last in blocks.tolist():
        row = torch.arange(block * shape.block, min((block + 1) * shape.block, shape.rows))[:, None]
        for number in range(whole, last):
            begin, end, low, high, first, after = runs[number].tolist()
            column = torch.arange(begin, end)[None, :]
            pairs = (column - row >= low) & (column - row <= high) & (row >= first) & (row < after)
            assert begin < end
            assert number >= masked or ((end - begin) % shape.step == 0 and pairs.all())
            count[row[:, 0], begin:end] += pairs
    return count


@st.composite
def tables(draw: Any) -> tuple[Tensor, int, int]:
    """(tiles whose rows are apart, rows, columns)."""
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    cuts = sorted(draw(st.sets(st.integers(0, rows), max_size=6)))
    found = []
    for begin, end in itertools.pairwise(cuts):
        left = draw(st.integers(0, columns - 1))
        low = draw(st.integers(-45, 45))
        found.append((begin, end, left, draw(st.integers(left + 1, columns)), low, low + draw(st.integers(0, 60))))
    return table(found), rows, columns


@settings(max_examples=150, deadline=None)
@given(tables(), st.sampled_from([1, 4, 16]), st.sampled_from([1, 4, 16]))
def test_runs_have_every_visible_pair_once_and_whole_ones_nothing_else(
    case: tuple[Tensor, int, int], block: int, step: int
) -> None:
    tiles, rows, columns = case
    wanted = visible(tiles, None, 1, rows, columns)[0, 0].long()
    by_query, by_key = StepShape(rows, block, step), StepShape(columns, block, step, by_key=True)
    blocks, runs = make_steps(tiles, None, by_query)
    assert torch.equal(covered(blocks[0], runs, by_query, columns), wanted)
    blocks, runs = make_steps(tiles, None, by_key)
    assert torch.equal(covered(blocks[0], runs, by_key, rows), wanted.T)


def test_batch_rows_have_blocks_of_their_own_tiles() -> None:
    tiles = table([(0, 9, 0, 9, -8, 0), (0, 4, 0, 4, -3, 0), (4, 9, 4, 9, -4, 0)])
    offsets, shape = torch.tensor([0, 1, 1, 3]), StepShape(9, 4, 2)
    blocks, runs = make_steps(tiles, offsets, shape)
    wanted = visible(tiles, offsets, 3, 9, 9)[:, 0].long()
    for row in range(3):
        assert torch.equal(covered(blocks[row], runs, shape, 9), wanted[row])


def test_the_worked_example() -> None:
    blocks, runs = make_steps(table([(0, 4, 0, 4, -3, 0)]), None, StepShape(4, 2, 2))
    assert blocks.tolist() == [[[1, 1, 2, 3], [0, 0, 0, 1]]]
    assert runs.tolist() == [[0, 2, -3, 0, 0, 4], [0, 2, -3, 0, 0, 4], [2, 4, -3, 0, 0, 4]]
    assert all(str(tuple(row)) in (attention_steps.__doc__ or "") for row in runs.tolist())


def test_a_block_of_a_causal_triangle_masks_no_more_than_its_diagonal() -> None:
    _, runs = make_steps(table([(0, 1024, 0, 1024, -1023, 0)]), None, StepShape(1024, 128, 64))
    blocks, _ = make_steps(table([(0, 1024, 0, 1024, -1023, 0)]), None, StepShape(1024, 128, 64))
    for block, whole, masked, last in blocks[0].tolist():
        assert sum(int(runs[i, 1] - runs[i, 0]) for i in range(whole, masked)) == 128 * block
        assert sum(int(runs[i, 1] - runs[i, 0]) for i in range(masked, last)) == 128


def test_a_table_is_made_once_and_one_that_was_edited_is_another() -> None:
    kept, tiles, shape = HostTables(), table([(0, 9, 0, 9, -8, 0)]), StepShape(9, 4, 2)
    first = kept.steps(tiles, None, shape, CPU)
    assert kept.steps(tiles.clone(), None, shape, CPU).runs.data_ptr() == first.runs.data_ptr()
    tiles[0, 5] = 8
    second = kept.steps(tiles, None, shape, CPU)
    assert torch.equal(second.runs, make_steps(tiles, None, shape)[1])
    assert not torch.equal(second.runs, first.runs)
    positions = torch.arange(5)
    assert torch.equal(kept.on(CPU, positions), positions)


# ---- the choice of kernels -------------------------------------------------------------------------------------------


class _On:
    """What is looked at of a tensor on a device that this machine need not have."""

    def __init__(self, device: str, dtype: torch.dtype, head_dim: int) -> None:
        self.device, self.dtype, self.shape = torch.device(device), dtype, (1, 2, 8, head_dim)


def test_cuda_tensors_go_to_triton_where_it_has_their_dtype_and_head_dims() -> None:
    def chosen(dtype: torch.dtype, head_dim: int, value_dim: int) -> Any:
        q: Any = _On("cuda", dtype, head_dim)
        v: Any = _On("cuda", dtype, value_dim)
        return _attention_cuda._kernels(q, v)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert chosen(dtype, 192, 128) is attention
        assert chosen(dtype, 256, 257) is None
    assert chosen(torch.float64, 64, 64) is None


@pytest.mark.parametrize(
    ("dims", "softcap", "p", "is_plain"),
    [((128, 128), 0.0, 0.0, True), ((80, 80), 0.0, 0.0, True), ((128, 128), 5.0, 0.0, False),
     ((128, 128), 0.0, 0.1, False), ((64, 128), 0.0, 0.0, False), ((100, 100), 0.0, 0.0, False),
     ((40, 40), 0.0, 0.0, False)],
)  # fmt: skip
def test_wide_steps_are_for_calls_that_leave_registers(
    dims: tuple[int, int], softcap: float, p: float, is_plain: bool
) -> None:
    q, v = (torch.zeros(1, 1, 1, dim, dtype=torch.bfloat16) for dim in dims)
    kinds = attention._kinds(q, v, softcap, attention.DropoutHash(p))
    assert kinds == {"dropout": p > 0, "plain": is_plain}
    found = attention.configuration("dkv", 128, torch.bfloat16, CUDA, **kinds)
    assert found.block_m == (64 if is_plain else 16 if p else 32)


# ---- ahead of time ---------------------------------------------------------------------------------------------------


target = each_target()


def compiled(
    target: Target, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], dtype: torch.dtype, softcap: float, p: float
) -> dict[str, dict[str, Any]]:
    """What the compiler reports of forward's and backward's kernels, by name."""
    found: dict[str, dict[str, Any]] = {}
    configure = attention.configuration

    def launch(kernel: Any, programs: Any, device: torch.device, *arguments: Any, **options: Any) -> None:
        found[kernel.__name__] = compile_launch(kernel, target, programs, arguments, options)

    def on_cuda(kind: str, head_dim: int, dtype: torch.dtype, device: torch.device, **options: bool) -> Any:
        return configure(kind, head_dim, dtype, CUDA, **options)

    monkeypatch.setattr(attention, "launch", launch)
    monkeypatch.setattr(attention, "configuration", on_cuda)
    q, dout = (torch.zeros(1, 4, 256, dim, dtype=dtype) for dim in dims)
    k, v = (torch.zeros(1, 2, 256, dim, dtype=dtype) for dim in dims)
    lse, tiles, hashed = torch.zeros(1, 4, 256), table([(0, 256, 0, 256, -255, 0)]), attention.DropoutHash(p, 1)
    attention.attention_forward(q, k, v, tiles, None, 0.1, softcap, hashed, dtype)
    attention.attention_backward(dout, q, k, v, lse, lse, tiles, None, 0.1, softcap, hashed, dtype)
    assert len(found) == 3
    return found


def check(found: dict[str, dict[str, Any]], target: Target, instruction: str = "mma.sync") -> None:
    for name, report in found.items():
        # Two registers of dkv, head dim 64, with Triton 3.7; blocks without are slower, see the module.
        allowed = 8 if name == "attention_dkv_kernel" and target == HOPPER else 0
        assert report["vector_spills"] <= allowed, (name, report["vector_spills"])
        assert report["shared"] <= (SHARED_LIMIT if target == HOPPER else LDS_LIMIT), (name, report["shared"])
        limit = 65536 // report["threads"] if target == HOPPER else 512 * 256 // report["threads"]
        assert report["registers"] <= limit, (name, report["registers"])
        assert any(word in report["ptx"] for word in ("wgmma.mma_async", "v_mfma", instruction)), name


@pytest.mark.expensive
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (256, 256), *(pytest.param((d, d), marks=pytest.mark.slow) for d in (80, 96, 112))]
)
def test_kernels_compile_without_spills_and_with_tensor_cores(
    target: Target, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]
) -> None:
    found = compiled(target, monkeypatch, dims, torch.bfloat16, 0.0, 0.0)
    check(found, target, "wgmma.mma_async")
    for name, report in found.items():
        assert report["wide_loads"] > 0 or "cp.async" in report["ptx"], name


def test_delta_is_read_16_bytes_at_a_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def launch(kernel: Any, programs: Any, device: torch.device, *arguments: Any, **options: Any) -> None:
        found.append(compile_launch(kernel, target, programs, arguments, options))

    monkeypatch.setattr(attention, "launch", launch)
    out = torch.zeros(1, 4, 256, 128, dtype=torch.bfloat16)
    attention.row_delta(out.transpose(1, 2).contiguous().transpose(1, 2), out, torch.zeros(1, 4, 256))
    assert found[0]["spills"] == 0
    assert found[0]["wide_loads"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("softcap", "p"), [(50.0, 0.0), (0.0, 0.1), (50.0, 0.1)])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
def test_softcap_and_dropout_compile_without_spills(
    target: Target, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], softcap: float, p: float
) -> None:
    check(compiled(target, monkeypatch, dims, torch.bfloat16, softcap, p), target)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_float32_compiles_without_spills(
    target: Target, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]
) -> None:
    check(compiled(target, monkeypatch, dims, torch.float32, 0.0, 0.0), target)
