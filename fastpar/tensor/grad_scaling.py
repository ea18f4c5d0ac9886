"""torch.amp.GradScaler over split gradients: all ranks skip a step that one of them has to skip.

torch lets ranks decide together by the first gradient of an optimizer alone, where that is split. One that is whole on
every rank comes first as a rule (an embedding, a norm): a rank whose part of another one overflowed then skipped the
step, and the others made it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fastpar.comm import Communicator

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@functools.cache
def skip_steps_together() -> None:
    """For all gradients of the process that are DTensors; once."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_UNSCALE] = _unscale


def _unscale(op: Any, args: tuple[list[Tensor], Tensor, Tensor], kwargs: dict[str, Any]) -> None:
    """Divide by the scale; what is not finite on a rank of these gradients' meshes is found on all. Collective."""
    grads, found, inverse = args
    op([x._local_tensor if isinstance(x, DTensor) else x for x in grads], found, inverse)
    meshes: dict[DeviceMesh, None] = dict.fromkeys(x.device_mesh for x in grads if isinstance(x, DTensor))
    for mesh in meshes:
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                found.copy_(Communicator(mesh.get_group(dim)).all_reduce(found, "max"))
