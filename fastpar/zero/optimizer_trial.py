"""Can an optimizer that reads across the elements of a parameter be sharded by rows, or updated in parts?

It is tried as `fastpar.tensor.optimizer_trial` does it, on parameters sharded as the model's will be, and refused by
`shard`, and not in the first step, or never.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.tensor.optimizer_trial import (
    ROWS,
    comms_of,
    even_shape,
    is_tried,
    kinds_of,
    needs_no_trial,
    options_of,
    small_shapes,
    split_like,
    try_apart,
    try_split,
)
from fastpar.zero.groups import Groups, as_dtensor, local


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
        shapes = small_shapes(group["params"])
        for shape in shapes if is_apart else ():
            try_apart(optimizer, options, shape)
        for shape in shapes if groups.shard.size > 1 else ():
            for rows in (ROWS, 2 * groups.shard.size):  # means of equal shards stay partial in DTensor, others do not
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
