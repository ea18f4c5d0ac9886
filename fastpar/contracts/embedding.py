"""Checks of a split embedding's arguments, and the sum of the ranks' rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.contracts import FLOAT_DTYPES

if TYPE_CHECKING:
    from fastpar.comm import Communicator

NO_PADDING = -1  # as the ops take a padding_idx of None
REDUCTIONS = ("all", "scatter", "none")


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """IndexError with the position of the first id outside [0, vocab_size)."""
    if ids.numel() == 0 or torch.compiler.is_compiling():
        return
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < vocab_size)).all())
        return
    low, high = torch.aminmax(ids)
    if low >= 0 and high < vocab_size:
        return
    position = torch.nonzero((ids < 0) | (ids >= vocab_size))[0].tolist()
    value = int(ids[tuple(position)])
    raise IndexError(f"ids{position} is {value}, outside the vocabulary [0, {vocab_size})")


def check_weight(ids: Tensor, weight: Tensor, reduce: str) -> None:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"weight must be [vocabulary, hidden], got shape {tuple(weight.shape)}")
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(f"weight must be one of {[str(d) for d in FLOAT_DTYPES]}, got {weight.dtype}")
    if ids.device != weight.device:
        raise ValueError(f"ids and weight must be on one device, got {ids.device} and {weight.device}")
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {REDUCTIONS}, got {reduce!r}")


def check_scatter_dim(scatter_dim: int, ids: Tensor) -> None:
    if isinstance(scatter_dim, bool) or not isinstance(scatter_dim, int):
        raise TypeError(f"scatter_dim must be an int, got {scatter_dim!r}")
    if not -ids.dim() - 1 <= scatter_dim <= ids.dim():
        raise IndexError(
            f"scatter_dim must be in {-ids.dim() - 1}..{ids.dim()}, a dim of the output, got {scatter_dim}"
        )


def resolve_padding(padding_idx: int | None, total: int) -> int:
    """A padding_idx as the ops take it; negative ones count from the end of the vocabulary, as in torch."""
    if padding_idx is None:
        return NO_PADDING
    if not -total <= padding_idx < total:
        raise ValueError(f"padding_idx must be inside the vocabulary [0, {total}), got {padding_idx}")
    return padding_idx % total


def reduced(out: Tensor, comm: Communicator | None, reduce: str, scatter_dim: int) -> Tensor:
    """The ranks' rows, of which one rank's are not zero, added up over the group."""
    from fastpar.comm import reduce_from, reduce_scatter_sequence

    if comm is None or reduce == "none":
        return out
    return reduce_from(out, comm) if reduce == "all" else reduce_scatter_sequence(out, comm, dim=scatter_dim)
