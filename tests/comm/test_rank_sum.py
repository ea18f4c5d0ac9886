"""The kernel that adds what ranks have sent, where there is no GPU: in the interpreter, and compiled ahead of time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.triton_aot import HOPPER, MI300, compile_for
from tests.triton_interpreter import run_interpreted


def test_triton_kernel_has_the_bits_of_the_loop_in_the_interpreter() -> None:
    run_interpreted("check_rank_sum.py")


@pytest.mark.parametrize("target", [HOPPER, MI300])
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 8), ("fp32", 64)])
def test_triton_kernel_compiles_without_spills_and_with_wide_accesses(target: Any, dtype: str, size: int) -> None:
    tl = pytest.importorskip("triton.language")
    from fastpar.kernels import rank_sum as kernels

    signature = {"parts": f"*{dtype}:16", "out": "*fp32:16", "n": "i32:16", "stride": "i32:16"}
    constants = {"SIZE": size, "AVERAGE": True, "COMPUTE": tl.float32, "AHEAD": kernels.AHEAD, "BLOCK": kernels.BLOCK}
    found = compile_for(kernels.rank_sum_kernel, signature, constants, target, {"num_warps": kernels.NUM_WARPS})
    assert found["spills"] == 0
    assert found["registers"] <= 128  # two programs of 256 threads on a multiprocessor, and more
    if target is HOPPER or dtype == "fp32":  # a thread of gfx942 has four elements: 8 bytes of 16-bit ones
        assert found["wide_loads"] >= kernels.AHEAD
        assert found["wide_stores"] >= 1
