"""`x.data = value` of split parameters, and of gradients and averages that are split like them.

Of a DTensor torch gives the wrapper the memory of `value`, and x goes on with its local part: averaged weights that are
put in and taken out again, the step back of sharpness-aware minimisation or the merge of an adapter would be lost
without a word. Here the local part gets that memory, as a whole tensor does. Reading `x.data` is torch's.

What ZeRO's stage 3 has at rest, and what its optimizers have, keeps its memory (`keep_memory`), which other ranks read
where it is: there an assignment is torch's, and `DataOfDTensors` raises. Copies of it, as averages are, take data.
Values that are to be loaded are looked at before by `check_own_part`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

_TORCHS: Any = Tensor.data
_KEEPS = "_fastpar_keeps_memory"  # the id of the tensor that was told to: a copy has it too, and another id


@functools.cache
def take_data(is_watched: Callable[[DTensor], bool]) -> None:
    """Let DTensors take data: parameters with a layout of fastpar's, and what else `is_watched`."""
    DTensor.data = _Data(is_watched)  # type: ignore[assignment]


def keep_memory(x: DTensor) -> None:
    """From now on `x.data = value` is torch's."""
    vars(x)[_KEEPS] = id(x)


def set_wrapper(x: DTensor, value: DTensor) -> None:
    """`x.data = value` as torch has it: memory of the wrapper, while the local part stays."""
    _TORCHS.__set__(x, value)


class _Data:
    """The descriptor of `data`."""

    def __init__(self, is_watched: Callable[[DTensor], bool]):
        self.is_watched = is_watched

    def __get__(self, x: Any, owner: Any = None) -> Any:
        return self if x is None else _TORCHS.__get__(x, owner)

    def __set__(self, x: Any, value: Any) -> None:
        layout = getattr(x, "fastpar_layout", None)
        is_ours = layout is not None or (vars(x).get(_KEEPS) != id(x) and self.is_watched(x))
        if not is_ours or not isinstance(value, Tensor) or torch.compiler.is_compiling():
            _TORCHS.__set__(x, value)
            return
        for name, theirs, its in (
            ("shape", tuple(value.shape), tuple(x.shape)),
            ("dtype", value.dtype, x.dtype),
            ("device", value.device, x.device),
        ):
            if theirs != its and not isinstance(x, nn.Parameter):
                _TORCHS.__set__(x, value)  # `model.double()` does so to gradients under ZeRO, which takes them up
                return
            if theirs != its:
                raise TypeError(
                    f"data of {name} {theirs} cannot be set to a DTensor of {name} {its}: convert the model as a whole "
                    "(model.to), or parallelize one that has been converted"
                )
        with torch.no_grad():
            x._local_tensor.data = _part(x, value.detach(), layout)


def _part(x: DTensor, value: Tensor, layout: Any) -> Tensor:
    """What x has of a value on this rank: the value's own memory, where that is no more than this part."""
    if isinstance(value, DTensor):
        if value._spec.mesh == x._spec.mesh and value._spec.placements == x._spec.placements:
            return value._local_tensor
        return value.redistribute(x.device_mesh, x.placements)._local_tensor.contiguous()
    if layout is None:
        raise TypeError(
            f"data of shape {tuple(value.shape)} set to a DTensor that is not tensor-parallel must be one, too: "
            "distribute_tensor(value, x.device_mesh, x.placements)"
        )
    part: Tensor = layout.local(value)
    return part.contiguous() if part is value else own_memory(part)


def own_memory(x: Tensor) -> Tensor:
    """x contiguous, copied where it is part of a larger storage: that would be kept, and saved, as a whole, and
    `copy.deepcopy` of a DTensor with an offset in its storage fails."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)


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
