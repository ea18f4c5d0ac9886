"""Output projection and vocab-parallel cross-entropy in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts import communicator
from fastpar.contracts.linear_cross_entropy import check_projection
from fastpar.reference.cross_entropy import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


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
) -> Any:
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
    return vocab_parallel_cross_entropy(
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
