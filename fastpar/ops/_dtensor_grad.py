"""A shard's gradient as the gradient of its DTensor, at what autograd takes for a plain tensor.

Note: the fresh gradient
    Autograd detaches a gradient before it stores it in `.grad`. torch detaches a DTensor by its rules for placements,
    which takes longer than a small GEMM, for each parameter in every backward. A `_FreshGrad` is a DTensor that answers
    this one operation itself, with a DTensor on the same shard. By any other operation, or a pickle, it becomes a
    DTensor in place first: hooks, and who asks by `torch.autograd.grad`, have one that is good for everything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

_new: Any = DTensor.__new__  # its __init__ does nothing, behind a guard against Dynamo that takes a microsecond
_detach = torch.ops.aten.detach.default


class _FreshGrad(DTensor):
    __slots__ = ()  # the memory of a DTensor, so that an object may become one

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _detach:
            grad: Any = args[0]
            return _new(DTensor, grad._local_tensor, grad._spec, requires_grad=False)
        args, kwargs = tree_map_only(_FreshGrad, _settle, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _settle(self).__reduce_ex__(protocol)


def _settle(grad: Any) -> Any:
    grad.__class__ = DTensor
    return grad


def dtensor_grad(grad: Tensor, spec: Any) -> Any:
    """The gradient of a DTensor with this spec from that of its local tensor; without a history."""
    return _new(_FreshGrad, grad, spec, requires_grad=False)
