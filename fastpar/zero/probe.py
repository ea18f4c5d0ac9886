"""Whether an optimizer does to rows of parameters what it does to whole ones: tried, before anything is changed.

An optimizer that is not known to work element by element gets DTensors, and depends on what DTensor implements of what
it calls. So it makes two steps on parameters of a few elements, once whole and once sharded as the model's will be. One
that raises, or comes to other values, is refused by `shard` and not in the first step, or never.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.zero.groups import Groups, as_parameter, local
from fastpar.zero.step import is_elementwise

_ROWS = 5  # of three dims and more the others are 3: shards of different sizes, and some without rows
_STEPS = 2
_TOLERANCE = 5e-2  # of the largest value: iterations in bfloat16 sum in another order


def check_sharded_updates(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Raises ValueError for an optimizer that cannot be sharded by rows over `groups`. Collective where it is tried."""
    if groups.shard.size == 1 or is_elementwise(optimizer) or getattr(optimizer, "takes_dtensors", False):
        return
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        shapes = {(_ROWS, 4, 3, 3)[: p.ndim] + (1,) * max(p.ndim - 4, 0) for p in group["params"] if p.ndim > 0}
        for shape in sorted(shapes):
            _try(optimizer, options, shape, groups)


def _try(optimizer: torch.optim.Optimizer, options: dict[str, Any], shape: tuple[int, ...], groups: Groups) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    value = torch.randn(shape, generator=generator, device="cpu")
    grads = [torch.randn(shape, generator=generator, device="cpu") for _ in range(_STEPS)]
    name = type(optimizer).__name__
    whole = nn.Parameter(value.clone())
    try:
        _run(optimizer, options, whole, grads)
    except Exception:  # not even whole: these shapes say nothing about it
        return
    spec = groups.row_spec(nn.Parameter(value))
    rows = _rows(value, groups)
    sharded = as_parameter(rows.clone(), spec)
    try:
        _run(optimizer, options, sharded, [as_parameter(_rows(x, groups).clone(), spec).detach() for x in grads])
    except Exception as error:
        raise ValueError(
            f"{name} cannot be sharded: it reads across the elements of a parameter by what DTensor does not implement "
            f"({type(error).__name__}: {str(error)[:200]}). Use stage=0, or another optimizer"
        ) from error
    expected = _rows(whole.detach(), groups)
    scale = float((whole.detach() - value).abs().max())
    difference = (local(sharded) - expected).abs().max() if expected.numel() else torch.zeros((), device="cpu")
    for comm in groups.everyone():
        difference = comm.all_reduce(difference, "max")
    if not float(difference) <= _TOLERANCE * scale:
        raise ValueError(
            f"{name} cannot be sharded: two steps on rows of a parameter {shape} differ by {float(difference):.2g} "
            f"from those on the whole one, which change it by {scale:.2g}. Use stage=0, or set is_elementwise = True "
            "on it if it treats every element for itself and draws numbers"
        )


def _rows(x: Tensor, groups: Groups) -> Tensor:
    parts = x.chunk(groups.shard.size)
    return parts[groups.shard.rank] if groups.shard.rank < len(parts) else x[:0]


def _run(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], parameter: nn.Parameter, grads: list[Tensor]
) -> None:
    """Steps of a copy of the optimizer that has this parameter alone."""
    inner: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups", "step") and not key.startswith("_optimizer_"):  # the last are hooks
            vars(inner)[key] = _copied(value)
    inner.state, inner.param_groups = defaultdict(dict), [{**copy.deepcopy(options), "params": [parameter]}]
    with torch.no_grad():
        for grad in grads:
            parameter.grad = grad
            inspect.unwrap(type(optimizer).step)(inner)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # groups and the like, which are not changed by a step
        return value
