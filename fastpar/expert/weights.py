"""Expert weights on a mesh: DTensors at rest, this rank's experts as plain tensors in forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fastpar.comm import Communicator, copy_to
from fastpar.mesh import Mesh


class ExpertGroups:
    """The ranks that a mixture-of-experts layer runs over, from a `Mesh` (None: one rank).

    tp    the same tokens (or, with sequence parallelism, tokens of one sequence); a layer computes each of them once
    ep    experts split among them
    etp   every expert split among them

    Note: the scale of gradients. A loss is a mean over the ranks of data parallelism, so gradients are averaged over
    them. The tokens of an expert come from all ranks of an expert group, ep * etp / tp of which belong to different
    losses. Its gradient, summed over those, is divided by that number in backward (`grad_scale`); the mean over the
    ranks that hold the same part of it (mesh dim "edp") then makes the mean over all.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh

        def group(name: str) -> Communicator:
            return Communicator(None if mesh is None else mesh.group(name))

        self.tp, self.ep, self.etp = group("tp"), group("ep"), group("etp")

    @property
    def is_split(self) -> bool:
        """Whether experts are not whole on every rank."""
        return self.ep.size * self.etp.size > 1

    @property
    def grad_scale(self) -> float:
        return self.tp.size / (self.ep.size * self.etp.size) if self.is_split else 1.0

    def __deepcopy__(self, memo: Any) -> ExpertGroups:
        """Itself: a copied layer runs on the same ranks."""
        return self


def make_expert_weight(
    shape: Sequence[int],
    groups: ExpertGroups,
    split: int | None,
    draw: Callable[[Tensor], Any],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """A parameter [E, ...] of which this rank has its experts, and of those its part of dim `split` (None: all).

    `draw` initialises one expert's tensor in place. Every rank draws all of them in turn and keeps its own, so the
    values do not depend on the layout.
    """
    ep, etp = groups.ep, groups.etp
    if shape[0] % ep.size:
        near = [size for size in range(1, shape[0] + 1) if shape[0] % size == 0]
        raise ValueError(f"num_experts ({shape[0]}) must be divisible by ep ({ep.size}); it is by {near}")
    if split is not None and shape[split] % etp.size:
        raise ValueError(f"the experts' inner size ({shape[split]}) must be divisible by etp ({etp.size})")
    per_rank = shape[0] // ep.size
    mine = range(ep.rank * per_rank, (ep.rank + 1) * per_rank)
    parts = []
    for expert in range(shape[0]):
        whole = torch.empty(shape[1:], dtype=dtype, device=device)
        draw(whole)
        if expert in mine:
            parts.append(whole if split is None else whole.chunk(etp.size, split - 1)[etp.rank])
    local = torch.stack(parts)
    if not groups.is_split:
        return nn.Parameter(local)
    assert groups.mesh is not None
    placements: tuple[Placement, ...] = (Shard(0), Replicate() if split is None else Shard(split))
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), local.dtype)
    spec = DTensorSpec(groups.mesh["ep", "etp"], placements, tensor_meta=meta)
    make: Any = DTensor.__new__  # as in fastpar.zero.groups: `from_local` would check the parts with collectives
    return nn.Parameter(make(DTensor, local, spec, requires_grad=False))


class UnwrapExpertWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        ctx.spec = param._spec if isinstance(param, DTensor) else None
        local = param._local_tensor if isinstance(param, DTensor) else param
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] if ctx.spec is None else DTensor(grads[0], ctx.spec, requires_grad=False)


def unwrap(param: Tensor, groups: ExpertGroups) -> Tensor:
    """This rank's part as a plain tensor, whose gradient goes back as a DTensor.

    Experts that every rank of tp holds whole, and computes on its part of the tokens, get the sum over tp.
    """
    return cast(Tensor, UnwrapExpertWeight.apply(param)) if groups.is_split else copy_to(param, groups.tp)
