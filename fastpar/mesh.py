"""The ranks of a job as a grid with named dims, over torch's DeviceMesh.

    mesh = init_mesh(dp_shard=2, tp=2)          # under torchrun --nproc-per-node 4
    mesh.group("tp"), mesh.size("tp"), mesh.rank("tp"), mesh["tp"]

Two views of the same ranks, slowest dim first:

    dense   ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    expert  ("pp", "dp_replicate", "efsdp", "ep", "etp")     efsdp * ep * etp == dp_shard * cp * tp

so the ranks of an expert group are neighbours: first those of one tp group, then of cp, then of dp_shard. etp splits
every expert, ep the set of them, and efsdp holds copies: how experts are laid out does not follow from tp. Derived
names: "dp" is dp_replicate x dp_shard flattened; "fsdp" is dp_shard; "edp" is dp_replicate x efsdp flattened: the
ranks with the same part of the experts.

Decided: every group is made here, when all ranks are known to be present. Making a group is itself a collective of
the whole job; made on first use, it would hang whenever only some ranks use it. The expert view costs nothing while
ep == etp == 1 and dp is flattened only where both of its dims are larger than 1.
"""

from __future__ import annotations

import difflib
import math
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DENSE_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_DIMS = ("pp", "dp_replicate", "efsdp", "ep", "etp")
_SYNONYMS = {"fsdp": "dp_shard"}
_NAMES = (*DENSE_DIMS, "efsdp", "ep", "etp", "dp", "fsdp", "edp")


def init_mesh(
    *,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    device: str | torch.device | None = None,
) -> Mesh:
    """Lay the ranks of the job out as a mesh. Called by every rank, with the same sizes.

    pp, dp_replicate, dp_shard, cp, tp   sizes whose product is the number of ranks; one of them may be -1: the rest
    ep, etp                              ranks that share the experts, and ranks that share each expert; their product
                                         must divide dp_shard * cp * tp
    device                               "cpu" or "cuda"; by default "cuda" where there is one

    Under torchrun the default process group is initialised if it is not yet (gloo for CPU tensors, NCCL for CUDA
    ones, on device LOCAL_RANK). In one process without a launcher every size must be 1 (or -1); the group is then an
    in-process one.

    Raises ValueError for sizes that do not fit; RuntimeError without a launcher for more than one rank, and where
    there is no such device.
    """
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    _check_sizes(sizes, ep, etp)
    device_type = _device_type(device)
    sizes = _fill_in(sizes, _world_size(sizes))
    inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    if inner % (ep * etp):
        raise ValueError(
            f"ep * etp ({ep} * {etp}) must divide dp_shard * cp * tp "
            f"({sizes['dp_shard']} * {sizes['cp']} * {sizes['tp']} = {inner})"
        )
    owned = not dist.is_initialized()
    if owned:
        _init_process_group(device_type)
    return Mesh(sizes, ep, device_type, etp=etp, owns_default_group=owned)


class Mesh:
    """Named groups of ranks; made by `init_mesh`. Names are those of the module docstring."""

    def __init__(
        self, sizes: dict[str, int], ep: int, device_type: str, *, etp: int = 1, owns_default_group: bool
    ) -> None:
        self.device_type = device_type
        self._owns_default_group = owns_default_group
        inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        dp = sizes["dp_replicate"] * sizes["dp_shard"]
        efsdp = inner // (ep * etp)
        edp = sizes["dp_replicate"] * efsdp
        self._sizes = {**sizes, "efsdp": efsdp, "ep": ep, "etp": etp, "dp": dp, "edp": edp}
        before = set(_known_groups())
        self._dense: DeviceMesh = init_device_mesh(
            device_type, tuple(sizes[dim] for dim in DENSE_DIMS), mesh_dim_names=DENSE_DIMS
        )
        self._expert: DeviceMesh | None = None
        if ep * etp > 1:
            shape = tuple(self._sizes[dim] for dim in EXPERT_DIMS)
            self._expert = init_device_mesh(device_type, shape, mesh_dim_names=EXPERT_DIMS)
        if sizes["dp_replicate"] > 1 and sizes["dp_shard"] > 1:
            self._dense["dp_replicate", "dp_shard"]._flatten("dp")
        if self._expert is not None and sizes["dp_replicate"] > 1 and efsdp > 1:
            self._expert["dp_replicate", "efsdp"]._flatten("edp")
        self._made = [group for group in _known_groups() if group not in before]

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self._sizes[dim] for dim in DENSE_DIMS)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The dense view as torch's own five-dim DeviceMesh."""
        return self._dense

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's position along each dim of the dense view."""
        return {dim: self.rank(dim) for dim in DENSE_DIMS}

    def size(self, name: str) -> int:
        """Ranks along the dim. Raises ValueError for an unknown name."""
        return self._sizes[_resolve(name)]

    def rank(self, name: str) -> int:
        """This rank's index along the dim, 0..size-1. Raises ValueError for an unknown name."""
        name = _resolve(name)
        return 0 if self._sizes[name] == 1 else int(self[name].get_local_rank())

    def group(self, name: str) -> ProcessGroup | None:
        """The process group of this rank along the dim; None where it is the only rank. Raises ValueError for an
        unknown name.
        """
        name = _resolve(name)
        return None if self._sizes[name] == 1 else self[name].get_group()

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """torch's DeviceMesh of one dim, or of several dims of one view in its order: mesh["tp"],
        mesh["dp_replicate", "dp_shard"].

        The expert view exists where ep or etp is more than 1.
        Raises ValueError for an unknown name, and for names of different views.
        """
        wanted = tuple(_resolve(name) for name in ((names,) if isinstance(names, str) else names))
        if wanted == ("dp",):
            return self._flattened(self._dense, "dp", "dp_shard")
        if all(name in DENSE_DIMS for name in wanted):
            return self._dense[wanted if len(wanted) > 1 else wanted[0]]
        if self._expert is None:
            raise ValueError(
                f"mesh[{names!r}]: there is no expert view because ep and etp are 1; use the dims {DENSE_DIMS}"
            )
        if wanted == ("edp",):
            return self._flattened(self._expert, "edp", "efsdp")
        if all(name in EXPERT_DIMS for name in wanted):
            return self._expert[wanted if len(wanted) > 1 else wanted[0]]
        raise ValueError(f"mesh[{names!r}]: take all names from {DENSE_DIMS} or all from {EXPERT_DIMS} (dp, edp alone)")

    def _flattened(self, view: DeviceMesh, name: str, inner: str) -> DeviceMesh:
        """dp_replicate x inner, as the view's dim `name`."""
        if self._sizes["dp_replicate"] == 1:
            return view[inner]
        if self._sizes[inner] == 1:
            return view["dp_replicate"]
        return view["dp_replicate", inner]._flatten(name)  # made in __init__; this looks it up

    def close(self) -> None:
        """Destroy the process groups that `init_mesh` made, the default group only if it was made there too. The mesh
        is then unusable, and DTensor forgets what it remembers of meshes: it would take a new one of the same shape for
        this, and would keep the groups alive.
        """
        _forget_meshes()
        if not dist.is_initialized():
            return
        if self._owns_default_group:
            dist.destroy_process_group()
        else:
            for group in self._made:
                dist.destroy_process_group(group)
        self._made.clear()

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


def _forget_meshes() -> None:
    """Empty DTensor's caches of what operations do to layouts: their keys hold meshes, and these their groups."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()
    for owner, name in (
        (_redistribute, "_gen_transform_infos"),
        (_collective_utils.MeshTopoInfo, "build_from_mesh"),
    ):
        if hasattr(owner, name):  # torch's own matter: other versions may have others
            getattr(owner, name).cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()


def _known_groups() -> list[ProcessGroup]:
    """Every process group that this rank is in."""
    return list(dist.distributed_c10d._world.pg_map)


def _resolve(name: str) -> str:
    if name in _NAMES:
        return _SYNONYMS.get(name, name)
    near = difflib.get_close_matches(str(name), _NAMES, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"unknown mesh dim {name!r}: {hint}The dims are {', '.join(_NAMES)}")


def _check_sizes(sizes: dict[str, int], ep: int, etp: int) -> None:
    for name, size in {**sizes, "ep": ep, "etp": etp}.items():
        may_be_rest = name in sizes
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {size!r}")
        if size < 1 and not (size == -1 and may_be_rest):
            raise ValueError(f"{name} must be at least 1{' (or -1: the rest)' if may_be_rest else ''}, got {size}")
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"at most one size may be -1, got {' and '.join(rest)}")


def _world_size(sizes: dict[str, int]) -> int:
    """The number of ranks: of the process group, else of the launcher, else one."""
    if dist.is_initialized():
        return dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
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
    device_type = torch.device(device).type
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", got {device!r}')
    if device_type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError('device="cuda", but torch sees no CUDA device: use device="cpu"')
    return device_type


def _init_process_group(device_type: str) -> None:
    backend = "gloo"
    if device_type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            raise RuntimeError(
                f"LOCAL_RANK is {local_rank}, but this host has {count} CUDA devices: use fewer ranks or device='cpu'"
            )
        torch.cuda.set_device(local_rank)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
