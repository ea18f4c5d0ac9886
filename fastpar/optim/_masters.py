"""Masters, and the 16-bit parameters that a model has of them.

Note: writes to parameters. A program that clips weights, loads a checkpoint or swaps an average in writes to what the
model has, and an update that began from the master alone would undo it. What a parameter has where it is not its
master, rounded, is the master's new value. torch counts most writes (`version_of`), and a step looks at the values of
what was written to. It does not count those through `.data`, numpy, or `torch._foreach_*` of DTensors. To look at all
values takes half the time of an update on a CPU, and on a device the host waits for it: it is done in some steps only
(`Looks`), which finds programs that write between all steps, such as those that clip weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

logger = logging.getLogger("fastpar.optim")

LOOK_EVERY = 64  # steps
_CHUNK = 1 << 17  # elements, whose rounding stays in the cache
_GROUP = 1 << 25  # elements that are rounded by one call


class Looks:
    """The steps, numbered from 1, in which all values are looked at: the first two, every 64th, and the 64 after one in
    which something was found that torch has not counted."""

    def __init__(self) -> None:
        self._until = 2

    def is_due(self, step: int) -> bool:
        return step <= self._until or step % LOOK_EVERY == 0

    def found(self, step: int) -> None:
        if step > self._until:
            logger.warning(
                "step %d has found writes to parameters with master weights that torch does not count (through .data, "
                "numpy, or torch._foreach_* of DTensors); earlier ones may have been undone: write to parameters in "
                "place, under torch.no_grad()",
                step,
            )
        self._until = step + LOOK_EVERY


def version_of(face: Tensor) -> int:
    """Both count: what DTensor runs on its part does not reach that one's own counter."""
    return face._version + (face._local_tensor._version if isinstance(face, DTensor) else 0)


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


def follow(master: Tensor, rounded: Tensor, before: Tensor | None = None) -> bool:
    """Give a master the values of `rounded` where that is not what it rounds to (`before`; None: to nearest). Whether
    there are any such elements."""
    values = rounded.to(master.device)
    before = master.to(values.dtype) if before is None else before.to(master.device)
    # Kernels may round what is below the smallest normal number to zero
    is_own = (before == values) | ((values == 0) & (before.abs() < torch.finfo(values.dtype).tiny))
    is_own |= before.isnan() & values.isnan()
    if bool(is_own.all()):
        return False
    master.copy_(torch.where(is_own, master, values.to(master.dtype)))
    return True


def follow_all(masters: Sequence[Tensor], rounded: Sequence[Tensor]) -> bool:
    """`follow`, of those that were written to; whether there are any."""
    found = [follow(masters[i], rounded[i]) for i in written(masters, rounded)]
    return any(found)


def drop_remainders_of_zeros(params: Sequence[Tensor], remainders: Sequence[Tensor]) -> bool:
    """Drop those of bfloat16 parameters that were set to zero: a negative remainder below zero would be a NaN. Whether
    there are any."""
    large, others = _by_size(params)
    found = [i for i in large if not all(x.all() for x in _chunks(params[i]))]

    def inverses(indices: Sequence[int]) -> list[Tensor]:
        return list(torch._foreach_reciprocal([params[i] for i in indices]))

    found += _where(params, others, inverses, lambda norm: norm.isfinite().logical_not())
    wrong = [(params[i] == 0) & (remainders[i] < 0) for i in found]
    for i, each in zip(found, wrong, strict=True):
        remainders[i].masked_fill_(each, 0)
    return any(bool(each.any()) for each in wrong)


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
    """The numbers for which the largest magnitude in what is made of their tensors is such a one."""
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
