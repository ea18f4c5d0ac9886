"""Properties of process groups: the group that a `group=` means, its store, its ranks, the devices of its backends."""

from __future__ import annotations

import itertools
import threading
import weakref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# Weak keys: a group that goes takes its count along.
_MEETINGS: weakref.WeakKeyDictionary[ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def resolve_group(group: object, name: str = "group") -> ProcessGroup | None:
    """The ProcessGroup behind a ProcessGroup or a 1-D DeviceMesh; None for None.

    Raises ValueError for a mesh of several dims and for a group that this rank is not in, TypeError for anything
    else, RuntimeError where torch.distributed is not initialised.
    """
    if group is None:
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            example = f'mesh["{names[-1]}"]' if names else "a 1-D mesh"
            raise ValueError(
                f"{name} must be a 1-D DeviceMesh, got dims {names or group.ndim}: pass one of them, as {example}"
            )
        _check_initialised()
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this rank is not a member of the group (torch.distributed.new_group gave it NON_GROUP_MEMBER)"
        )
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{name} must be a ProcessGroup, a 1-D DeviceMesh, a Communicator or None, got {type(group).__name__}"
        )
    _check_initialised()
    if group.rank() < 0:
        raise ValueError("this rank is not a member of the group")
    return group


def _check_initialised() -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "a group was given but torch.distributed is not initialised: call fastpar.init_mesh(...) or "
            "torch.distributed.init_process_group() first, or pass group=None for one rank"
        )


def store_of(group: ProcessGroup) -> dist.Store | None:
    """The store that belongs to this group alone."""
    get = getattr(group, "get_group_store", None)
    if get is not None:
        try:
            return get()
        except RuntimeError:
            return None
    return None


def ranks_of(group: ProcessGroup) -> list[int]:
    """The global ranks of a group that torch knows; else its own."""
    known = dist.distributed_c10d._world.pg_group_ranks.get(group)
    return list(range(group.size())) if known is None else list(known)


def name_meeting(group: ProcessGroup) -> str:
    """A name for a meeting in the group's store that no earlier one has: the same on all ranks, which call this in the
    same order."""
    with _LOCK:
        return f"fastpar/meeting{next(_MEETINGS.setdefault(group, itertools.count()))}"


def carrying_device(group: ProcessGroup) -> torch.device:
    """The device of tensors that the group can send: the CPU if it can send those, else the current device."""
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    module = torch.get_device_module(kinds[0])
    return torch.device(kinds[0], module.current_device())


def has_gloo(group: ProcessGroup) -> bool:
    """True where gloo moves the group's CPU tensors; any other backend of a user's own is left alone."""
    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except RuntimeError:
        return False
