"""The helpers for testing Triton kernels without a GPU notice what they are there to notice."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.triton_aot import HOPPER, LDS_LIMIT, MI300, SHARED_LIMIT, compile_for
from tests.triton_interpreter import run_interpreted

triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")


@triton.jit
def normalise(x, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    values = tl.load(x + index).to(tl.float32)
    tl.store(out + index, values / tl.sum(values, axis=0))


@pytest.mark.parametrize("target", [HOPPER, MI300])
def test_a_block_that_fits_has_wide_accesses_and_no_spills_and_a_huge_one_spills(target: Any) -> None:
    signature = {"x": "*bf16:16", "out": "*fp32:16"}
    fits = compile_for(normalise, signature, {"BLOCK": 4096}, target, {"num_warps": 4})
    assert fits["spills"] == 0
    assert fits["wide_loads"] > 0
    assert fits["wide_stores"] > 0
    assert 0 < fits["shared"] <= LDS_LIMIT < SHARED_LIMIT
    huge = compile_for(normalise, signature, {"BLOCK": 65536 * 2}, target, {"num_warps": 4})
    assert huge["spills"] > 0


def test_unknown_alignment_leaves_narrow_loads() -> None:
    found = compile_for(normalise, {"x": "*bf16", "out": "*fp32:16"}, {"BLOCK": 4096}, HOPPER, {"num_warps": 4})
    assert found["wide_loads"] == 0
    assert found["wide_stores"] > 0


def test_a_failure_in_the_interpreter_is_shown(tmp_path: Path) -> None:
    inner = tmp_path / "check_example.py"
    inner.write_text(
        "import os, triton\n"
        "def test_interpreted(): assert triton.knobs.runtime.interpret\n"
        "def test_wrong(): assert 1 == 2, 'one is not two'\n"
    )
    with pytest.raises(pytest.fail.Exception, match=r"one is not two[\s\S]*1 failed, 1 passed"):
        run_interpreted(str(inner))


def test_no_interpreted_test_at_all_is_a_failure(tmp_path: Path) -> None:
    inner = tmp_path / "check_empty.py"
    inner.write_text("")
    with pytest.raises(pytest.fail.Exception, match="no tests ran"):
        run_interpreted(str(inner))


def launches_of(source: str) -> list[int]:
    """The lines that call something with a subscript, kernel[grid](...): Triton's launch."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [node.lineno for node in calls if isinstance(node.func, ast.Subscript)]


def test_every_launch_goes_through_launch_which_sets_the_device() -> None:
    assert launches_of("x = 1\nkernel[(programs, 2)](x)\nlaunch(kernel, programs, device)") == [2]
    files = sorted((Path(__file__).parents[2] / "kernels" / "triton").glob("*.py"))
    found = {file.name: launches_of(file.read_text()) for file in files if file.name != "launch.py"}
    assert {name: lines for name, lines in found.items() if lines} == {}
