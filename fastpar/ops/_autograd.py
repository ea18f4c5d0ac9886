"""What the autograd functions of the ops share.

Note: the fresh gradient
    Autograd detaches a gradient before it stores it in `.grad`. torch detaches a DTensor by its rules for placements,
    which takes longer than a small GEMM, for each parameter in every backward. A `_FreshGrad` is a DTensor that answers
    this one operation itself, with a DTensor on the same shard. By any other operation, or a pickle, it becomes a
    DTensor in place first: hooks, and who asks by `torch.autograd.grad`, have one that is good for everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

_SCALE_BLOCK = 1 << 26  # elements; 256 MiB of float32


def in_backward() -> bool:
    """Whether this thread is in backward, where a checkpoint runs layers again."""
    return torch._C._current_graph_task_id() != -1


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a call with these inputs has to leave something for backward."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def apply_plain(function: Any, *args: Any) -> Any:
    """`function.apply(*args)` without the search of all arguments for dead wrappers of torch.func, 2 us a call.

    For calls whose tensors were looked at: `checked` and the layers refuse such wrappers.
    """
    # Dynamo knows an autograd.Function by its `apply`; within a transform of torch.func it says what is missing.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def first_derivative_only(grad: Tensor, op: str, alternative: str, *inputs: Tensor | None) -> Tensor:
    """`grad` as it is, except that its own derivative by any of `inputs` is an error naming `alternative`.

    Call it in the backward of an autograd.Function whose kernel has no derivative, on every gradient that it returns.
    Only backward with create_graph=True makes a graph; in all other cases this costs nothing.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grad
    return cast(Tensor, _FirstDerivative.apply(grad, op, alternative, *inputs))


def first_derivatives_only(
    grads: Iterable[Tensor | None], op: str, alternative: str, *inputs: Tensor | None
) -> list[Tensor | None]:
    """The same for several gradients, of which some may be None."""
    return [None if grad is None else first_derivative_only(grad, op, alternative, *inputs) for grad in grads]


def scale_by_upstream_(grad: Tensor, upstream: Tensor) -> Tensor:
    """grad *= upstream, a scalar tensor, with one rounding and without a synchronisation; for free where it is 1.

    For gradients that a forward has computed for an upstream of 1.
    """
    if upstream.device.type == "cpu":
        value = upstream.item()
        return grad if value == 1.0 else grad.mul_(value)
    try:
        from fastpar.kernels.cross_entropy import scale_unless_one_
    except ImportError:  # triton is optional
        factor = upstream.to(torch.float64 if grad.dtype == torch.float64 else torch.float32).reshape(1)
        for block in grad.view(-1).split(_SCALE_BLOCK):
            block.copy_(block * factor)
    else:
        scale_unless_one_(grad, upstream)
    return grad


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """x as it is, and its gradient times a factor."""
    return x if factor == 1.0 else cast(Tensor, _ScaledGrad.apply(x, factor))


class _ScaledGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class _FirstDerivative(torch.autograd.Function):
    """Identity on the gradient that stands between it and what it depends on.

    once_differentiable would not do: it looks at the upstream gradient only, which may be a constant when backward
    starts at the output, and the second derivative by the inputs would be missing without a word.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, op: str, alternative: str, *inputs: Tensor | None) -> Tensor:
        ctx.op, ctx.alternative = op, alternative
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(f"{ctx.op} has a first derivative only; {ctx.alternative} has a second one")


_GRAD = cast("Any", Tensor).grad


def own_grad(parameter: Tensor) -> Tensor | None:
    """What autograd has put into a parameter: torch's own `.grad`, which a subclass (as ZeRO's) may show otherwise."""
    found: Tensor | None = _GRAD.__get__(parameter)
    return found


def set_own_grad(parameter: Tensor, grad: Tensor | None) -> None:
    """Set what `own_grad` gives."""
    _GRAD.__set__(parameter, grad)


# ---- gradients of DTensors -------------------------------------------------------------------------------------------

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
