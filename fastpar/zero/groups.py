"""Which ranks share what: the groups that data parallelism runs over, and DTensors of shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from fastpar.comm import Communicator, shard_range
from fastpar.comm.transport_selector import Mode
from fastpar.mesh import Mesh, named_groups
from fastpar.tensor.held import Index, index_of

GroupsLike = Mesh | DeviceMesh | ProcessGroup | Communicator | None


class Groups:
    """The ranks among which parameters are sharded (`shard`), and among which shards are replicated (`replicate`).

    group      a Mesh (its dims fsdp, which is dp_shard x cp, and dp_replicate), a DeviceMesh of one dim (shard) or two
               (replicate, shard), a ProcessGroup, a Communicator, or None: one rank
    is_sharded False: nothing is sharded, all of those ranks are replicas
    device_type of the parameters
    timeout    of all communicators; None: the group's where it is a Communicator, else theirs
    of_experts for parameters split over the mesh's ep or etp: dims efsdp and dp_replicate
    ranks      of the job, that are in the group
    num_parts  ranks of cp, each with a part of every sequence: the mean over all ranks times this is the sum over cp
               and the mean over data parallelism, which is the gradient
    experts    the groups of such parameters, where a model has some beside others: see `of`
    """

    def __init__(
        self,
        group: GroupsLike,
        *,
        is_sharded: bool,
        device_type: str = "cpu",
        of_experts: bool = False,
        experts: Groups | None = None,
        timeout: float | None = None,
    ) -> None:
        self.experts = experts
        self._mesh: DeviceMesh | None = None  # of (replicate,) shard, where there is one
        self.mesh = group if isinstance(group, Mesh) else None  # of all ranks, where it is known
        self.num_parts = 1
        if isinstance(group, Mesh):
            self.num_parts = group.size("cp")
            dims = ("dp_replicate", "efsdp" if of_experts else "fsdp")
            names = [name for name in dims if group.size(name) > 1]
            replicate, shard = (group.group(name) for name in dims)
            if not is_sharded:
                replicate, shard = group.group("edp" if of_experts else "dp_cp"), None
            if names:
                self._mesh = group[tuple(names) if len(names) > 1 else names[0]]
        elif isinstance(group, DeviceMesh) and group.ndim == 2:
            self._mesh, replicate, shard = group, group.get_group(0), group.get_group(1)
            if not is_sharded:
                replicate, shard = group._flatten().get_group(), None
        elif isinstance(group, DeviceMesh) and group.ndim > 2:
            raise ValueError(f"a DeviceMesh must have one dim (shard) or two (replicate, shard), got {group}")
        else:
            found = Communicator.of(group).group
            if isinstance(group, DeviceMesh):
                self._mesh = group
            elif found is not None and is_sharded:
                self._mesh = DeviceMesh.from_group(found, device_type)
            replicate, shard = (None, found) if is_sharded else (found, None)
        self.ranks = _ranks_of(group)
        self._like: dict[str, Any] = {}
        if isinstance(group, Communicator):
            self._like |= {"timeout": group.timeout, "transport": group.transport}
        if timeout is not None:
            self._like["timeout"] = timeout
        self.shard, self.replicate = Communicator(shard, **self._like), Communicator(replicate, **self._like)
        world = dist.get_world_size() if dist.is_initialized() else 1
        # Split-phase collectives need that nobody waits for other groups in between, as experts and attention do.
        has_others = self.mesh is not None and any(self.mesh.size(dim) > 1 for dim in ("ep", "etp", "cp"))
        self.mode: Mode = "split_phase" if self.size == world and not has_others else "background"

    @property
    def size(self) -> int:
        """Ranks that reduce gradients: average them, but for those of cp, which are summed."""
        return self.shard.size * self.replicate.size

    def as_sum_of_parts(self, mean: Tensor) -> Tensor:
        """A mean of gradients over all ranks, made the sum over cp of the means over data parallelism, in place."""
        return mean if self.num_parts == 1 else mean.mul_(self.num_parts)

    def of(self, parameter: Tensor) -> Groups:
        """The ranks that a parameter is averaged over: those of data parallelism, or of its experts."""
        return self.experts if self.experts is not None and is_expert(parameter) else self

    def with_experts(self) -> list[Groups]:
        """These, and those of experts."""
        return [self] if self.experts is None else [self, self.experts]

    def everyone(self) -> list[Communicator]:
        """Groups whose reductions, one after the other, reach all ranks that average gradients."""
        return [comm for comm in (self.shard, self.replicate) if comm.size > 1]

    def joined(self) -> list[Communicator]:
        """`everyone`, and on to the ranks that share experts with those: all that run the same units.

        Note: in one round. Ranks that differ by multiples of tp share a dense parameter, by multiples of ep * etp an
        expert's; so one reduction over each reaches every sum of such multiples. Without tp the first has reached all.
        """
        experts, mesh = self.experts, self.mesh
        if experts is None or mesh is None or mesh.size("tp") == 1 or experts.shard.size == 1:
            return self.everyone()
        return [*self.everyone(), experts.shard]

    def others(self) -> list[Communicator]:
        """Groups that join the ranks of one data-parallel position: of tensor and pipeline parallelism, where the mesh
        is known."""
        found = [] if self.mesh is None else named_groups(self.mesh)
        return [Communicator(group, **self._like) for dim, group in found if dim in ("pp", "tp")]

    def holders(self) -> list[Communicator]:
        """Groups whose reductions, one after the other, reach all ranks that have parameters of the same names: where
        the mesh is known all but those of other pipeline stages, else the ranks that average gradients."""
        if self.mesh is None:
            return self.everyone()
        return [Communicator(group, **self._like) for dim, group in named_groups(self.mesh) if dim != "pp"]

    def row_spec(self, parameter: Tensor) -> DTensorSpec | None:
        """How a parameter looks that has this one's rows split over the shard group; None where nothing is split."""
        if self.shard.size == 1:
            return None
        outer: list[Placement] = [Replicate()] if self._mesh is not None and self._mesh.ndim == 2 else []
        if not isinstance(parameter, DTensor):
            assert self._mesh is not None
            return _spec(self._mesh, [*outer, Shard(0)], parameter)
        if self.mesh is None:
            raise ValueError(
                "a model with parameters that are DTensors already (tensor parallelism) needs the fastpar Mesh as "
                "group=, not only the ranks of data parallelism"
            )
        inner = parameter.device_mesh
        outer_names = () if self._mesh is None else self._mesh.mesh_dim_names or ()
        if inner.mesh_dim_names == ("pp",):  # a head that is sharded over the pipeline: that dim is the outermost
            whole = ("pp", *outer_names)
            return _spec(self.mesh[whole], [*parameter.placements, *outer, Shard(0)], parameter)
        names = [*outer_names, *(inner.mesh_dim_names or ())]
        pieces = math.prod(
            inner.size(dim) for dim, placement in enumerate(parameter.placements) if placement.is_shard(0)
        )
        rows: Placement = _StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)
        return _spec(self.mesh[tuple(names)], [*outer, rows, *parameter.placements], parameter)


def _ranks_of(group: GroupsLike) -> list[int]:
    """The ranks of the job that are in the group, or in the mesh that it is a part of."""
    if isinstance(group, Mesh):
        return list(range(group.world_size))
    if isinstance(group, DeviceMesh):
        found: list[int] = group.mesh.flatten().tolist()
        return found
    inner = Communicator.of(group).group
    return [0] if inner is None else dist.get_process_group_ranks(inner)


def _spec(mesh: DeviceMesh, placements: Sequence[Placement], x: Tensor) -> DTensorSpec:
    shape = x.shape if x.ndim else torch.Size([1])  # DTensor shards dims, and a scalar has none
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, contiguous_stride(shape), x.dtype))


def as_dtensor(rows: Tensor, spec: DTensorSpec | None) -> Tensor:
    """These rows as the tensor that they are a part of."""
    if spec is None:
        return rows
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype != rows.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, rows.dtype))
    make: Any = DTensor.__new__  # `from_local` would check the parts with collectives, and `__init__`, which does
    if rows.storage_offset() == 0:  # nothing, takes twice as long as all the rest
        made: Any = make(DTensor, rows, spec, requires_grad=False)
    else:  # the DTensor would give the offset as its address, and copy.deepcopy looks for memory there (torch 2.13)
        made = make(DTensor, rows.new_empty(0), spec, requires_grad=False)
        made._local_tensor = rows
    return cast("Tensor", made)


def as_parameter(rows: Tensor, spec: DTensorSpec | None, *, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(as_dtensor(rows, spec), requires_grad)


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter is split over a mesh's ep or etp."""
    names = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
    return "ep" in names or "etp" in names


def local(x: Tensor) -> Tensor:
    """This rank's part of x, without history."""
    found: Tensor = x._local_tensor if isinstance(x, DTensor) else x
    return found.detach() if found.requires_grad else found  # to detach a DTensor costs ten times as much


def own_storage(x: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is that and no more.

    A DTensor of a view with an offset cannot be copied or saved, since torch takes the offset for the address of its
    storage; and of one without, the whole storage would be saved. One whose part got an offset afterwards cannot be an
    input of torch.compile, which wants both alike.
    """
    if x.numel() == 0:
        return x.new_empty(x.shape)  # rows that this rank has none of, which lie behind the others' all the same
    if x.untyped_storage().nbytes() == 0:
        return x
    found: Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach()))
    return found


def set_local(x: Any, value: Tensor) -> None:
    """Let this rank's part of x lie where value does."""
    if isinstance(x, DTensor):
        x._local_tensor.data = own_storage(value)
    else:
        x.data = value


def cast_parameter(parameter: Any, dtype: torch.dtype) -> None:
    """Give a parameter another dtype, in place."""
    if parameter.dtype == dtype:
        return
    if isinstance(parameter, DTensor):
        made = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, made)
    else:
        parameter.data = parameter.data.to(dtype)


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def held_index(parameter: Tensor, held: Tensor, groups: Groups) -> Index:
    """The place in the whole parameter of what a rank holds of it: all that it stores, or its rows of that."""
    index = index_of(parameter)
    shape = [size if rows is None else len(rows) for size, rows in zip(parameter.shape, index, strict=True)]
    if not shape or local(held).numel() == math.prod(shape):
        return index
    first = torch.arange(shape[0]) if index[0] is None else index[0]
    lo, hi = shard_range(shape[0], groups.shard.size, groups.shard.rank)
    return (first[lo:hi], *index[1:])
