"""What the tests of the vocab-parallel functions share: uneven shards, one rank's part, and gradients by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import Communicator

# Where shards end, as a part of the vocabulary: of unequal sizes, and an empty one from three ranks on.
ENDS = {1: [1.0], 2: [0.3, 1.0], 3: [0.0, 0.6, 1.0], 4: [0.25, 0.25, 0.9, 1.0]}
WORLD_SIZES = list(ENDS)


def world() -> Communicator:
    return Communicator(torch.distributed.group.WORLD)


def own_range(vocab: int, comm: Communicator) -> tuple[int, int, int]:
    """This rank's vocab_range."""
    ends = [0, *(int(end * vocab) for end in ENDS[comm.size])]
    return ends[comm.rank], ends[comm.rank + 1], vocab


def own_part(x: Tensor, vocab_range: tuple[int, int, int]) -> Tensor:
    """This rank's columns, a leaf."""
    return x[..., vocab_range[0] : vocab_range[1]].clone().requires_grad_()


def results_of(
    function: Callable[..., Any], x: Tensor, grads: Sequence[Tensor], *arguments: Any, **options: Any
) -> Any:
    """([outputs], gradient by x) of function(x, ...) for one upstream gradient per output."""
    x = x.detach().clone().requires_grad_()
    outputs = function(x, *arguments, **options)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    assert x.grad is not None
    return [o.detach() for o in outputs], x.grad


def normal(*shape: int, scale: float = 4.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1009 * len(shape) + shape[-1])
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
