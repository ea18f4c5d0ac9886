"""Vocab-parallel cross-entropy: softmax cross-entropy over logits whose vocabulary dim is split across ranks.

For row n with target y, over the whole vocabulary:

    lse_n  = log(sum_v exp(x_nv))
    loss_n = lse_n - x_ny                                   0 where y is ignore_index
    dx_nv  = (exp(x_nv - lse_n) - [v = y]) * dloss_n        0 in ignored rows

Three ops. `stats` reads this rank's logits once and leaves three numbers a row: maximum m, sum s of exp(x - m), and the
target's logit. All ranks' numbers travel in the one collective. `merge` combines them in rank order, so that every rank
has the same bits. `backward` needs no other rank: it reads the logits again, recomputes the exponentials, and writes
the gradient in the logits' dtype.

What is saved for backward: the logits themselves (no copy), the targets, and lse, 8 bytes a row. Megatron-LM instead
saves a float32 softmax, after three all-reduces; Liger does the same with one fewer read. Writing the gradient in the
forward pass saves a read when there is one rank, but fixes the gradient of the loss to a scalar and costs a
multiplication pass where it is not 1.

lse is float64: it is as large as the largest logit, and rounding it to float32 would put that rounding on every
probability (5e-4 at 1e4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.reference import cross_entropy as reference
from fastpar.reference.cross_entropy import Shard, compute_dtype

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike

_ext.load()
_CUDA_ARCHS = tuple(filter(None, _ext.build_info()["cuda_archs"].split(",")))


# ---- launchers -------------------------------------------------------------------------------------------------------


def _implementation(x: Tensor) -> Any:
    """The namespace that holds the three ops for this device: the library's, or the reference's where it has none."""
    if x.device.type == "cpu":
        return _kernels
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) == (9, 0) and "90a" in _CUDA_ARCHS:
        return _kernels
    return reference


class _kernels:
    """The compiled ops under the names that the reference gives them."""

    stats = torch.ops.fastpar.vocab_parallel_cross_entropy_stats
    merge = torch.ops.fastpar.vocab_parallel_cross_entropy_merge
    backward = torch.ops.fastpar.vocab_parallel_cross_entropy_backward
    backward_ = torch.ops.fastpar.vocab_parallel_cross_entropy_backward_


def _stats(logits: Tensor, target: Tensor, shard: Shard, ignore_index: int) -> Tensor:
    launch = _implementation(logits).stats
    if torch.compiler.is_compiling():
        return cast(Tensor, launch(logits, target, shard.start, shard.total, ignore_index))
    try:
        return cast(Tensor, launch(logits, target, shard.start, shard.total, ignore_index))
    except RuntimeError:
        # The kernel checks the targets on its way; only if it found one is it worth finding out which.
        reference.check_target_range(target, shard.total, ignore_index)
        raise


def _forward(
    logits: Tensor, target: Tensor, shard: Shard, comm: Communicator | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """(loss [N], lse [N] float64), with one collective if there is a communicator."""
    gathered = reference.exchange(_stats(logits, target, shard, ignore_index), shard, comm)
    loss, lse = _implementation(logits).merge(gathered, target.reshape(-1), ignore_index)
    return loss, lse


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_stats")
def _(logits: Tensor, target: Tensor, vocab_start: int, vocab_total: int, ignore_index: int) -> Tensor:
    return logits.new_empty((target.numel(), 3), dtype=compute_dtype(logits.dtype))


@torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_merge")
def _(gathered: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    rows = gathered.shape[1]
    return gathered.new_empty((rows,)), gathered.new_empty((rows,), dtype=torch.float64)


@torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_backward")
def _(logits: Tensor, lse: Tensor, target: Tensor, grad_loss: Tensor, vocab_start: int, ignore_index: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_backward_")
def _(logits: Tensor, lse: Tensor, target: Tensor, grad_loss: Tensor, vocab_start: int, ignore_index: int) -> None:
    return None


# ---- autograd --------------------------------------------------------------------------------------------------------


class _FirstDerivative(torch.autograd.Function):
    """Identity on the gradient that stands between it and what it depends on, since the kernel has no derivative.

    once_differentiable would not do: it looks at the upstream gradient only, which is a constant when backward starts
    at the loss, and the second derivative by the logits would be missing without a word.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, logits: Tensor, grad_loss: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "vocab_parallel_cross_entropy has a first derivative only; torch.nn.functional."
            "cross_entropy has a second one"
        )


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Outside the ops, so that a call without gradients costs nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        shard: Shard,
        comm: Communicator | None,
        ignore_index: int,
        reduction: str,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        loss, lse = _forward(logits, target, shard, comm, ignore_index)
        out, count = reference.reduce_loss(loss, target, ignore_index, reduction)
        ctx.save_for_backward(logits, target, lse, count)
        ctx.vocab_start, ctx.ignore_index, ctx.inplace = shard.start, ignore_index, inplace
        lse_out = lse.to(loss.dtype).reshape(target.shape)
        ctx.mark_non_differentiable(lse_out)
        return out, lse_out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.inplace and getattr(ctx, "is_consumed", False):
            raise RuntimeError(
                "this loss was computed with inplace_backward=True: its first backward wrote the gradient over the "
                "logits, so it cannot run a second time. Use inplace_backward=False where backward runs more than once."
            )
        logits, target, lse, count = ctx.saved_tensors
        ops = _implementation(logits)
        with torch.no_grad():
            grad_loss = reference.expand_grad(grads[0], count, target.numel(), compute_dtype(logits.dtype))
            if ctx.inplace:
                grad = logits.detach()
                ops.backward_(grad, lse, target, grad_loss, ctx.vocab_start, ctx.ignore_index)
                ctx.is_consumed = True
                # Whoever else saved these logits must not compute with what is in them now.
                torch.autograd.graph.increment_version(logits)
            else:
                grad = ops.backward(logits, lse, target, grad_loss, ctx.vocab_start, ctx.ignore_index)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            grad = _FirstDerivative.apply(grad, logits, grads[0])
        return grad, None, None, None, None, None, None


# ---- public ----------------------------------------------------------------------------------------------------------


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = ...,
    vocab_range: tuple[int, int, int] | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    inplace_backward: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = ...,
    vocab_range: tuple[int, int, int] | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    inplace_backward: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace_backward: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax cross-entropy over a vocabulary that is split across the ranks of `group`.

        logits  [..., V_local]  this rank's columns; float32, bfloat16, float16 or float64, any strides
        target  [...]           global class ids, int64 or int32, the same on every rank
        out     [...] or []     the loss; float32, or float64 for float64 logits
        lse     [...]           log of the sum of exponentials over the vocabulary, same dtype; has no gradient

        forward   one all-gather of 12 bytes a token (24 for float64); none if the group is None or one rank
        backward  no collective; grad = (softmax - onehot) * grad_loss in the logits' dtype

    Args:
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for logits that hold the whole vocabulary. Under
            torch.compile it has to be a Communicator made outside, and the collective is then torch's functional one,
            without a deadline.
        vocab_range: (start, end, total) if this rank's columns are [start, end) of `total`. The default is equal
            shards in rank order; shards of unequal sizes must be given. Empty shards are allowed.
        ignore_index: targets with this value have loss 0 and gradient 0, and do not count in a mean.
        reduction: "none", "sum", or "mean" over the targets that are not ignored; a mean over none of them is 0 (where
            torch.nn.functional.cross_entropy gives NaN).
        inplace_backward: write the gradient over the logits instead of into new memory. The logits are destroyed by
            backward, which can then run only once; anything else that saved them for its own backward raises. For
            logits that are an intermediate result. Under torch.compile, which plans memory itself, it has no effect.
        return_lse: return (loss, lse).

    Worked example, two ranks with one column each: logits [[0.0]] and [[log 3]], target [1]: the ranks send (0, 1, 0)
    and (log 3, 1, log 3); lse = log 4, loss = log(4 / 3), and the gradients are [[0.25]] and [[-0.25]].

    Raises:
        IndexError: a target outside the vocabulary that is not ignore_index; names its position. Raised on every rank
            before the collective. On CUDA, where looking would need a synchronisation, that row's loss is NaN instead.
        ValueError, TypeError: shapes, dtypes, devices, reduction, vocab_range; shards that do not tile the
            vocabulary (on CPU, after the collective, on every rank).
        RuntimeError: a second backward after inplace_backward=True.
    """
    reference.check_arguments(logits, target, ignore_index, reduction)
    comm = reference.communicator(group)
    shard = reference.resolve_shard(logits, vocab_range, comm)
    target = target.long()
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        inplace = inplace_backward and not torch.compiler.is_compiling()
        loss, lse = _VocabParallelCrossEntropy.apply(logits, target, shard, comm, ignore_index, reduction, inplace)
    else:
        rows, lse = _forward(logits, target, shard, comm, ignore_index)
        loss, _ = reference.reduce_loss(rows, target, ignore_index, reduction)
        lse = lse.to(loss.dtype).reshape(target.shape)
    return (loss, lse) if return_lse else loss
