"""The mesh itself; see `fastpar.mesh`."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastpar.arguments import MAX_SECONDS, check_seconds, checked
from fastpar.mesh.lifetime import (
    DEFAULT_TIMEOUT_S,
    forget_meshes,
    has_failed,
    known_groups,
    leave,
    release_unused,
    release_with,
    set_timeout,
)
from fastpar.mesh.one_rank import OneRankGroup, one_rank_group
from fastpar.mesh.rendezvous import Clock, Session, launched_world, open_store
from fastpar.mesh.tensor_grid import GridSpec

DENSE_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_DIMS = ("pp", "dp_replicate", "efsdp", "ep", "etp")
TENSOR_GRID_DIMS = ("tp_x", "tp_y", "tp_d", "tp_z")
GRID_DIMS = (*DENSE_DIMS[:-1], *TENSOR_GRID_DIMS)
# Derived dims: several neighbouring ones of a view as one.
_FLATTENED = {
    "fsdp": ("dp_shard", "cp"),
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "cp_tp": ("cp", "tp"),
    "edp": ("dp_replicate", "efsdp"),
}
_NAMES = (*DENSE_DIMS, "efsdp", "ep", "etp", *_FLATTENED, *TENSOR_GRID_DIMS)
_DERIVED = {
    "dp": "it is dp_replicate x dp_shard: give dp_shard=N (parameters may be sharded over these ranks), dp_replicate=N "
    "(each has a copy), or both",
    "fsdp": "give dp_shard=N; it is dp_shard x cp",
    "dp_cp": "it is dp_replicate x dp_shard x cp: give these",
    "cp_tp": "give cp=N and tp=N",
    "efsdp": "it follows from the other sizes",
    "edp": "it follows from the other sizes",
    **dict.fromkeys(TENSOR_GRID_DIMS, "give tp=N and tp_grid=(x, y, z), or a GridSpec"),
}


def init_mesh(
    *arguments: Any,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    tp_grid: GridSpec | tuple[int, int, int] | None = None,
    device: str | torch.device | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    rendezvous_timeout: float = 300.0,
    **unknown: Any,
) -> Mesh:
    """Lay the ranks of the job out as a mesh. Called by every rank, with the same arguments, by name.

    pp, dp_replicate, dp_shard, cp, tp   sizes whose product is the number of ranks; one of them may be -1: the rest
    ep, etp                              ranks that share the experts, and ranks that share each expert; their product
                                         must divide dp_shard * cp * tp
    tp_grid                              the tp ranks as a grid: a `GridSpec`, or its sizes (x, y, z), x * y * z == tp
    device                               "cpu" or "cuda"; by default "cuda" where there is one
    timeout                              seconds that a collective has, of everything that is made from this mesh: from
                                         its launch until the last rank has come. After a minute a warning names the
                                         ranks that are late
    rendezvous_timeout                   seconds for all ranks to come here and to be connected

    Under torchrun the default process group is initialised if it is not yet (gloo for CPU tensors, NCCL for CUDA
    ones, on device LOCAL_RANK). In one process without a launcher every size must be 1 (or -1); the group is then an
    in-process one. Where a collective of the default group has failed, on any rank, the mesh gets groups of its own.

    Raises ValueError and TypeError for sizes that do not fit; RendezvousTimeoutError naming the ranks that have not
    come in time, RendezvousError where ranks called this with different arguments (both on all ranks) or another job
    answers at MASTER_PORT; RuntimeError without a launcher for more than one rank, and where there is no such device.
    """
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    _check_names(arguments, unknown)
    _check_sizes(sizes, ep, etp)
    for name, seconds in (("timeout", timeout), ("rendezvous_timeout", rendezvous_timeout)):
        if check_seconds(seconds, name) == MAX_SECONDS:
            raise ValueError(f"{name} must be positive (seconds) and finite, got {seconds!r:.40}")
    device_type = _device_type(device)
    sizes = _fill_in(sizes, _world_size(sizes))
    grid = _checked_grid(tp_grid, sizes["tp"])
    inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    if inner % (ep * etp):
        raise ValueError(
            f"ep * etp ({ep} * {etp}) must divide dp_shard * cp * tp "
            f"({sizes['dp_shard']} * {sizes['cp']} * {sizes['tp']} = {inner})"
        )
    forget_meshes()
    release_unused()
    wanted = {**sizes, "ep": ep, "etp": etp, "device": device_type, "timeout": timeout}
    if grid is not None:
        wanted["tp_grid"] = repr(grid)
    owned = not dist.is_initialized()
    maker = _init_process_group(device_type, wanted, rendezvous_timeout) if owned else _meet(wanted, rendezvous_timeout)
    return Mesh(sizes, ep, device_type, etp=etp, grid=grid, owns_default_group=owned, maker=maker, timeout=timeout)


class GroupMaker:
    """Makes the groups of one mesh, while all ranks are here. `avoids_default`: no group is the default one."""

    def __init__(self, clock: Clock, session: Session | None = None, *, avoids_default: bool = False) -> None:
        self._clock, self._session, self._avoids_default = clock, session, avoids_default
        self._alone: ProcessGroup | None = None

    def finish(self) -> None:
        """Return when all ranks have connected: one that closes its mesh at once would break the others' connecting."""
        if self._session is not None:
            self._session.confirm("", "groups")

    def device_mesh(
        self, device_type: str, shape: Sequence[int], names: tuple[str, ...], known: dict[str, ProcessGroup]
    ) -> DeviceMesh:
        """torch's DeviceMesh over all ranks, in their order; `known` are groups by dim that there are already."""
        ranks = torch.arange(math.prod(shape), device="cpu").view(*shape)
        groups = [known[name] if name in known else self._group_of(ranks, dim) for dim, name in enumerate(names)]
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)

    def _group_of(self, ranks: torch.Tensor, dim: int) -> ProcessGroup:
        """This rank's group along the dim. Every rank makes all of them, in the same order."""
        size = ranks.size(dim)
        if size == ranks.numel() and not self._avoids_default:
            world: ProcessGroup = dist.distributed_c10d._get_default_group()
            return world
        if size == 1:
            if self._alone is None:
                self._alone = one_rank_group()
            return self._alone
        mine: ProcessGroup | None = None
        for members in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            made = dist.new_group(members, timeout=timedelta(seconds=max(self._clock.left, 1.0)))
            if dist.get_rank() in members:
                mine = made
        assert mine is not None
        return mine


class Mesh:
    """Named groups of ranks; made by `init_mesh`. Names are those of the module docstring.

    Close it when it is no longer used. One that is dropped gives its groups back when nothing uses them any more
    (`fastpar.mesh.lifetime`); the default group stays, because what else uses that cannot be known.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        ep: int,
        device_type: str,
        *,
        etp: int = 1,
        grid: GridSpec | None = None,
        owns_default_group: bool,
        maker: GroupMaker,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.device_type = device_type
        self.timeout = timeout
        self._owns_default_group = owns_default_group
        inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        self._sizes = {**sizes, "efsdp": inner // (ep * etp), "ep": ep, "etp": etp}
        self._sizes |= {name: math.prod(self._sizes[dim] for dim in dims) for name, dims in _FLATTENED.items()}
        self._is_closed = False
        self._ranks: dict[str, int] = {}
        self._slices: dict[tuple[bool, tuple[str, ...]], DeviceMesh] = {}
        self._finalizers: list[Any] = []
        self._made: list[list[ProcessGroup]] = []  # by view: its finaliser's, which empties them
        self._dense = self._view(maker, DENSE_DIMS)
        self._expert = self._view(maker, EXPERT_DIMS) if ep * etp > 1 else None
        self.tp_grid = grid  # how the tp ranks share each matrix; None: by one dim of it
        self._grid: DeviceMesh | None = None
        if grid is not None:
            self._sizes |= dict(zip(TENSOR_GRID_DIMS, grid.sizes, strict=True))
            self._grid = self._view(maker, GRID_DIMS, {dim: self._dense.get_group(dim) for dim in DENSE_DIMS[:-1]})
        maker.finish()

    def __deepcopy__(self, memo: Any) -> Mesh:
        """Itself: a copied module goes over the same groups."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Mesh is not pickled, as its groups connect this process: give workers, and datasets that are sent to "
            'them, the numbers that they need, such as mesh.rank("dp") and mesh.size("dp")'
        )

    def _view(
        self, maker: GroupMaker, dims: tuple[str, ...], known: dict[str, ProcessGroup] | None = None
    ) -> DeviceMesh:
        before = known_groups()
        view = maker.device_mesh(self.device_type, [self._sizes[dim] for dim in dims], dims, known or {})
        for name, members in _FLATTENED.items():
            if not known and set(members) <= set(dims) and self._dim(name) == name:
                set_timeout(view[self._larger(name)]._flatten(name).get_group(), self.timeout)
        for dim in dims:
            set_timeout(view.get_group(dim), self.timeout)
        made = [
            group
            for group in known_groups()
            if isinstance(group, OneRankGroup) or all(group is not other for other in before)
        ]  # that of one rank is shared with other meshes
        for group in made:
            if isinstance(group, OneRankGroup):
                continue
            with contextlib.suppress(AttributeError):  # torch's own, and private: what its collectives wait at most
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout), group)
        self._finalizers.append(release_with(view, made))
        self._made.append(made)
        return view

    def _larger(self, name: str) -> tuple[str, ...]:
        """The dims of more than one rank that a derived dim is made of."""
        return tuple(dim for dim in _FLATTENED[name] if self._sizes[dim] > 1)

    def _dim(self, name: str) -> str:
        """The dim of a view that has this name's ranks: of a derived one the only larger dim, or the first derived
        dim of the same larger ones."""
        if name not in _FLATTENED:
            return name
        larger = self._larger(name)
        if len(larger) < 2:
            return larger[0] if larger else _FLATTENED[name][-1]
        return next(other for other in _FLATTENED if self._larger(other) == larger)

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self._sizes[dim] for dim in DENSE_DIMS)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The dense view as torch's own five-dim DeviceMesh."""
        self._check_open()
        return self._dense

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's position along each dim of the dense view."""
        return {dim: self.rank(dim) for dim in DENSE_DIMS}

    @checked(computed=False)
    def size(self, name: str) -> int:
        """Ranks along the dim. Raises ValueError for an unknown name."""
        return self._sizes[_known(name)]

    @checked(computed=False)
    def rank(self, name: str) -> int:
        """This rank's index along the dim, 0..size-1. Raises ValueError for an unknown name."""
        name = _known(name)
        if self._sizes[name] == 1:
            return 0
        if name not in self._ranks:
            self._ranks[name] = int(self[name].get_local_rank())
        return self._ranks[name]

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self!r} was closed: its groups are gone; make a new one with init_mesh")

    @checked(computed=False)
    def group(self, name: str) -> ProcessGroup | None:
        """The process group of this rank along the dim; None where it is the only rank. Raises ValueError for an
        unknown name, RuntimeError after `close`.
        """
        name = _known(name)
        self._check_open()
        return None if self._sizes[name] == 1 else self[name].get_group()

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """torch's DeviceMesh of one dim, or of several dims of one view in its order: mesh["tp"],
        mesh["dp_replicate", "dp_shard"]. Derived dims go with others of their view: mesh["fsdp", "tp"].

        The expert view exists where ep or etp is more than 1.
        Raises ValueError for an unknown name, and for names of different views.
        """
        self._check_open()
        given = (names,) if isinstance(names, str) else names
        wanted = tuple(self._dim(_known(name)) for name in given)
        if any(name in TENSOR_GRID_DIMS for name in given):
            return self._of_grid(names, wanted)
        if not any(name in (*EXPERT_DIMS[2:], "edp") for name in given):
            return self._slice(self._dense, wanted)
        if self._expert is None:
            raise ValueError(
                f"mesh[{names!r}]: there is no expert view because ep and etp are 1; use the dims {DENSE_DIMS}"
            )
        if all(name in (*EXPERT_DIMS, "edp") for name in wanted):
            return self._slice(self._expert, wanted)
        derived = ", ".join(name for name in _FLATTENED if name != "edp")
        raise ValueError(
            f"mesh[{names!r}]: take all names from {DENSE_DIMS} and {derived}, or from {EXPERT_DIMS} and edp"
        )

    def _of_grid(self, names: str | tuple[str, ...], wanted: tuple[str, ...]) -> DeviceMesh:
        if self._grid is None:
            raise ValueError(f"mesh[{names!r}]: there is no tensor-parallel grid; make the mesh with tp_grid=(x, y, z)")
        if any(name not in GRID_DIMS for name in wanted):
            raise ValueError(f"mesh[{names!r}]: take all names from {GRID_DIMS}")
        return self._grid[wanted if len(wanted) > 1 else wanted[0]]

    def _slice(self, view: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
        key = (view is self._expert, names)
        if key not in self._slices:  # torch takes milliseconds, and every parameter asks
            self._slices[key] = self._new_slice(view, names)
        return self._slices[key]

    def _new_slice(self, view: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
        if not any(name in _FLATTENED for name in names):
            return view[names if len(names) > 1 else names[0]]
        dims = view.mesh_dim_names or ()
        members = [self._larger(name) if name in _FLATTENED else (name,) for name in names]
        places = [dims.index(dim) for each in members for dim in each]
        if places != sorted(set(places)):
            raise ValueError(f"mesh[{names!r}]: dims must be different ones, in the order of {dims}")
        # Flattened in `_view`, and looked up here; torch has no slices of these beside other dims.
        parts = [
            view[each]._flatten(name) if name in _FLATTENED else view[name]
            for name, each in zip(names, members, strict=True)
        ]
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

    def close(self) -> None:
        """Destroy the process groups that `init_mesh` made, the default group only if it was made there too. The mesh
        is then unusable, and DTensor forgets what it remembers of meshes: it would take a new one of the same shape for
        this, and would keep the groups alive. A second call does nothing.
        """
        forget_meshes()
        self._is_closed = True
        self._slices.clear()
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers.clear()
        for view in (self._dense, self._expert, self._grid):
            getattr(view, "_pg_registry", {}).clear()
        made = [group for groups in self._made for group in groups if not isinstance(group, OneRankGroup)]
        self._made.clear()
        owns_default_group, self._owns_default_group = self._owns_default_group, False
        if not dist.is_initialized():
            return
        if owns_default_group:
            dist.destroy_process_group()
            return
        for group in made:
            if any(group is other for other in known_groups()):  # not destroyed by somebody else
                dist.destroy_process_group(group)
        leave([group for group in known_groups() if isinstance(group, OneRankGroup)])
        release_unused()

    def __repr__(self) -> str:
        dims = [f"{dim}={self._sizes[dim]}" for dim in DENSE_DIMS if self._sizes[dim] > 1]
        if self._expert is not None:
            dims += [
                f"{dim}={self._sizes[dim]}" for dim in ("efsdp", "ep", "etp") if dim != "etp" or self._sizes[dim] > 1
            ]
        return f"Mesh({', '.join([*dims, f'world_size={self.world_size}', f'device_type={self.device_type!r}'])})"


def named_groups(mesh: Mesh | DeviceMesh) -> list[tuple[str, ProcessGroup]]:
    """The dims of more than one rank (of a Mesh: of its dense view), each with its group that this rank is in.

    Together the groups join all ranks of the mesh. A DeviceMesh without names has its dims' numbers.
    """
    if isinstance(mesh, Mesh):
        found = [(dim, mesh.group(dim)) for dim in DENSE_DIMS]
        return [(dim, group) for dim, group in found if group is not None]
    names = mesh.mesh_dim_names or [str(dim) for dim in range(mesh.ndim)]
    return [(name, mesh.get_group(dim)) for dim, name in enumerate(names) if mesh.size(dim) > 1]


def _known(name: str) -> str:
    if name in _NAMES:
        return name
    near = difflib.get_close_matches(str(name), _NAMES, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"unknown mesh dim {name!r}: {hint}The dims are {', '.join(_NAMES)}")


def _check_names(arguments: tuple[Any, ...], unknown: dict[str, Any]) -> None:
    if arguments:
        raise TypeError(
            f"init_mesh takes sizes by name, got {', '.join(map(repr, arguments))}: write which dim it is, as in "
            f"init_mesh(dp_shard=2, tp=2); the dims are {', '.join(DENSE_DIMS)}, and ep and etp"
        )
    for name in unknown:
        words = _DERIVED.get(name)
        if words is None:
            near = difflib.get_close_matches(name, [*DENSE_DIMS, "ep", "etp", "device", "timeout"], n=2)
            words = f"did you mean {' or '.join(near)}?" if near else f"the dims are {', '.join(DENSE_DIMS)}, ep, etp"
        raise TypeError(f"init_mesh has no argument {name!r}: {words}")


def _check_sizes(sizes: dict[str, int], ep: int, etp: int) -> None:
    for name, size in {**sizes, "ep": ep, "etp": etp}.items():
        may_be_rest = name in sizes
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {size!r} ({type(size).__name__})")
        if size < 1 and not (size == -1 and may_be_rest):
            raise ValueError(f"{name} must be at least 1{' (or -1: the rest)' if may_be_rest else ''}, got {size}")
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"at most one size may be -1, got {' and '.join(rest)}")


def _checked_grid(grid: Any, tp: int) -> GridSpec | None:
    if grid is None:
        return None
    if isinstance(grid, (tuple, list)) and len(grid) == 3:
        grid = GridSpec(*grid)
    if not isinstance(grid, GridSpec):
        raise TypeError(f"tp_grid must be a GridSpec or sizes (x, y, z), got {grid!r:.60} ({type(grid).__name__})")
    grid.check_ranks(tp)
    return grid


def _world_size(sizes: dict[str, int]) -> int:
    """The number of ranks: of the process group, else of the launcher, else one."""
    if dist.is_initialized():
        return dist.get_world_size()
    launched = launched_world()
    if launched is not None:
        return launched[1]
    wanted = math.prod(size for size in sizes.values() if size != -1)
    if wanted > 1:
        raise RuntimeError(
            f"this mesh needs {wanted} ranks, but no launcher started this process (no RANK, WORLD_SIZE) and "
            f"torch.distributed is not initialised: run it with `torchrun --nproc-per-node {wanted} script.py`"
        )
    return 1


def _fill_in(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    known = math.prod(size for size in sizes.values() if size != -1)
    text = " * ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, -1)) or "1"
    rest = next((name for name, size in sizes.items() if size == -1), None)
    if rest is not None:
        if world_size % known:
            raise ValueError(
                f"{rest}=-1: {world_size} ranks are not divisible by the other sizes ({text}, product {known})"
            )
        return {**sizes, rest: world_size // known}
    if known != world_size:
        raise ValueError(
            f"the sizes must multiply to the number of ranks ({world_size}), got {text} (product {known}); "
            "one of them may be -1: the rest"
        )
    return sizes


def _device_type(device: str | torch.device | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f'device must be "cpu" or "cuda", got {device!r} ({type(device).__name__})')
    try:
        device_type = torch.device(device).type
    except RuntimeError:
        device_type = ""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", got {device!r}')
    if device_type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError('device="cuda", but torch sees no CUDA device: use device="cpu"')
    return device_type


def _init_process_group(device_type: str, wanted: dict[str, Any], rendezvous_timeout: float) -> GroupMaker:
    """The default group, of all ranks of the launcher's job."""
    backend = "gloo"
    if device_type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            raise RuntimeError(
                f"LOCAL_RANK is {local_rank}, but this host has {count} CUDA devices: use fewer ranks or device='cpu'"
            )
        torch.cuda.set_device(local_rank)
    clock = Clock(rendezvous_timeout)
    launched = launched_world()
    if launched is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return GroupMaker(clock)
    rank, size = launched
    session = Session(open_store(rank, clock), rank, size, clock)
    session.meet(wanted, {})
    problem = ""
    try:
        seconds = timedelta(seconds=max(clock.left, 1.0))  # for connecting; collectives get their own below
        dist.init_process_group(
            backend, store=dist.PrefixStore("torch", session.store), rank=rank, world_size=size, timeout=seconds
        )
        with contextlib.suppress(AttributeError):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=wanted["timeout"]))
    except RuntimeError as error:
        problem = str(error) or type(error).__name__
    try:
        session.confirm(problem)
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    return GroupMaker(clock, session)


def _meet(wanted: dict[str, Any], rendezvous_timeout: float) -> GroupMaker:
    """All ranks of the default group that there is already."""
    clock, rank, size = Clock(rendezvous_timeout), dist.get_rank(), dist.get_world_size()
    session: Session | None = None
    failed = has_failed(dist.group.WORLD)
    if size > 1:
        store = dist.PrefixStore("fastpar/mesh", dist.distributed_c10d._get_default_store())
        session = Session(store, rank, size, clock)
        session.meet(wanted, {"failed": failed})
        failed = any(said["failed"] for said in session.known)
    return GroupMaker(clock, session, avoids_default=failed and size > 1)
