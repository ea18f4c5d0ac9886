"""Numbers that tests are given, and what has to be equal of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
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


def all_gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of all tensors, whole. Collective: one all-gather in the place of one for each DTensor, which takes
    milliseconds."""
    found = {name: x.detach() for name, x in tensors.items()}
    rows = {name: x for name, x in found.items() if _is_of_rows(x)}
    groups = {x.device_mesh.get_group() for x in rows.values()}
    if len(groups) != 1:
        return {name: gathered(x).clone() for name, x in found.items()}
    parts: list[list[Tensor]] = [[]] * dist.get_world_size(*groups)
    dist.all_gather_object(parts, [x.to_local().clone() for x in rows.values()], *groups)
    found |= {name: torch.cat(shards) for name, shards in zip(rows, zip(*parts, strict=True), strict=True)}
    return {name: gathered(x).clone() for name, x in found.items()}


def _is_of_rows(x: Tensor) -> bool:
    return isinstance(x, DTensor) and x.device_mesh.ndim == 1 and x.placements[0].is_shard(0)
