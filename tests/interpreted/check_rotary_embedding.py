"""The Triton kernel of rotary embeddings against the reference; run by tests/ops/test_rotary_embedding.py in Triton's
interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastpar.contracts.transformer import rotary_tables
from fastpar.kernels import rotary_embedding as kernels
from fastpar.reference.transformer import rotated

# The interpreter cuts bfloat16 off, where devices round to nearest.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 1e-14}


def check(x: Tensor, positions: Tensor, rotary_dim: int, heads_first: bool, interleaved: bool) -> None:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = rotary_tables(positions, rotary_dim, dtype=dtype)
    for inverse in (False, True):
        tables = cos.double(), (-sin if inverse else sin).double()
        exact = rotated(x.double(), *tables, heads_first=heads_first, interleaved=interleaved)
        out = torch.full(x.shape, 7.0, dtype=x.dtype)
        kernels.rotate(x, out, cos, sin, heads_first, interleaved, inverse)
        mine = x.clone(memory_format=torch.contiguous_format)
        kernels.rotate(mine, mine, cos, sin, heads_first, interleaved, inverse)
        for found in (out, mine):
            tolerance = ROUNDING[x.dtype]
            torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_pairs_are_turned_in_every_layout(dtype: torch.dtype) -> None:
    for heads_first, interleaved in itertools.product((False, True), (False, True)):
        shape = (2, 5, 3, 20) if heads_first else (2, 3, 5, 20)
        check(torch.randn(shape).to(dtype), torch.randint(0, 50, (2, 3)), 20, heads_first, interleaved)
        check(torch.randn(shape).to(dtype), torch.randint(0, 50, (3,)), 6, heads_first, interleaved)


def test_strided_heads_and_empty_tensors() -> None:
    qkv = torch.randn(2, 3, 4, 48)
    check(qkv[..., 16:32], torch.arange(3), 16, False, True)
    check(qkv.transpose(1, 2)[..., :16], torch.arange(3), 8, True, False)
    check(torch.randn(16, 3, 4).permute(1, 2, 0), torch.arange(3), 16, False, False)
    check(torch.empty(0, 3, 4, 8), torch.arange(3), 8, False, False)
