"""Sharded parameters: DTensors at rest, plain local tensors in the hot path.

A parallel layer keeps its weight as a DTensor, so that torch optimizers, `torch.distributed.checkpoint` and
`get_model_state_dict` understand it, and unwraps it once per forward with `unwrap`, a single autograd node that also
sums the gradient over the group where every rank computed only a part of it.

Note: row maps
    Which indices along the sharded dim a rank uses is data, a `RowMap`. Three kinds occur:

    * contiguous: the rank's chunk, stored as `Shard(dim)`. The rule is `torch.chunk`'s, which DTensor shares.
    * packed: disjoint pieces of equal total size, one from each section of a fused weight ([q; k; v], [gate; up]).
      Stored as `Shard(dim)` with the rows in rank-major order. `state_dict` hands out, and `load_state_dict` takes,
      the canonical order, so that a checkpoint does not depend on the layout; `full_tensor()` of the DTensor would
      give the rank-major order, `full_parameter` here gives the canonical one.
    * whole: the ranks' rows overlap (fewer key/value heads than ranks) or sections do not divide evenly. The
      parameter stays `Replicate()`, a rank picks its rows in forward, and the gradient is summed over the group.

    Replicating key/value weights costs memory of the order of one head per rank and keeps a single definition of the
    parameter; storing each rank's copy as a shard would give optimizers and norms more elements than the model has.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fastpar.arguments import check_counts, checked
from fastpar.comm import Communicator, shard_range
from fastpar.comm.autograd import reduce_from
from fastpar.comm.shards import MAX_PARTS, check_dim
from fastpar.ops._autograd import apply_plain, dtensor_grad
from fastpar.tensor.dtensor_data import check_own_part, own_memory
from fastpar.tensor.row_order import as_stored, in_order, is_packed
from fastpar.tensor.split_views import watch_views

ROWS_OF = "fastpar_rows_of"  # the attribute of a parameter that holds rows of a stored one: the layout of that
_SUCCESSOR = "fastpar_successor"  # the attribute of a parameter that another one has replaced

Range = tuple[int, int]
MakeParameter = Callable[[nn.Parameter, "ParameterLayout"], nn.Parameter]


@dataclass(frozen=True)
class RowMap:
    """The indices along one dim of a parameter that each rank of a group uses.

    `RowMap.packed((4, 4), 2)` describes [gate; up] with four rows each on two ranks: rank 0 uses rows 0-1 and 4-5,
    rank 1 rows 2-3 and 6-7.
    """

    total: int
    ranges: tuple[tuple[Range, ...], ...]

    @staticmethod
    @checked(computed=False)
    def chunk(total: int, parts: int) -> RowMap:
        """Contiguous chunks by `torch.chunk`'s rule: ceil(total / parts) each until used up."""
        check_counts(MAX_PARTS, parts=parts)
        return RowMap(total, tuple((shard_range(total, parts, rank),) for rank in range(parts)))

    @staticmethod
    @checked(computed=False)
    def packed(sections: Sequence[int], parts: int) -> RowMap:
        """A fused weight: every section is chunked on its own, a rank uses its chunk of each."""
        check_counts(MAX_PARTS, parts=parts)
        if any(size < 0 for size in sections):
            raise ValueError(f"sections must not be negative, got {list(sections)}")
        ranges: list[tuple[Range, ...]] = []
        for rank in range(parts):
            start, mine = 0, []
            for size in sections:
                lo, hi = shard_range(size, parts, rank)
                mine.append((start + lo, start + hi))
                start += size
            ranges.append(_merge_adjacent(mine))
        return RowMap(sum(sections), tuple(ranges))

    @staticmethod
    @checked(computed=False)
    def nested(sections: Sequence[int], parts: Sequence[int]) -> RowMap:
        """Chunks of chunks: every section is chunked over the first number of parts, each chunk over the next.

        `RowMap.nested((5,), (2, 2))` gives its four ranks the rows 0-1, 2, 3 and 4. With one number it is `packed`.
        """
        check_counts(MAX_PARTS, **{f"parts[{i}]": count for i, count in enumerate(parts)})
        ranks: list[list[Range]] = [[] for _ in range(math.prod(parts))]
        start = 0
        for size in sections:
            cut = [(start, start + size)]
            for count in parts:
                chunks = [(lo, shard_range(hi - lo, count, rank)) for lo, hi in cut for rank in range(count)]
                cut = [(lo + first, lo + last) for lo, (first, last) in chunks]
            for mine, each in zip(ranks, cut, strict=True):
                mine.append(each)
            start += size
        return RowMap(sum(sections), tuple(_merge_adjacent(mine) for mine in ranks))

    @staticmethod
    @checked(computed=False)
    def concat(maps: Sequence[RowMap]) -> RowMap:
        """The map of weights stacked along the sharded dim, such as [q; k; v] with fewer key/value heads."""
        if len({len(m.ranges) for m in maps}) != 1:
            raise ValueError(f"maps must be at least one, and of as many ranks each, got {len(maps)}")
        starts = [sum(m.total for m in maps[:i]) for i in range(len(maps))]
        parts = len(maps[0].ranges)
        ranges = tuple(
            _merge_adjacent([(lo + s, hi + s) for m, s in zip(maps, starts, strict=True) for lo, hi in m.ranges[rank]])
            for rank in range(parts)
        )
        return RowMap(sum(m.total for m in maps), ranges)

    @checked(computed=False)
    def joined(self, count: int) -> RowMap:
        """The map of groups of `count` successive ranks: each has the rows of all of them, rank by rank."""
        check_counts(MAX_PARTS, count=count)
        if len(self.ranges) % count:
            raise ValueError(f"count must divide the {len(self.ranges)} ranks, got {count}")
        groups = [self.ranges[first : first + count] for first in range(0, len(self.ranges), count)]
        return RowMap(self.total, tuple(_merge_adjacent(list(itertools.chain(*group))) for group in groups))

    @checked(computed=False)
    def size(self, rank: int) -> int:
        """Rows that a rank has."""
        self._check_rank(rank)
        return sum(hi - lo for lo, hi in self.ranges[rank])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self.ranges):
            raise IndexError(f"rank must be in 0..{len(self.ranges) - 1}, got {rank}")

    @functools.cached_property
    def kind(self) -> str:
        """ "contiguous", "packed" or "whole"; see the note above."""
        parts = len(self.ranges)
        if all(len(r) == 1 and r[0] == shard_range(self.total, parts, rank) for rank, r in enumerate(self.ranges)):
            return "contiguous"
        sizes = {self.size(rank) for rank in range(parts)}
        covered = sorted(r for rank in self.ranges for r in rank)
        disjoint = all(a[1] <= b[0] for a, b in itertools.pairwise(covered))
        return "packed" if disjoint and len(sizes) == 1 and sizes.pop() * parts == self.total else "whole"

    @checked(computed=False)
    def take(self, full: Tensor, dim: int, rank: int) -> Tensor:
        """The rank's rows of `full`, in the order of its ranges (a view when they are contiguous)."""
        self._check_rank(rank)
        if full.size(check_dim(dim, full)) != self.total:
            raise ValueError(f"full must have {self.total} rows along dim {dim}, got {tuple(full.shape)}")
        pieces = [full.narrow(dim, lo, hi - lo) for lo, hi in self.ranges[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    @checked(computed=False)
    def assemble(self, locals_: Sequence[Tensor], dim: int) -> Tensor:
        """The inverse of `take` over all ranks: the full tensor from every rank's rows."""
        shape = list(locals_[0].shape)
        shape[dim] = self.total
        full = locals_[0].new_empty(shape)
        for ranges, local in zip(self.ranges, locals_, strict=True):
            start = 0
            for lo, hi in ranges:
                full.narrow(dim, lo, hi - lo).copy_(local.narrow(dim, start, hi - lo))
                start += hi - lo
        return full


def _merge_adjacent(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same indices in the same order with fewer ranges; on one rank all sections become one."""
    merged: list[Range] = []
    for lo, hi in ranges:
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    return tuple(merged)


@dataclass(frozen=True)
class ParameterLayout:
    """How a parameter lies over a group. `rows is None`: replicated, every rank uses all of it."""

    comm: Communicator
    mesh: DeviceMesh | None  # None: a single rank without torch.distributed, the parameter is a plain tensor
    shape: torch.Size
    dim: int = 0
    rows: RowMap | None = None
    picks_rows: bool = field(init=False, compare=False)
    """Whether a rank selects its rows in forward from a parameter that is stored whole."""

    def __post_init__(self) -> None:
        # Not a cached property: torch.compile breaks its graph at the lock that these have in Python 3.11 and before.
        object.__setattr__(self, "picks_rows", self.kind == "whole")

    def __deepcopy__(self, memo: Any) -> ParameterLayout:
        return self  # describes a group, which a copied model shares

    @staticmethod
    def of_dtensor(param: DTensor, comm: Communicator) -> ParameterLayout:
        """The layout of a DTensor that somebody else made on the same group."""
        (placement,) = param.placements
        if isinstance(placement, Shard):
            dim = placement.dim % param.dim()
            rows = RowMap.chunk(param.shape[dim], comm.size)
            return ParameterLayout(comm, param.device_mesh, param.shape, dim, rows)
        return ParameterLayout(comm, param.device_mesh, param.shape)

    @functools.cached_property
    def kind(self) -> str:
        """ "replicated", or the `RowMap.kind` of its rows."""
        return "replicated" if self.rows is None else self.rows.kind

    @property
    def placement(self) -> Placement:
        """The placement that a DTensor of it has."""
        return Shard(self.dim) if self.kind in ("contiguous", "packed") else Replicate()

    @property
    def placements(self) -> list[Placement]:
        """Those of its DTensor, one for each dim of the mesh."""
        return [self.placement]

    @property
    def num_ranks(self) -> int:
        """Ranks that the parameter lies over."""
        return self.comm.size

    @property
    def cut(self) -> tuple[Any, ...]:
        """How it is split, for comparison: of one parameter all modules have to say the same."""
        return self.kind, self.dim, self.rows

    def sum_grad(self, grad: Tensor) -> Tensor:
        """The sum of the ranks' parts of a gradient; differentiable, for gradients of gradients."""
        return reduce_from(grad, self.comm) if grad.requires_grad else self.comm.all_reduce(grad)

    def pick(self, local: Tensor) -> Tensor:
        """The rows that a rank uses of a parameter of which it stores more; differentiable."""
        assert self.rows is not None
        return self.rows.take(local, self.dim, self.comm.rank)

    def local(self, full: Tensor) -> Tensor:
        """What this rank stores of the full tensor."""
        if self.placement.is_replicate():
            return full
        assert self.rows is not None
        return self.rows.take(full, self.dim, self.comm.rank)

    def full(self, local: Tensor) -> Tensor:
        """The full tensor in canonical order from what the ranks store (one all-gather unless replicated)."""
        if self.placement.is_replicate():
            return local.clone()
        assert self.rows is not None
        sizes = [self.rows.size(rank) for rank in range(self.comm.size)]
        return self.in_order(self.comm.all_gather(local.contiguous(), dim=self.dim, sizes=sizes))

    def in_order(self, stored: Tensor) -> Tensor:
        """The full tensor in canonical order from one whose rows are in the order of the ranks that store them."""
        if self.placement.is_replicate():
            return stored
        assert self.rows is not None
        sizes = [self.rows.size(rank) for rank in range(self.comm.size)]
        return self.rows.assemble(stored.split(sizes, self.dim), self.dim)

    def order(self, dim: int) -> Tensor:
        """Which row of the full tensor each along `dim` is, as the ranks store them, one rank after the other."""
        rows = torch.arange(self.shape[dim], device="cpu")
        if dim != self.dim or self.placement.is_replicate():
            return rows
        assert self.rows is not None
        return torch.cat([self.rows.take(rows, 0, rank) for rank in range(self.comm.size)])

    @property
    def shards(self) -> list[tuple[Communicator, int, RowMap]]:
        """Ranks, dim and rows of each cut that a stored parameter has."""
        if self.placement.is_replicate():
            return []
        assert self.rows is not None
        return [(self.comm, self.dim, self.rows)]

    def canonical(self) -> ParameterLayout:
        """The layout of the same shards with all rows in their order, as checkpoints have them."""
        rows = RowMap.chunk(self.shape[self.dim], self.comm.size)
        return ParameterLayout(self.comm, self.mesh, self.shape, self.dim, rows)

    def as_dtensor(self, local: Tensor) -> Tensor:
        """`local` as a DTensor of the full shape; unchanged when there is no mesh."""
        if self.mesh is None:
            return local
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=stride)

    def parameter(self, full: Tensor, *, requires_grad: bool = True) -> nn.Parameter:
        """The parameter to register: this rank's rows, copied, so that the full tensor can be freed."""
        local = self.local(full.detach()).clone(memory_format=torch.contiguous_format)
        param = nn.Parameter(self.as_dtensor(local), requires_grad=requires_grad)
        return self.tag(param)

    def tag(self, param: nn.Parameter) -> nn.Parameter:
        """Note the layout on the parameter, for `full_parameter`; its module knows it as well."""
        param.fastpar_layout = self  # type: ignore[attr-defined]
        watch_views(param)
        return param


@checked(computed=False)
def layout_of(param: Tensor) -> ParameterLayout | None:
    """The layout that fastpar gave a parameter, or None for a parameter it has not touched."""
    return cast("ParameterLayout | None", getattr(param, "fastpar_layout", None))


@checked(computed=False)
def local_tensor(x: Tensor) -> Tensor:
    """The local part of a DTensor, or the tensor itself; outside autograd."""
    return x._local_tensor if isinstance(x, DTensor) else x


def is_sharded_further(param: Tensor) -> bool:
    """Whether somebody else has sharded a parameter of ours along a second dim of a mesh: torch's fully_shard, which
    puts the parameter of one dim back while the module's forward and backward run."""
    if not isinstance(param, DTensor):
        return False
    num_placements = len(param._spec.placements)
    if num_placements == 1:  # of nearly all, in a forward: a layout has one at least
        return False
    layout = layout_of(param)
    return num_placements > (1 if layout is None else len(layout.placements))


@checked(computed=False)
def full_parameter(param: Tensor, value: Tensor | None = None) -> Tensor:
    """The unsharded parameter in canonical order, on every rank of its group (a collective).

    `value` is something shaped like the parameter to gather in its place: its gradient or an optimizer state. Under
    ZeRO both may be rows of what tensor parallelism has split: a collective of all ranks that have some.
    """
    value = param.detach() if value is None else value
    layout = _layout_of_rows(param)
    if layout is not None and isinstance(value, DTensor) and _is_rows_of(value, layout):
        return layout.in_order(value.full_tensor())
    if layout is not None:
        return layout.full(local_tensor(value))
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


class _Unwrap(torch.autograd.Function):
    """DTensor parameter to local tensor; the gradient goes back as a DTensor, summed over the group if asked."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, layout: ParameterLayout, reduce: bool) -> Tensor:
        ctx.layout, ctx.reduce = layout, reduce
        ctx.spec = param._spec if isinstance(param, DTensor) else None
        # What was prepared for a block and never used has no gradient; a sum over the group needs one on every rank.
        ctx.set_materialize_grads(reduce)
        local: Tensor = cast(Any, param)._local_tensor if ctx.spec is not None else param
        return local.view_as(local)  # a new tensor object: autograd must not write its history into the parameter's

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (grad,) = grads
        if grad is None:
            return None, None, None
        if ctx.reduce:
            grad = ctx.layout.sum_grad(grad)
        if ctx.spec is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return ctx.layout.as_dtensor(grad), None, None
        return dtensor_grad(grad, ctx.spec), None, None


def unwrap(param: Tensor, layout: ParameterLayout, *, sum_grad: bool = False) -> Tensor:
    """The rows of a parameter that this rank computes with, as a plain tensor.

    forward   local rows of the parameter
    dgrad     the local gradient as a DTensor; with `sum_grad`, or when the parameter is stored whole and each rank
              uses only some rows, all_reduce(gradient) over the group first
    """
    picks_rows = layout.picks_rows
    reduce = (sum_grad or picks_rows) and layout.num_ranks > 1
    if param.requires_grad and torch.is_grad_enabled() and (reduce or isinstance(param, DTensor)):
        local: Tensor = apply_plain(_Unwrap, param, layout, reduce)
    else:
        local = local_tensor(param)
    return layout.pick(local) if picks_rows else local


def _refuse_whole(name: str, param: Tensor, layout: ParameterLayout) -> None:
    """TypeError for a plain tensor that is not this rank's part, of which the others would have another one."""
    assert layout.rows is not None
    if not layout.placement.is_replicate() and param.shape[layout.dim] != layout.rows.size(layout.comm.rank):
        raise TypeError(
            f"{name} is a plain tensor of the shape {list(param.shape)} here, and was split over {layout.num_ranks} "
            "ranks: give functional_call tensors as the split model has them (such as p.detach().clone() of its "
            "named_parameters()); load_state_dict takes whole ones"
        )


class ParallelModule(nn.Module):
    """What all modules with sharded parameters share: the layout of each, and how it survives conversions and copies.

    A conversion (`.to`, `.bfloat16()`) or a deep copy makes new tensors, which have lost their layout tag; the module
    keeps the layouts and puts the tags back.
    """

    _layouts: dict[str, ParameterLayout]

    def _add_parameter(
        self, name: str, full: nn.Parameter | None, layout: ParameterLayout, make: MakeParameter | None = None
    ) -> None:
        """Register the parallel parameter for `full`; `make` may return one that exists already (tied weights)."""
        self.__dict__.setdefault("_layouts", {})[name] = layout
        made = None if full is None else (make or make_parameter)(full, layout)
        self._parameters[name] = None  # not the whole one, which `_local` refuses
        self.register_parameter(name, made)

    def _local(self, name: str, *, sum_grad: bool = False) -> Tensor | None:
        if name not in self._parameters:
            raise RuntimeError(
                f"{type(self).__name__} has no parameter {name!r} any more: parametrizations, weight_norm and "
                "pruning put it elsewhere. Apply them before fastpar.parallelize, or between unparallelize and it"
            )
        param, layout = self._parameters[name], self._layouts[name]
        if param is None:
            return None
        if not isinstance(param, DTensor) and type(layout) is ParameterLayout and layout.rows is not None:
            _refuse_whole(name, param, layout)
        return unwrap(param, layout, sum_grad=sum_grad)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with torch.no_grad():
            same = {name: param for name, param in self._parameters.items() if param is not None and fn(param) is param}
        # torch makes a new parameter of what is a DTensor, which one whose class shows an averaged gradient refuses.
        self._parameters.update(dict.fromkeys(same))
        try:
            result = super()._apply(fn, recurse)
        finally:
            self._parameters.update(same)
        self._tag_parameters()
        return result

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._tag_parameters()

    def _tag_parameters(self) -> None:
        for name, layout in self._layouts.items():
            param = self._parameters.get(name)
            if param is not None:
                layout.tag(param)


def make_parameter(full: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
    return layout.parameter(full, requires_grad=full.requires_grad)


def install_state_dict_hooks(module: nn.Module) -> list[Any]:
    """Make `state_dict` and `load_state_dict` of one parallel module speak canonical layouts; returns hook handles.

    state_dict       packed parameters are handed out as `Shard(dim)` DTensors in canonical row order (a collective)
    load_state_dict  takes DTensors in canonical order and also plain tensors of the full shape, such as an ordinary
                     unsharded checkpoint
    """
    return [
        module.register_state_dict_post_hook(_canonical_state),
        module.register_load_state_dict_pre_hook(_stored_state),
    ]


def _layout_of_rows(param: Tensor | None) -> ParameterLayout | None:
    """The layout of a parameter, or of that which it has rows of, as under ZeRO's stage 3."""
    return None if param is None else layout_of(param) or getattr(param, ROWS_OF, None)


def _layout_in(module: nn.Module, name: str) -> ParameterLayout | None:
    """The same of a module's parameter; that of fully_shard has no layout, and the module knows it."""
    param = module._parameters[name]
    layout = _layout_of_rows(param)
    if layout is None and param is not None and is_sharded_further(param) and isinstance(module, ParallelModule):
        return module._layouts.get(name)
    return layout


def _is_rows_of(value: Tensor, layout: ParameterLayout) -> bool:
    """Whether data parallelism has cut what tensor parallelism stores."""
    num_placements = 0 if layout.mesh is None else len(layout.placements)  # of what one rank alone has, no DTensor
    return isinstance(value, DTensor) and len(value.placements) > num_placements


def _canonical_state(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in module._parameters:
        layout = _layout_in(module, name)
        value = state.get(prefix + name)
        if layout is None or value is None or not is_packed(layout):
            continue
        if _is_rows_of(value, layout):
            state[prefix + name] = in_order(value, layout)
            continue
        canonical = layout.canonical()
        full = layout.full(local_tensor(value))
        state[prefix + name] = canonical.as_dtensor(own_memory(canonical.local(full)))


def _stored_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    for name, param in module._parameters.items():
        layout = _layout_in(module, name)
        value = state.get(prefix + name)
        if layout is None or value is None:
            continue
        if isinstance(value, DTensor):
            check_own_part(prefix + name, value)
            if _is_rows_of(value, layout):
                state[prefix + name] = as_stored(value, layout)
            elif layout.kind == "packed":
                full = layout.canonical().full(value._local_tensor)
                state[prefix + name] = layout.as_dtensor(layout.local(full))
        elif value.shape == layout.shape and not _is_rows_of(cast(Tensor, param), layout):
            state[prefix + name] = layout.as_dtensor(layout.local(value))
        if metadata.get("assign_to_params_buffers", False):
            state[prefix + name] = _assigned(cast(nn.Parameter, param), state[prefix + name], layout)


def _assigned(param: nn.Parameter, value: Tensor, layout: ParameterLayout) -> Tensor:
    """What `load_state_dict(assign=True)` puts in the place of a parameter: itself with these values, as optimizers and
    `unparallelize` know it; a new one with its layout, where device or dtype are others."""
    if value.shape != param.shape or is_sharded_further(param):
        return value  # torch's to refuse, or fully_shard's
    if (value.dtype, value.device) == (param.dtype, param.device):
        with torch.no_grad():
            param.copy_(value)
        return param
    local = own_memory(local_tensor(value).detach())
    made = layout.tag(nn.Parameter(layout.as_dtensor(local), requires_grad=param.requires_grad))
    vars(param)[_SUCCESSOR] = made
    return made


def current(param: nn.Parameter) -> nn.Parameter:
    """The parameter that stands where `param` stood: itself, but for `load_state_dict(assign=True)`."""
    while _SUCCESSOR in vars(param):
        param = vars(param)[_SUCCESSOR]
    return param
