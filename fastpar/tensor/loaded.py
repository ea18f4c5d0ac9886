"""Values that are about to be loaded."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def check_own_part(name: str, value: Any) -> None:
    """ValueError for a part of a split tensor that another rank has saved as an object: of such a DTensor torch takes
    what lies in the file for this rank's part, whoever reads it."""
    if not isinstance(value, DTensor) or all(isinstance(x, Replicate) for x in value.placements):
        return
    rank = dist.get_rank() if dist.is_initialized() else -1
    place = (value.device_mesh.mesh == rank).nonzero().flatten().tolist()
    saved = value.device_mesh.get_coordinate()  # of the rank that has made the mesh, which is saved with it
    if saved is not None and list(saved) != place:
        raise ValueError(
            f"{name} is the part that another rank has saved of a split tensor (at {list(saved)} of the mesh, and this "
            f"rank is at {place}): one rank's torch.save has its own part of everything. Let every rank save to a file "
            "of its own and load that one, or all together by torch.distributed.checkpoint.save and load; or save "
            "whole tensors, of get_state_dict with StateDictOptions(full_state_dict=True)"
        )
