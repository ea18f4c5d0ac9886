"""The sum over ranks in Triton against the loop that defines it, bit for bit; run in the interpreter."""

from __future__ import annotations

import pytest
import torch

from fastpar.comm.reduction import reduce_in_order
from fastpar.kernels import rank_sum as kernels


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 9, 12])
@pytest.mark.parametrize("average", [False, True])
def test_sums_have_the_bits_of_the_loop(dtype: torch.dtype, size: int, average: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    parts = torch.randn(size, kernels.BLOCK + 5, generator=generator, dtype=torch.float64).to(dtype)
    parts[:, :2] = -0.0
    op = "avg" if average else "sum"
    wide = dtype in (torch.bfloat16, torch.float16)
    found = kernels.rank_sum(parts, average=average, dtype=torch.float32 if wide else None)
    assert torch.equal(found, reduce_in_order(parts.unbind(), f"float32 {op}" if wide else op))
    assert bool(torch.signbit(found[:2]).all())
    # Rounded once to 16 bits: what bfloat16 holds exactly, since the interpreter cuts it off.
    small = torch.randint(-8, 8, (size, 7), generator=generator).to(dtype)
    if not average:
        assert torch.equal(kernels.rank_sum(small, average=False), reduce_in_order(small.unbind(), "sum"))


def test_rows_with_gaps_and_empty_ones() -> None:
    parts = torch.arange(24.0).view(3, 8)
    assert torch.equal(kernels.rank_sum(parts[:, 1:6], average=False), parts[:, 1:6].sum(0))
    assert torch.equal(kernels.rank_sum(parts.t(), average=False), parts.sum(1))
    assert kernels.rank_sum(parts[:, :0], average=True).shape == (0,)


def test_the_worked_example() -> None:
    parts = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    assert kernels.rank_sum(parts, average=False).tolist() == [11.0, 22.0]
    assert kernels.rank_sum(parts, average=True).tolist() == [5.5, 11.0]
    with pytest.raises(TypeError, match=r"parts must be one of .* got torch\.int32"):
        kernels.rank_sum(parts.int(), average=False)
