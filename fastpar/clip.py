"""The exact norm of all gradients of a model, and clipping by it.

    norm = clip_grad_norm_(model.parameters(), 1.0)                 # DTensors say by themselves what is sharded
    norm = clip_grad_norm_(pipe.parameters(), 1.0, mesh=mesh)       # with pipeline stages

The sum of squares is an integer (`fastpar.ops.exact_square_sum`), and the norm its square root, rounded once. So norm
and factor have the same bits under every layout: any mix of tensor, pipeline, expert and data parallelism and ZeRO, any
number of ranks and threads. Sums of floats do not: summed in another order under pipeline parallelism, a norm differs
in its last bit, and two runs drift apart from the first step that clips.

Every element is counted once:

    DTensor          summed over the dims of its mesh along which it is sharded. What several ranks hold alike is cut:
                     each reads a part of it, and the sum goes over these dims as well.
    plain tensor     alike on all ranks but those of other pipeline stages, unless `groups` says that it is split
    shared by stages parameters that a `fastpar.pipeline.Pipeline` holds on several of its ranks (tied embeddings) count
                     once; they carry their share as the attribute `pipeline_share`

One all-reduce of 168 bytes per distinct group that is summed over, and none where nothing is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fastpar import ops
from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.comm.communicator import GroupLike
from fastpar.contracts.gradients import LENGTH
from fastpar.mesh import Mesh, named_groups

_NOT_FINAL = 1 << 48  # for a number of NaN: more than any tensor has, and 2^15 ranks can add it

Parameters = Tensor | Iterable[Tensor] | nn.Module | torch.optim.Optimizer
Groups = Mapping[ProcessGroup | DeviceMesh, Iterable[Tensor] | None]
Plan = dict[
    tuple[str, ...], dict[tuple[int, int], list[int]]
]  # groups to sum over: share to read: numbers of gradients


class GradSum:
    """The exact sum of squares of gradients, collected in pieces and over ranks.

        total = GradSum(device)
        total.add(grads)                      # this rank's part, in any pieces
        total.combine(comm)                   # one all-reduce of 168 bytes; the same sum on every rank
        factor = total.clip_factor(max_norm)  # float32 scalar, for the update to multiply gradients with

    Sums are integers, so the result has the same bits however the elements are spread over calls and ranks. Every
    element must be added on exactly one of the ranks that are combined; `GradSum.of` sees to that for parameters.
    """

    @checked(computed=False, but=("device",))  # rehearsals have devices that are not there
    def __init__(self, device: torch.device | str | None = None) -> None:
        self.sums = torch.zeros(LENGTH, dtype=torch.int64) if device is None else _zeros_on(_device_of(device))

    @staticmethod
    @checked(computed=False)
    def of(
        params: Parameters,
        *,
        mesh: Mesh | DeviceMesh | None = None,
        groups: Groups | None = None,
        grads: Iterable[Tensor | None] | None = None,
    ) -> GradSum:
        """The sum over all gradients of a model; a collective of all ranks that hold a part of it.

        params  as for `clip_grad_norm_`, as are mesh and groups
        grads   the gradients where they are not `.grad`: one for each parameter, local parts or DTensors

        Raises as `clip_grad_norm_` does.
        """
        listed = _parameters(params)
        found = [p.grad for p in listed] if grads is None else list(grads)
        if len(found) != len(listed):
            raise ValueError(f"grads must have one entry for each parameter ({len(listed)}), got {len(found)}")
        made = GradSum.of_checked(listed, found, NormLayout(mesh, groups))
        assert made is not None
        return made

    @staticmethod
    def of_checked(
        listed: Sequence[Tensor],
        found: Sequence[Tensor | None],
        layout: NormLayout,
        *,
        is_final: bool = True,
        comms: Sequence[Communicator] | None = None,
    ) -> GradSum | None:
        """`of` for parameters and gradients that are known to be tensors, in every step the same: the layout is kept,
        and nothing is looked at twice.

        is_final  False: this rank has gradients that are still to be averaged. The sum is void on all ranks that it
                  reaches, and they know it by `is_final` of the result
        comms     None instead of a sum, on all ranks, where it does not go over exactly the ranks of these, in the
                  host's memory
        """
        plan = layout.plan_of(listed, found)
        if comms is not None and not layout.reaches(comms, plan):
            return None
        made = GradSum.__new__(GradSum)
        made.sums = layout.sum(plan, found, is_final=is_final)
        return made

    @property
    def is_final(self) -> bool:
        """Whether all ranks have said that their gradients are final, where any could say something else."""
        return int(self.sums.tolist()[0]) < _NOT_FINAL

    @checked(computed=False)
    def add(self, tensors: Iterable[Tensor | None], *, share: tuple[int, int] = (0, 1)) -> GradSum:
        """Add all elements of `tensors` (local parts of DTensors; None is left out); `self` is returned.

        share  (index, count): add only the index'th of `count` parts of every tensor, for tensors that `count` ranks
               hold alike: each reads a part.
        """
        index, count = share
        if not 0 <= index < count:
            raise ValueError(f"share must be (index, count) with 0 <= index < count, got {share}")
        self._add([_local(x) for x in tensors if x is not None], share)
        return self

    def _add(self, local: Sequence[Tensor], share: tuple[int, int]) -> None:
        if local:
            found = ops.exact_square_sum([_part(x, *share) for x in local])
            self.sums = self.sums + found.to(self.sums.device)

    def __add__(self, other: GradSum) -> GradSum:
        """The sum of both: of parts of a model that were collected apart."""
        if not isinstance(other, GradSum):
            return NotImplemented
        total = GradSum(self.sums.device)
        total.sums = self.sums + other.sums.to(self.sums.device)
        return total

    def __radd__(self, other: int) -> GradSum:
        """Sum with the 0 that `sum(...)` begins with."""
        return self + GradSum(self.sums.device) if other == 0 else NotImplemented

    def combine(self, *groups: GroupLike) -> GradSum:
        """Sum over the ranks of each group in turn; `self` is returned."""
        for group in groups:
            self.sums = Communicator.of(group).all_reduce(self.sums)
        return self

    @checked(computed=False)
    def norm(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The norm, rounded once to float32 or float64: a scalar tensor. NaN where a gradient is NaN, else inf where
        one is infinite (or the norm is too large for the dtype).
        """
        return ops.square_sum_norm(self.sums, dtype)

    @property
    def nonfinite(self) -> Tensor:
        """The number of elements that are NaN or infinite: an int64 scalar tensor."""
        return self.sums[:2].sum()

    @property
    def found_inf(self) -> Tensor:
        """1.0 where any element is NaN or infinite, else 0.0: a float32 scalar tensor."""
        return (self.nonfinite != 0).float()

    @checked(computed=False)
    def clip_factor(
        self, max_norm: float, *, scale: float | Tensor = 1.0, eps: float = 1e-6, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """What to multiply the gradients with so that their norm is at most max_norm: a scalar tensor of `dtype`,
        float32 or float64.

        scale  the factor that gradients are multiplied with before they are clipped, as 1 / loss_scale. The result
               includes it: scale * min(1, max_norm / (scale * norm + eps)).

        Where the norm is not finite the result is `scale` alone: nothing is clipped.
        """
        if isinstance(scale, Tensor) and (scale.is_complex() or scale.layout != torch.strided or scale.numel() != 1):
            raise TypeError(f"scale must be one real number, got {scale.dtype} {list(scale.shape)}, {scale.layout}")
        return scale * _factor(self.norm(dtype) * scale, max_norm, eps)


@checked(computed=False)
def grad_norm(
    params: Parameters,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    groups: Groups | None = None,
    norm_type: float = 2.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The norm of all gradients, without changing any: a scalar tensor, the same bits on every rank and layout.

    Arguments, collectives and errors as for `clip_grad_norm_`; dtype is float32 or float64, rounded to once.
    """
    if norm_type == 2.0:
        return GradSum.of(params, mesh=mesh, groups=groups).norm(dtype)
    if norm_type == math.inf:
        return _largest(params, mesh, groups).to(dtype)
    raise ValueError(f"norm_type must be 2.0 or inf, got {norm_type}: torch.nn.utils.get_total_norm has others")


@checked(computed=False)
def clip_grad_norm_(
    params_or_optimizer: Parameters,
    max_norm: float,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    groups: Groups | None = None,
    error_if_nonfinite: bool = False,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale all gradients so that their common norm is at most max_norm; return the norm they had.

        norm     sqrt of the sum of squares over all ranks, exact and rounded once to float32
        factor   min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it
        grad     grad * factor; untouched where the factor is 1

    A norm that is not finite clips nothing: multiplied with it, every gradient would turn into NaN or 0. It is returned
    as it is, NaN or inf; ask for an error, or skip the step (`fastpar.LossScaler` does, on all ranks at once).

    Called by all ranks of the model, with the same parameters in the same order (those of a pipeline stage on its
    ranks). One all-reduce of 168 bytes per distinct group that parameters are split over, and one read of the
    gradients, of which ranks that hold the same each read a part.

    Args:
        params_or_optimizer: parameters, a module, or an optimizer. An optimizer with an attribute `grad_factor` (those
            of fastpar.optim) gets the factor there and multiplies in its step, which saves a pass over the gradients;
            a factor that is set there already counts into the norm. One with a method `finish_gradients` has it called
            first.
        mesh: a `fastpar.Mesh` or DeviceMesh of all ranks of the model. Needed for pipelines, whose dim is "pp"; along
            its other dims plain parameters are alike.
        groups: further groups, each with the parameters that are split over its ranks although they are plain tensors,
            as experts are: {mesh["ep"].get_group(): expert_parameters}. None instead of parameters: the ranks hold
            different parameters altogether, as those of pipeline stages.
        error_if_nonfinite: raise RuntimeError instead of returning NaN or inf, on all ranks, before anything changes.
        norm_type: 2.0, or inf for the largest magnitude.

    Raises ValueError for partial gradients (`Partial` placements), which have no norm before they are summed, and for
    other norm types.
    """
    if torch.compiler.is_compiling():  # in a graph the gradients of data parallelism could not be looked at
        return cast(Tensor, torch.compiler.disable(clip_grad_norm_)(
            params_or_optimizer, max_norm, mesh=mesh, groups=groups, error_if_nonfinite=error_if_nonfinite,
            norm_type=norm_type,
        ))  # fmt: skip
    if math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")
    if isinstance(params_or_optimizer, torch.optim.Optimizer):
        finish = getattr(params_or_optimizer, "finish_gradients", None)
        if finish is not None:
            finish()
    listed = _parameters(params_or_optimizer)
    takes_factor = hasattr(params_or_optimizer, "grad_factor")
    pending = getattr(params_or_optimizer, "grad_factor", None) if takes_factor else None
    norm = grad_norm(listed, mesh=mesh, groups=groups, norm_type=norm_type)
    if pending is not None:
        norm = norm * pending
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}: clipping by it would spread it. Nothing was changed; skip "
            "the step, or pass error_if_nonfinite=False to leave the gradients as they are"
        )
    factor = _factor(norm, max_norm)
    if takes_factor:
        cast(torch.optim.Optimizer, params_or_optimizer).grad_factor = (  # type: ignore[attr-defined]
            factor if pending is None else pending * factor
        )
    elif factor.device.type != "cpu" or factor.item() != 1.0:  # elsewhere looking would be a synchronisation
        scaled = [_local(p.grad) for p in listed if p.grad is not None]
        if scaled:
            torch._foreach_mul_(scaled, factor)
    return norm


# ---- layouts ---------------------------------------------------------------------------------------------------------


class NormLayout:
    """Which groups the squares of a parameter are summed over, and which part of it this rank reads."""

    def __init__(self, mesh: Mesh | DeviceMesh | None, groups: Groups | None) -> None:
        self._groups: dict[str, ProcessGroup] = {}  # by name, in the order in which they are reduced over
        self._everything: list[str] = []  # over which the total is summed in the end
        self._split: dict[int, tuple[str, ...]] = {}  # plain parameters that are split: id to groups
        self._alike: tuple[tuple[str, ...], tuple[int, int]] = ((), (0, 1))  # for plain parameters
        self._seen: dict[tuple[int, tuple[Placement, ...]], tuple[tuple[str, ...], tuple[int, int]]] = {}
        self._meshes: list[DeviceMesh] = []  # of `_seen`, whose ids stay theirs as long as these live
        self._comms: dict[str, Communicator] = {}  # by name, when they are first needed
        self._listed: list[Tensor] = []  # what `_plan` is of
        self._kinds: list[Any] = []  # of their gradients: how DTensors lie, False for others, None where there is none
        self._plan: Plan = {}
        self._is_on_host = True  # all of `_listed`
        if mesh is not None:
            self._take_mesh(mesh)
        for key, members in (groups or {}).items():
            name = self._name(key.get_group() if isinstance(key, DeviceMesh) else key)
            if members is None:
                self._everything.append(name)
                continue
            for member in members:
                self._split[id(member)] = (*self._split.get(id(member), ()), name)

    def _take_mesh(self, mesh: Mesh | DeviceMesh) -> None:
        names, index, count = [], 0, 1
        for dim, group in named_groups(mesh):
            if dim == "pp":
                self._everything.append(self._name(group))
            else:
                names.append(self._name(group))
                index, count = index * group.size() + group.rank(), count * group.size()
        self._alike = (tuple(names), (index, count))

    def _name(self, group: ProcessGroup) -> str:
        self._groups.setdefault(group.group_name, group)
        return group.group_name

    def place(self, parameter: Tensor, grad: Tensor | None) -> tuple[tuple[str, ...], tuple[int, int] | None]:
        """(names of the groups to sum over, (index, count) of the part to read; None: nothing)"""
        names, (index, count) = self._placed(grad if isinstance(grad, DTensor) else parameter, id(parameter))
        if self._everything and hasattr(parameter, "pipeline_share"):
            if parameter.pipeline_share is None:
                return names, None
            stage, stages = parameter.pipeline_share
            index, count = index * stages + stage, count * stages
        return names, (index, count)

    def _placed(self, x: Tensor, key: int) -> tuple[tuple[str, ...], tuple[int, int]]:
        if not isinstance(x, DTensor):
            return (self._split[key], (0, 1)) if key in self._split else self._alike
        layout = id(x.device_mesh), x.placements
        found = self._seen.get(layout)
        if found is None:
            found = self._seen[layout] = self._placed_dtensor(x)
            self._meshes.append(x.device_mesh)
        return found

    def _placed_dtensor(self, x: DTensor) -> tuple[tuple[str, ...], tuple[int, int]]:
        names, index, count = [], 0, 1
        for dim, placement in enumerate(x.placements):
            if placement.is_partial():
                raise ValueError(
                    f"a gradient of shape {tuple(x.shape)} has the placements {x.placements}: a Partial gradient has "
                    "no norm before it is summed; redistribute it to Shard or Replicate"
                )
            if x.device_mesh.size(dim) == 1:
                continue
            group = x.device_mesh.get_group(dim)
            if self._name(group) not in self._everything:  # as a head's that is sharded over pp: summed in the end
                names.append(self._name(group))
            if placement.is_replicate():
                index, count = index * group.size() + group.rank(), count * group.size()
        return tuple(names), (index, count)

    def reaches(self, comms: Sequence[Communicator], plan: Plan) -> bool:
        """Whether the sum of the last plan goes over exactly the ranks of `comms`, and is in the host's memory."""
        names = {comm.group.group_name for comm in comms if comm.group is not None}
        return self._is_on_host and not self._everything and [set(over) for over in plan] == [names]

    def sum(self, plan: Plan, grads: Sequence[Tensor | None], *, is_final: bool = True) -> Tensor:
        """The sum of squares: each part over its groups, with one all-reduce a group for all parts, and all of them
        over everything. `is_final`: see `GradSum.of_checked`."""
        device = next((grad.device for grad in grads if grad is not None), None)
        parts = {}
        for names, by_share in plan.items():
            found = [
                ops.exact_square_sum([_part(_local(cast(Tensor, grads[i])), *share) for i in indices])
                for share, indices in by_share.items()
            ]
            parts[names] = _added([x.to(device) for x in found]) if found else _zeros_on(device or torch.device("cpu"))
        if not is_final:
            for part in parts.values():
                part[0] = _NOT_FINAL
        for name in self._groups:
            together = [names for names in parts if name in names]
            if len(together) == 1:
                parts[together[0]] = self._comm(name).all_reduce(parts[together[0]])
            elif together:
                summed = self._comm(name).all_reduce(torch.stack([parts[names] for names in together]))
                parts |= zip(together, summed, strict=True)
        total = _added([*parts.values()]) if parts else _zeros_on(device or torch.device("cpu"))
        for name in self._everything:
            total = self._comm(name).all_reduce(total)
        return total

    def plan_of(self, listed: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Plan:
        """Numbers of the gradients that are summed over the same groups, by the share of them that is read; that of the
        call before, where all lie as they did then."""
        kinds = [None if grad is None else getattr(grad, "_spec", False) for grad in grads]
        if len(listed) != len(self._listed) or kinds != self._kinds or not all(map(is_, listed, self._listed)):
            plan: Plan = {}
            for index, (parameter, grad) in enumerate(zip(listed, grads, strict=True)):
                names, share = self.place(parameter, grad)
                by_share = plan.setdefault(names, {})  # also where this rank has no gradient: others may
                if grad is not None and share is not None:
                    by_share.setdefault(share, []).append(index)
            self._plan, self._listed, self._kinds = plan, list(listed), kinds
            self._is_on_host = all(x.is_cpu for x in listed)
        return self._plan

    def _comm(self, name: str) -> Communicator:
        if name not in self._comms:
            self._comms[name] = Communicator(self._groups[name])
        return self._comms[name]

    def largest(self, parts: Mapping[tuple[str, ...], Tensor]) -> Tensor:
        """The maximum of all parts over all ranks."""
        total = torch.stack(list(parts.values())).amax()
        names = dict.fromkeys(name for each in parts for name in each)
        for name in dict.fromkeys([*(n for n in self._groups if n in names), *self._everything]):
            total = self._comm(name).all_reduce(total, "max")
        return total


def _parameters(params: Parameters) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, torch.optim.Optimizer):
        return [p for group in params.param_groups for p in group["params"]]
    found = list(params)
    for index, each in enumerate(found):
        if not isinstance(each, Tensor):
            raise TypeError(f"params must be tensors, got {type(each).__name__} at number {index}")
    return list(dict.fromkeys(found))


def _local(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    return x.to_local() if x.requires_grad else x._local_tensor  # the first goes through autograd


def _part(x: Tensor, index: int, count: int) -> Tensor:
    """Elements index * n / count to (index + 1) * n / count of x, in the order of a contiguous tensor."""
    if count == 1:
        return x
    flat, n = x.detach().reshape(-1), x.numel()
    return flat[index * n // count : (index + 1) * n // count]


def _device_of(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        kind = ValueError if isinstance(device, (str, int)) else TypeError
        raise kind(f"GradSum: device must be a device such as 'cpu' or 'cuda:0', got {device!r}") from None


def _zeros_on(device: torch.device) -> Tensor:
    try:
        return torch.zeros(LENGTH, dtype=torch.int64, device=device)
    except (AssertionError, RuntimeError) as error:  # torch has an AssertionError where it is built without CUDA
        raise ValueError(f"GradSum: device {str(device)!r} cannot be used: {error}") from error


def _added(parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(Tensor.__add__, parts)


def _factor(norm: Tensor, max_norm: float, eps: float = 1e-6) -> Tensor:
    # floats: torch takes no int beyond 64 bits
    return torch.where(norm.isfinite(), (float(max_norm) / (norm + float(eps))).clamp(max=1.0), 1.0)


def _largest(params: Parameters, mesh: Mesh | DeviceMesh | None, groups: Groups | None) -> Tensor:
    """The largest magnitude; NaN where there is one. Ordered as integers, so that NaN is the largest everywhere."""
    layout, listed = NormLayout(mesh, groups), _parameters(params)
    device = next((p.grad.device for p in listed if p.grad is not None), None)
    parts: dict[tuple[str, ...], Tensor] = {}
    for parameter in listed:
        names, _ = layout.place(parameter, parameter.grad)
        parts.setdefault(names, torch.zeros((), dtype=torch.int64, device=device))
        local = None if parameter.grad is None else _local(parameter.grad)
        if local is not None and local.numel():
            largest = torch.linalg.vector_norm(local, math.inf, dtype=torch.float64).abs()  # no sign on a NaN
            parts[names] = parts[names].maximum(largest.view(torch.int64))
    return layout.largest(parts or {(): torch.zeros((), dtype=torch.int64)}).view(torch.float64)
