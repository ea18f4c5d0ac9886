"""The Triton kernels of cross-entropy where there is no GPU: in the interpreter, and compiled ahead of time.

Compiled is what the functions of fastpar.kernels.cross_entropy would launch, for their own choice of blocks and warps:
a stand-in for Triton's driver names the target, and launches end with the compilation.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cross_entropy_cases import OPTIONS, upstream, with_weights
from tests.triton_aot import (
    HOPPER,
    LDS_LIMIT,
    MI300,
    SHARED_LIMIT,
    Target,
    compile_launch,
    each_target,
    loops,
)
from tests.triton_interpreter import run_interpreted

triton = pytest.importorskip("triton")

from fastpar.contracts.cross_entropy import check_options, check_weight  # noqa: E402
from fastpar.kernels import cross_entropy as kernels  # noqa: E402  (triton is optional)
from fastpar.kernels.cross_entropy import LossRows, alignment, configuration, rows_of  # noqa: E402

WRITERS = {"stats_exp_", "backward", "forward_backward"}


@pytest.mark.timeout(600)
def test_kernels_match_float64_in_the_interpreter() -> None:
    run_interpreted("check_cross_entropy.py")


# ---- ahead of time ---------------------------------------------------------------------------------------------------


target = each_target(kernels)


def compile_ops(
    monkeypatch: pytest.MonkeyPatch, target: Target, name: str, vocab: int, dtype: torch.dtype, ops: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Registers, spills, ... of each of the ops, for 4 rows of `vocab` columns."""
    found: dict[str, dict[str, Any]] = {}
    op = ""

    def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **options: Any) -> None:
        found[op] = compile_launch(kernel, target, programs, arguments, options)

    monkeypatch.setattr(kernels, "launch", launch)
    options = with_weights(OPTIONS[name], vocab, dtype)
    defaults = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0}
    checked = check_options(**{k: options.get(k, v) for k, v in defaults.items()})
    logits, ids = torch.zeros(4, vocab, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    weight, weight_sum = check_weight(options.get("weight"), vocab, logits, checked)
    g: Tensor = upstream(4, dtype)
    grad_lse = None if name == "plain" else g
    view = (ids, weight, 0, vocab, -100, checked.smoothing, checked.softcap, checked.logit_scale)
    fused = (ids, weight, weight_sum, g, *checked)
    backward = (torch.zeros(4, dtype=torch.float64), ids, weight, weight_sum, g, grad_lse, 0, vocab, *checked)
    statistics = torch.zeros(2, 7, 5 if checked.smoothing else 3, dtype=g.dtype)
    arguments: dict[str, tuple[Any, ...]] = {
        "stats": (logits, *view),
        "stats_exp_": (logits, *view),
        "merge": (statistics, ids, weight, weight_sum, vocab, *checked[:3]),
        "backward": (logits, *backward),
        "forward_backward": (logits, *fused),
        "scale_unless_one_": (logits, g[:1]),
    }
    for op in ops:
        getattr(kernels, op)(*arguments[op])
    return found


def check(op: str, found: dict[str, Any], target: Target, dtype: torch.dtype) -> None:
    assembly = found["ptx"]
    assert found["spills"] == 0, (op, found["spills"])
    assert found["shared"] <= (SHARED_LIMIT if target == HOPPER else LDS_LIMIT)
    if target != HOPPER:
        assert found["registers"] <= 512 * 256 // found["threads"]
        assert re.search(r"(?:global|buffer)_load_dwordx4", assembly) or op == "merge"
        return
    assert found["registers"] * found["threads"] <= 65536
    assert not re.search(r"^\s*call", assembly, re.MULTILINE), f"{op} calls a function"
    if op != "merge":
        assert re.search(r"ld\.global\S*\.(v4\.b32|v2\.b64)", assembly)
    if op in WRITERS:
        assert re.search(r"st\.global\S*\.(v4\.b32|v2\.b64)", assembly)
    if dtype != torch.float64 and op not in ("merge", "scale_unless_one_"):
        assert "ex2.approx.ftz.f32" in assembly
        assert "div.full.f32" not in assembly
    if op not in ("merge", "scale_unless_one_"):
        reading = [loop for loop in loops(assembly) if "ld.global" in loop]
        assert reading
        for loop in reading:
            assert "bar.sync" not in loop, f"{op} has a barrier in its loop"
            assert "shfl" not in loop, f"{op} exchanges between threads in its loop"


def documented_registers() -> dict[str, tuple[int, int]]:
    """op: (plain, everything) from the table in the module's docstring."""
    rows = re.findall(r"^    (\w+) +(\d+) +(\d+) +0 spills$", kernels.__doc__ or "", re.MULTILINE)
    return {op: (int(plain), int(everything)) for op, plain, everything in rows}


ROW_OPS = ("stats", "stats_exp_", "backward", "forward_backward")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_kernels_compile_without_spills_and_with_wide_accesses(
    monkeypatch: pytest.MonkeyPatch, target: Target, name: str
) -> None:
    if target == MI300 and name == "plain":
        pytest.skip("a part of what `everything` compiles")
    found = compile_ops(monkeypatch, target, name, 131072, torch.bfloat16, (*ROW_OPS, "merge", "scale_unless_one_"))
    table = documented_registers()
    assert set(table) == set(ROW_OPS)
    for op, usage in found.items():
        check(op, usage, target, torch.bfloat16)
        if target == HOPPER and op in table:
            assert usage["registers"] <= table[op][name == "everything"], (op, usage["registers"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("vocab", [50257, 131072, 131073])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["plain", "softcap", "smoothing", "everything"])
def test_every_variant_compiles_without_spills(
    monkeypatch: pytest.MonkeyPatch, target: Target, name: str, dtype: torch.dtype, vocab: int
) -> None:
    for op, usage in compile_ops(monkeypatch, target, name, vocab, dtype, ROW_OPS).items():
        if vocab % 8 == 0:
            check(op, usage, target, dtype)
        else:
            assert usage["spills"] == 0, (op, usage["spills"])


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_rows_are_described_by_two_strides_or_not_at_all() -> None:
    x = torch.empty(6, 5, 4, 16)
    assert rows_of(x) == LossRows(120, 0, 16)
    assert rows_of(x[:, :, 0]) == LossRows(30, 0, 64)
    assert rows_of(x[:, :-1]) == LossRows(16, 320, 16)
    assert rows_of(x[0].transpose(0, 1)) == LossRows(5, 16, 64)
    assert rows_of(x[:, :-1, :-1]) is None
    assert rows_of(x[0, 0, 0]) == LossRows(1, 0, 0)
    assert rows_of(torch.empty(0, 3)) == LossRows(1, 0, 3)


@pytest.mark.parametrize(
    ("vocab", "stride", "itemsize", "expected"),
    [
        (131072, 131072, 2, 8),
        (50264, 50264, 2, 8),
        (50260, 50260, 2, 4),
        (50257, 50257, 2, 1),
        (32, 36, 4, 4),
        (6, 8, 4, 2),
    ],
)
def test_alignment_is_that_of_the_rows_and_of_their_end(vocab: int, stride: int, itemsize: int, expected: int) -> None:
    assert alignment(vocab, LossRows(9, 0, stride), itemsize) == expected


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_blocks_cover_short_rows_and_fit_a_multiprocessor(itemsize: int) -> None:
    for vocab in (0, 1, 31, 1000, 4096, 8192, 32000, 65536, 131072, 262144):
        for two_passes in (False, True):
            for costly in (False, True):
                k, width, num_warps, max_registers = configuration(
                    vocab,
                    itemsize,
                    alignment(vocab, LossRows(1, 0, vocab), itemsize),
                    two_passes=two_passes,
                    costly=costly,
                )
                assert width * itemsize == num_warps * 32 * 16
                assert 1 <= num_warps <= 32
                assert k <= 4
                assert k * width >= min(vocab, 512 if itemsize == 8 and costly and two_passes else 1024)
                assert num_warps * 32 * (max_registers or 0) <= 65536
                if two_passes and vocab == 131072 and itemsize == 2:
                    assert num_warps == (16 if costly else 32)
