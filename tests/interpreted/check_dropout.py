"""The Triton kernel of dropout against the reference, bit for bit; run by test_dropout.py in the interpreter."""

from __future__ import annotations

import pytest
import torch

from fastpar.kernels import dropout as kernels
from fastpar.reference.dropout import keep_mask
from fastpar.reference.dropout import sharded_dropout as reference

SEED = -0x1234_5678_9ABC_DEF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (257,), (3, 0, 5), (2, 5, 7, 3)])
def test_masks_and_values_are_those_of_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randint(-64, 64, shape) / 8).to(dtype)  # doubled, they are exact: the interpreter cuts bfloat16 off
    found = kernels.sharded_dropout(x, 0.5, SEED, [0] * x.dim(), list(shape))
    assert torch.equal(found, reference(x, 0.5, seed=SEED))


@pytest.mark.parametrize(
    ("offset", "shape", "whole"),
    [
        ([2, 5, 3], [2, 6, 5], [6, 11, 9]),
        ([0, 0, 3], [4, 3, 1], [4, 3, 9]),  # one column
        ([1, 2], [3, 2500], [5, 9000]),  # several programs a row
        ([0, 1, 0, 2, 1], [2, 2, 2, 2, 2], [2, 4, 3, 5, 4]),  # nothing merges: more dims than the kernel takes
        ([1 << 20, 1 << 20, 5], [2, 3, 4], [1 << 21, 1 << 21, 1 << 20]),  # indices beyond 2^32
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_a_block_has_the_mask_of_the_whole(offset: list[int], shape: list[int], whole: list[int], p: float) -> None:
    found = kernels.sharded_dropout(torch.ones(shape), p, SEED, offset, whole)
    assert torch.equal(found != 0, keep_mask(shape, p, SEED, offset, whole) & (p < 1.0))


def test_the_worked_example() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = reference(x, 0.5, seed=0)
    assert torch.equal(kernels.sharded_dropout(x, 0.5, 0, [0], [4]), expected)
    assert expected.tolist() == [2.0, 0.0, 0.0, 8.0]


def test_strides_are_those_of_the_values() -> None:
    x = torch.arange(1.0, 36.0).view(5, 7).t()
    found = kernels.sharded_dropout(x, 0.5, SEED, [0, 0], [7, 5])
    assert torch.equal(found, reference(x.contiguous(), 0.5, seed=SEED))
