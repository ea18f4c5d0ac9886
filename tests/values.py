"""Numbers that tests are given, and what has to be equal of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal ones, rounded once from float64."""
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def of_many_sizes(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, and zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator) * 2.0 ** torch.randint(-12, 4, shape, generator=generator)
    x.view(-1)[::7] = 0.0
    return x.to(dtype)


def same_bits(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def gathered(x: Tensor) -> Tensor:
    """The whole of a DTensor; gloo sends no int16."""
    if not isinstance(x, DTensor):
        return x
    return x.to(torch.int32).full_tensor() if x.dtype == torch.int16 else x.full_tensor()
