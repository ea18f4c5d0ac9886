"""Masters, and the 16-bit parameters that a model has of them.

Note: writes to parameters. A program that clips weights, loads a checkpoint or swaps an average in writes to what the
model has, and an update that began from the master alone would undo it. torch counts some of these writes, and not
those through `.data`, numpy, or `torch._foreach_*` of DTensors. So every update begins with a look at the values:
what a parameter has where it is not its master, rounded, is the master's new value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 17  # elements, whose rounding stays in the cache
_GROUP = 1 << 25  # elements that are rounded by one call


def written(masters: Sequence[Tensor], rounded: Sequence[Tensor]) -> list[int]:
    """The numbers of the pairs whose second tensor is not the first one, rounded to nearest. Some others may be among
    them: see `follow`."""
    values = [x.to(master.device) for master, x in zip(masters, rounded, strict=True)]
    large, others = _by_size(values)
    found = [i for i in large if not _is_rounded(masters[i], values[i])]

    def differences(indices: Sequence[int]) -> list[Tensor]:  # which are never rounded to zero
        made = list(torch._foreach_neg([values[i] for i in indices]))  # for their dtypes and shapes
        torch._foreach_copy_(made, [masters[i] for i in indices])
        torch._foreach_sub_(made, [values[i] for i in indices])
        return made

    return found + _where(values, others, differences, lambda norm: norm.ne(0))  # NaN is not zero


def follow(master: Tensor, rounded: Tensor, before: Tensor | None = None) -> None:
    """Give a master the values of `rounded` where that is not what it rounds to (`before`; None: to nearest)."""
    values = rounded.to(master.device)
    before = master.to(values.dtype) if before is None else before.to(master.device)
    # Kernels may round what is below the smallest normal number to zero
    is_own = (before == values) | ((values == 0) & (before.abs() < torch.finfo(values.dtype).tiny))
    master.copy_(torch.where(is_own, master, values.to(master.dtype)))


def follow_all(masters: Sequence[Tensor], rounded: Sequence[Tensor]) -> None:
    """`follow`, of those that were written to."""
    for i in written(masters, rounded):
        follow(masters[i], rounded[i])


def drop_remainders_of_zeros(params: Sequence[Tensor], remainders: Sequence[Tensor]) -> None:
    """Of bfloat16 parameters that were set to zero: a negative remainder below zero would be a NaN."""
    large, others = _by_size(params)
    found = [i for i in large if not all(x.all() for x in _chunks(params[i]))]

    def inverses(indices: Sequence[int]) -> list[Tensor]:
        return list(torch._foreach_reciprocal([params[i] for i in indices]))

    for i in found + _where(params, others, inverses, lambda norm: norm.isfinite().logical_not()):
        remainders[i].masked_fill_((params[i] == 0) & (remainders[i] < 0), 0)


def _by_size(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The numbers of tensors that are looked at by chunks, and of others that have elements: many small ones together,
    and on a device any, for which the host waits once."""
    numbers = [i for i, x in enumerate(tensors) if x.numel() > 0]
    large = [i for i in numbers if tensors[i].device.type == "cpu" and tensors[i].numel() > _CHUNK]
    return large, sorted({*numbers} - {*large})


def _where(
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    made_of: Callable[[Sequence[int]], list[Tensor]],
    is_found: Callable[[Tensor], Tensor],
) -> list[int]:
    """Those of the numbers for which the largest magnitude in what is made of their tensors is such a one."""
    norms: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for group in _groups(tensors, numbers):
        for i, norm in zip(group, torch._foreach_norm(made_of(group), float("inf")), strict=True):
            norms.setdefault((norm.device, norm.dtype), []).append((i, norm))
    found: list[int] = []
    for some in norms.values():
        flags = is_found(torch.stack([norm for _, norm in some])).tolist()
        found += [i for (i, _), is_one in zip(some, flags, strict=True) if is_one]
    return found


def _groups(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    size = 0
    for i in numbers:
        if group and size + tensors[i].numel() > _GROUP:
            yield group
            group, size = [], 0
        group.append(i)
        size += tensors[i].numel()
    if group:
        yield group


def _chunks(x: Tensor) -> Sequence[Tensor]:
    return x.view(-1).split(_CHUNK) if x.is_contiguous() else [x]


def _is_rounded(master: Tensor, x: Tensor) -> bool:
    if not (master.is_contiguous() and x.is_contiguous()):
        return torch.equal(master.to(x.dtype), x)
    room = x.new_empty(_CHUNK)
    return all(_are_same_bits(room[: len(a)].copy_(a), b) for a, b in zip(_chunks(master), _chunks(x), strict=True))


def _are_same_bits(a: Tensor, b: Tensor) -> bool:
    """Eight bytes at a time: torch.equal goes element by element."""
    if a.nbytes % 8 == 0 and b.data_ptr() % 8 == 0:
        a, b = a.view(torch.uint8).view(torch.int64), b.view(torch.uint8).view(torch.int64)
    return torch.equal(a, b)
