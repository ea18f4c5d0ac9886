"""Can an optimizer that reads across the elements of a parameter be sharded by rows, or updated in parts?

It is tried as `fastpar.tensor.optimizer_trial` does it, on parameters sharded as the model's will be, and refused by
`shard`, and not in the first step, or never.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.tensor.optimizer_trial import (
    TOLERANCE,
    comms_of,
    even_shape,
    is_tried,
    kinds_of,
    needs_no_trial,
    options_of,
    run,
    split_like,
    try_split,
)
from fastpar.zero.groups import Groups, as_dtensor, local

_ROWS = 5  # of three dims and more the others are 3: shards of different sizes, and some without rows; then equal ones
_STEPS_APART = 4  # what is summed over parameters may act a step later than it is summed, and be zero in the first


def check_sharded_updates(optimizer: torch.optim.Optimizer, groups: Groups, *, is_in_parts: bool = False) -> None:
    """Raises ValueError for an optimizer that cannot be sharded by rows over `groups`. Collective where it is tried.

    is_in_parts  its steps are taken on some of its parameters at a time, as where states lie in a file
    """
    if needs_no_trial(optimizer):
        return
    mesh = groups.mesh
    has_stages = mesh is not None and mesh.size("pp") > 1
    is_apart = is_in_parts or has_stages or groups.experts is not None
    for group in optimizer.param_groups:
        options = options_of(group)
        shapes = {(_ROWS, 4, 3, 3)[: p.ndim] + (1,) * max(p.ndim - 4, 0) for p in group["params"] if p.ndim > 0}
        for shape in sorted(shapes if is_apart else ()):
            _try_apart(optimizer, options, shape)
        for shape in sorted(shapes if groups.shard.size > 1 else ()):
            for rows in (_ROWS, 2 * groups.shard.size):  # means of equal shards stay partial in DTensor, others do not
                try_split(optimizer, options, _RowTrial((rows, *shape[1:]), groups))
    for options, parameter in kinds_of(optimizer):
        try_split(optimizer, options, _RowTrial((), groups.of(parameter), parameter))
    is_tried(optimizer)


class _RowTrial:
    """Small tensors of a shape, sharded by rows as the model's parameters will be; `like`: by rows of what a parameter
    split by tensor parallelism, or over experts' ranks, has of them."""

    refusal = "be sharded"

    def __init__(self, shape: tuple[int, ...], groups: Groups, like: DTensor | None = None) -> None:
        self.shape, self.comms = shape, groups.everyone()
        self._groups, self._like = groups, like
        if like is not None:
            self.shape = even_shape(like, 2 * groups.shard.size)
            self.comms += comms_of(like)
        other = "Use stage=0, or another optimizer" if like is None else "Use another optimizer"
        self.remedy = f"{other}, or set is_elementwise = True on it if it treats every element for itself"

    def part(self, x: Tensor) -> Tensor:
        whole: Tensor = nn.Parameter(x, requires_grad=False)
        if self._like is not None:
            whole = split_like(x, self._like)
        parts = local(whole).chunk(self._groups.shard.size)
        rank = self._groups.shard.rank
        rows = parts[rank] if rank < len(parts) else local(whole)[:0]
        return as_dtensor(rows.clone(), self._groups.row_spec(whole) or getattr(whole, "_spec", None))


def _try_apart(optimizer: torch.optim.Optimizer, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raises ValueError where what a parameter becomes depends on others, which are elsewhere or come later."""
    generator = torch.Generator().manual_seed(len(shape))
    value = torch.randn(shape, generator=generator, device="cpu")
    grads = [torch.randn(shape, generator=generator, device="cpu") for _ in range(_STEPS_APART)]
    alone, beside, other = (nn.Parameter(value.clone()) for _ in range(3))
    try:
        run(optimizer, options, {alone: grads})
        run(optimizer, options, {beside: grads, other: [100 * grad for grad in grads]})
    except Exception:  # these shapes say nothing about it
        return
    scale = float((alone.detach() - value).abs().max())
    if not float((alone.detach() - beside.detach()).abs().max()) <= TOLERANCE * scale:
        raise ValueError(
            f"{type(optimizer).__name__} cannot update parameters in parts, as what one becomes depends on the others "
            "that it has: pipeline stages and experts' ranks have others each, and from a file some are updated at a "
            "time. Use another optimizer (or a mesh without pp and ep; offload='cpu'), or set is_elementwise = True on "
            "it if it treats every element for itself and draws numbers"
        )
