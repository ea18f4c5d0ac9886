"""Output projection and vocab-parallel cross-entropy in plain PyTorch, and the argument checks that the fused version
shares with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts.vocab_shard import communicator
from fastpar.reference.cross_entropy import LOGITS_DTYPES, vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike


def check_projection(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    comm: Communicator | None,
    sequence_parallel: bool,
    sequence_dim: int,
) -> int | None:
    """TypeError or ValueError for what does not fit; else the dim of target along which the ranks' tokens are parts,
    None where every rank has all of them.
    """
    if hidden.dtype not in LOGITS_DTYPES:
        raise TypeError(f"hidden must be one of {[str(d) for d in LOGITS_DTYPES]}, got {hidden.dtype}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{name} must have the dtype of hidden, {hidden.dtype}, got {tensor.dtype} (torch.autocast converts)"
            )
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} must be on the device of hidden, {hidden.device}, got {tensor.device}")
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden [..., K] and weight [V_local, K] must have the same last dim, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have one entry per row of weight, ({weight.shape[0]},), got {tuple(bias.shape)}")
    return _check_tokens(hidden, target, comm, sequence_parallel, sequence_dim)


def _check_tokens(
    hidden: Tensor, target: Tensor, comm: Communicator | None, sequence_parallel: bool, sequence_dim: int
) -> int | None:
    from fastpar.comm import shard_sizes

    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must hold class ids as int64 (or int32), got {target.dtype}")
    if target.device != hidden.device:
        raise ValueError(f"hidden and target must be on one device, got {hidden.device} and {target.device}")
    wanted, dim = list(target.shape), None
    if sequence_parallel:
        dim = sequence_dim + hidden.dim() if sequence_dim < 0 else sequence_dim
        if not 0 <= dim < hidden.dim() - 1 or target.dim() != hidden.dim() - 1:
            raise ValueError(
                f"sequence_dim must be a dim of hidden other than its last, got {sequence_dim} for hidden "
                f"{tuple(hidden.shape)} and target {tuple(target.shape)}"
            )
        if comm is not None:
            wanted[dim] = shard_sizes(target.shape[dim], comm.size)[comm.rank]
    if list(hidden.shape[:-1]) != wanted:
        whose = "" if dim is None or comm is None else f" (rank {comm.rank}'s part of dim {dim} of target)"
        raise ValueError(
            f"hidden must be {(*wanted, hidden.shape[-1])}{whose} to go with target {tuple(target.shape)}, got "
            f"{tuple(hidden.shape)}"
        )
    return dim if comm is not None else None


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
