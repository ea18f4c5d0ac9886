"""Checks of linear cross-entropy's arguments, shared by op and reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.contracts import FLOAT_DTYPES

if TYPE_CHECKING:
    from fastpar.comm import Communicator


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
    if hidden.dtype not in FLOAT_DTYPES:
        raise TypeError(f"hidden must be one of {[str(d) for d in FLOAT_DTYPES]}, got {hidden.dtype}")
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
