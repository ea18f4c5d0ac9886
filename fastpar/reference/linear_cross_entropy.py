"""Output projection and vocab-parallel cross-entropy in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts import communicator
from fastpar.contracts.linear_cross_entropy import check_projection
from fastpar.reference.cross_entropy import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    group: GroupLike = ...,
    vocab_range: tuple[int, int, int] | None = ...,
    sequence_parallel: bool = ...,
    sequence_dim: int = ...,
    shift: int = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    logit_scale: float = ...,
    class_weight: Tensor | None = ...,
    reduction: str = ...,
    denominator: float | Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    group: GroupLike = ...,
    vocab_range: tuple[int, int, int] | None = ...,
    sequence_parallel: bool = ...,
    sequence_dim: int = ...,
    shift: int = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    logit_scale: float = ...,
    class_weight: Tensor | None = ...,
    reduction: str = ...,
    denominator: float | Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = -2,
    shift: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """fastpar.ops.linear_cross_entropy in plain PyTorch: all logits at once, in hidden's dtype, then the reference
    cross-entropy. Differentiated by autograd.
    """
    from fastpar.comm import copy_to, gather_sequence, shard_sizes

    comm = communicator(group)
    dim = check_projection(hidden, weight, bias, target, comm, sequence_parallel, sequence_dim)
    if comm is not None and dim is not None:
        hidden = gather_sequence(hidden, comm, dim=dim, sizes=shard_sizes(target.shape[dim], comm.size))
    elif comm is not None:
        hidden = copy_to(hidden, comm)
    loss: Any = vocab_parallel_cross_entropy  # its overloads want a literal return_lse
    out: Tensor | tuple[Tensor, Tensor] = loss(
        F.linear(hidden, weight, bias),
        target,
        group=comm,
        vocab_range=vocab_range,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        weight=class_weight,
        shift=shift,
        reduction=reduction,
        denominator=denominator,
        return_lse=return_lse,
    )
    return out
