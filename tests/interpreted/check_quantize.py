"""The Triton kernels of block quantisation against PyTorch, bit for bit; run by tests/ops/test_quantize.py in Triton's
interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from fastpar import reference
from fastpar.comm.block_codes import FORMATS
from fastpar.kernels import quantize as kernels
from tests.values import of_many_sizes, same_bits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN and of products of 64 bits


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", [None, 1, 2**40 + 3])
def test_codes_scales_and_values_have_the_bits_of_the_reference(format: str, seed: int | None) -> None:
    for x, block in (
        (of_many_sizes(3, 2, 300), 128),
        (of_many_sizes(5, 192, dtype=torch.bfloat16), 192),
        (of_many_sizes(4, 3, 200).transpose(0, 1)[:, :, 3:70], 64),
    ):
        x = x.clone() if x.is_contiguous() else x
        x[0, ..., 5] = math.nan
        x[-1, ..., 0] = math.inf
        codes, scales = kernels.quantize(x, block, FORMATS[format], -1 if seed is None else seed)
        rounding = "nearest" if seed is None else "stochastic"
        wanted = reference.quantize_blocks(x, format=format, block=block, rounding=rounding, seed=seed or 0)
        same_bits(codes.view(wanted[0].dtype), wanted[0])  # bytes, which the op gives their dtype
        same_bits(scales, wanted[1])
        found = kernels.dequantize(codes, scales, block, FORMATS[format], torch.float32)
        torch.testing.assert_close(
            found, reference.dequantize_blocks(*wanted, block=block), rtol=0.0, atol=0.0, equal_nan=True
        )


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_is_read_as_torch_reads_it(format: str) -> None:
    codes = torch.arange(256).to(torch.uint8)
    found = kernels.dequantize(codes, torch.ones(2), 128, FORMATS[format], torch.float32)
    wanted = codes.view(getattr(torch, format)).float()
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0, equal_nan=True)


def test_empty_tensors() -> None:
    codes, scales = kernels.quantize(torch.empty(0, 70), 64, 0, -1)
    assert (codes.shape, scales.shape) == ((0, 70), (0, 2))
    assert kernels.dequantize(codes, scales, 64, 0, torch.float16).shape == (0, 70)
