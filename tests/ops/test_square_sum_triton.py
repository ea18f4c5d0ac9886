"""The Triton kernels of the exact sum of squares where there is no GPU: in the interpreter, and compiled ahead of time;
and that nothing on the way to a clipped step asks the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastpar as fp
from fastpar import ops
from tests.triton_aot import HOPPER, MI300, Target, compile_for
from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

from fastpar.kernels import square_sum as kernels
from fastpar.kernels import square_sum_kernels as source

TARGETS = {"sm_90a": HOPPER, "gfx942": MI300}
# registers of a thread on Hopper: 2 programs of 256 threads at least are resident
MOST_REGISTERS = 128


@pytest.mark.timeout(600)
def test_kernels_have_the_bits_of_the_cpu_in_the_interpreter() -> None:
    run_interpreted("check_square_sum.py")


def cases() -> list[Any]:
    """Every format, at aligned addresses and others; the most common ones in every run."""
    common = {(torch.float32, True), (torch.bfloat16, True)}
    return [
        pytest.param(dtype, is_aligned, marks=() if (dtype, is_aligned) in common else pytest.mark.slow)
        for dtype in kernels.KINDS
        for is_aligned in (True, False)
    ]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize(("dtype", "is_aligned"), cases())
def test_the_sum_compiles_without_spills_and_reads_16_bytes_at_a_time(
    dtype: torch.dtype, is_aligned: bool, target: Target
) -> None:
    kind = kernels.KINDS[dtype]
    constants = {"ELEMENT": kind.element, "KIND": kind.format, "ALIGNED": is_aligned, "TILE": kind.tile}
    types = {"table": "*i64:16", "num_tensors": "i32", "sums": "*i64:16"}
    options = {"num_warps": kernels.THREADS // target[2]}
    found = compile_for(source.square_sum_kernel, types, constants, target, options)
    assert found["spills"] == 0
    assert found["registers"] <= MOST_REGISTERS
    assert (found["wide_loads"] > 0) == is_aligned
    assert "f64" not in found["ptx"].replace("_f64", "") or target != HOPPER  # integers only


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_the_norm_compiles_without_spills(target: Target) -> None:
    constants = {"DIGITS": 24, "LOWEST": -149, "INFINITY": 0x7F800000}
    found = compile_for(source.norm_kernel, {"sums": "*i64:16", "out": "*i32"}, constants, target, {"num_warps": 1})
    assert found["spills"] == 0
    found = compile_for(source.carry_kernel, {"sums": "*i64:16"}, {}, target, {"num_warps": 1})
    assert found["spills"] == 0


def test_clipping_on_a_device_never_waits_for_it() -> None:
    """FakeTensors raise where a value is asked for."""
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(300, 70, device="cuda")) for _ in range(3)]
        for p in params:
            p.grad = torch.empty_like(p)
        grads = [torch.empty_like(p) for p in params]
        norm = ops.square_sum_norm(ops.exact_square_sum(grads))
        assert norm.device.type == "cuda"
        assert fp.clip_grad_norm_(params, 1.0).device.type == "cuda"
        total = fp.GradSum("cuda").add(grads).add([])
        assert total.clip_factor(1.0).device.type == "cuda"
