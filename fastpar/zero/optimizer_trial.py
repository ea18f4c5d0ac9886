"""The trial of an optimizer that reads across the elements of a parameter: can it be sharded by rows?

It makes two steps on parameters of a few elements, once whole and once sharded as the model's will be. One that raises,
or comes to other values, is refused by `shard`, and not in the first step, or never.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fastpar.comm import Communicator
from fastpar.tensor.optimizer_numbers import reading_whole
from fastpar.zero.groups import Groups, as_parameter, local
from fastpar.zero.optimizer_step import copied, is_elementwise

_ROWS = 5  # of three dims and more the others are 3: shards of different sizes, and some without rows; then equal ones
_STEPS = 2
_STEPS_APART = 4  # what is summed over parameters may act a step later than it is summed, and be zero in the first
_TOLERANCE = 5e-2  # of the largest value: iterations in bfloat16 sum in another order


def check_sharded_updates(optimizer: torch.optim.Optimizer, groups: Groups, *, is_in_parts: bool = False) -> None:
    """Raises ValueError for an optimizer that cannot be sharded by rows over `groups`. Collective where it is tried.

    is_in_parts  its steps are taken on some of its parameters at a time, as where states lie in a file
    """
    if is_elementwise(optimizer) or getattr(optimizer, "takes_dtensors", False):
        return
    mesh = groups.mesh
    has_stages = mesh is not None and mesh.size("pp") > 1
    is_apart = is_in_parts or has_stages or groups.experts is not None
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        held = [parameter for parameter in group["params"] if parameter.ndim > 0]
        shapes = {(_ROWS, 4, 3, 3)[: p.ndim] + (1,) * max(p.ndim - 4, 0) for p in held}
        for shape in sorted(shapes if is_apart else ()):
            _try_apart(optimizer, options, shape)
        for shape in sorted(shapes if groups.shard.size > 1 else ()):
            for rows in (_ROWS, 2 * groups.shard.size):  # means of equal shards stay partial in DTensor, others do not
                _try(optimizer, options, _Trial((rows, *shape[1:]), groups))
        split = [p for p in held if isinstance(p, DTensor) and any(not x.is_replicate() for x in p.placements)]
        kinds = {(p.ndim, str(p.placements), p.device_mesh.mesh_dim_names): p for p in split}
        for _, parameter in sorted(kinds.items(), key=lambda item: str(item[0])):
            _try(optimizer, options, _Trial((), groups.of(parameter), parameter))


class _Trial:
    """Small tensors of a shape, sharded by rows as the model's parameters will be; `like`: by rows of what a parameter
    split by tensor parallelism, or over experts' ranks, has of them."""

    def __init__(self, shape: tuple[int, ...], groups: Groups, like: DTensor | None = None) -> None:
        self.shape, self.comms = shape, groups.everyone()
        self._groups, self._like = groups, like
        if like is not None:  # even parts, whatever the model's are
            sizes = [2 * groups.shard.size, *[2] * (like.ndim - 1)]
            for dim, placement in enumerate(like.placements):
                cut = getattr(placement, "dim", None)
                if cut is not None:
                    sizes[cut] *= like.device_mesh.size(dim)
            self.shape = tuple(sizes)
            mesh = like.device_mesh
            self.comms += [Communicator(mesh.get_group(dim)) for dim in range(mesh.ndim) if mesh.size(dim) > 1]

    @property
    def remedy(self) -> str:
        other = "Use stage=0, or another optimizer" if self._like is None else "Use another optimizer"
        return f"{other}, or set is_elementwise = True on it if it treats every element for itself"

    def rows(self, x: Tensor) -> Tensor:
        """What this rank has of x."""
        return self.sharded(x)[0]

    def sharded(self, x: Tensor) -> tuple[Tensor, DTensorSpec | None]:
        whole: Tensor = nn.Parameter(x, requires_grad=False)
        if self._like is not None:
            # Every rank has it all: none is asked to send.
            whole = distribute_tensor(x, self._like.device_mesh, self._like.placements, src_data_rank=None)
        parts = local(whole).chunk(self._groups.shard.size)
        rank = self._groups.shard.rank
        spec = self._groups.row_spec(whole) or getattr(whole, "_spec", None)
        return parts[rank] if rank < len(parts) else local(whole)[:0], spec


def _try(optimizer: torch.optim.Optimizer, options: dict[str, Any], trial: _Trial) -> None:
    shape = trial.shape
    generator = torch.Generator().manual_seed(len(shape))
    value = torch.randn(shape, generator=generator, device="cpu")
    grads = [torch.randn(shape, generator=generator, device="cpu") for _ in range(_STEPS)]
    half = shape[0] // 2
    for grad, part in zip(grads, (slice(half), slice(half, None)), strict=True):
        grad[part] *= 8.0  # a rank's share of a norm is another in each step, as Adam divides by a factor that stays
    name = type(optimizer).__name__
    whole = nn.Parameter(value.clone())
    try:
        _run(optimizer, options, {whole: grads})
    except Exception:  # not even whole: these shapes say nothing about it
        return
    rows, spec = trial.sharded(value)
    sharded = as_parameter(rows.clone(), spec)
    rows_of_grads = [as_parameter(trial.rows(x).clone(), spec).detach() for x in grads]
    try:
        _run(optimizer, options, {sharded: rows_of_grads}, trial.comms)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be sharded: it reads across the elements of a parameter by what DTensor does not implement "
            f"({type(error).__name__}: {str(error)[:200]}). {trial.remedy}"
        ) from error
    expected = trial.rows(whole.detach())
    scale = float((whole.detach() - value).abs().max())
    difference = (local(sharded) - expected).abs().max() if expected.numel() else torch.zeros((), device="cpu")
    for comm in trial.comms:
        difference = comm.all_reduce(difference, "max")
    if not float(difference) <= _TOLERANCE * scale:
        raise ValueError(
            f"{name} cannot be sharded: two steps on rows of a parameter {shape} differ by {float(difference):.2g} "
            f"from those on the whole one, which change it by {scale:.2g}. {trial.remedy}, as one that draws numbers"
        )


def _try_apart(optimizer: torch.optim.Optimizer, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raises ValueError where what a parameter becomes depends on others, which are elsewhere or come later."""
    generator = torch.Generator().manual_seed(len(shape))
    value = torch.randn(shape, generator=generator, device="cpu")
    grads = [torch.randn(shape, generator=generator, device="cpu") for _ in range(_STEPS_APART)]
    alone, beside, other = (nn.Parameter(value.clone()) for _ in range(3))
    try:
        _run(optimizer, options, {alone: grads})
        _run(optimizer, options, {beside: grads, other: [100 * grad for grad in grads]})
    except Exception:  # these shapes say nothing about it
        return
    scale = float((alone.detach() - value).abs().max())
    if not float((alone.detach() - beside.detach()).abs().max()) <= _TOLERANCE * scale:
        raise ValueError(
            f"{type(optimizer).__name__} cannot update parameters in parts, as what one becomes depends on the others "
            "that it has: pipeline stages and experts' ranks have others each, and from a file some are updated at a "
            "time. Use another optimizer (or a mesh without pp and ep; offload='cpu'), or set is_elementwise = True on "
            "it if it treats every element for itself and draws numbers"
        )


def _run(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    grads: Mapping[nn.Parameter, Sequence[Tensor]],
    comms: Sequence[Communicator] = (),
) -> None:
    """Steps of a copy of the optimizer that has these parameters alone. What a step raises on one rank of `comms`,
    whose rows are not those of others, is raised on all."""
    inner: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups", "step"):
            is_hooks = key.startswith("_optimizer_")  # that the step of a base class looks for
            vars(inner)[key] = OrderedDict() if is_hooks else copied(value)
    inner.state, inner.param_groups = defaultdict(dict), [{**copy.deepcopy(options), "params": [*grads]}]
    for step in zip(*grads.values(), strict=True):
        error: Exception | None = None
        for parameter, grad in zip(grads, step, strict=True):
            parameter.grad = grad.clone()  # which a step may write to
        try:
            with torch.no_grad(), reading_whole():
                inspect.unwrap(type(optimizer).step)(inner)
        except Exception as raised:
            error = raised
        failed = torch.tensor(float(error is not None), device="cpu")
        for comm in comms:
            failed = comm.all_reduce(failed, "max")
        if failed:
            raise error or RuntimeError("on another rank")
