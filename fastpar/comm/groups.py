"""From what users pass as `group=` to a ProcessGroup of at least two ranks, or None."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


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
