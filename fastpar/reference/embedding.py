"""Embedding lookup in a table whose rows are split across ranks, in plain PyTorch; and its argument checks.

The algebra is in fastpar.ops.embedding. `embedding` and `embedding_backward` have the signatures of the ops of the same
names, and are what the public function falls back to on devices without kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts.vocab_shard import communicator, compute_dtype, resolve_shard

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike

NO_PADDING = -1  # as the ops take a padding_idx of None
REDUCTIONS = ("all", "scatter", "none")
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# ---- arguments -------------------------------------------------------------------------------------------------------


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
    if weight.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"weight must be one of {[str(d) for d in WEIGHT_DTYPES]}, got {weight.dtype}")
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


# ---- the ops ---------------------------------------------------------------------------------------------------------


def embedding(ids: Tensor, weight: Tensor, vocab_start: int) -> Tensor:
    """Rows of the ids in [vocab_start, vocab_start + V_local), zeros for all others: [...] -> [..., H]."""
    local = ids - vocab_start
    foreign = (local < 0) | (local >= weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    return F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)


def embedding_backward(ids: Tensor, grad_out: Tensor, num_rows: int, vocab_start: int, padding_idx: int) -> Tensor:
    """Gradient of the table [num_rows, H]: row t gets the sum of grad_out where the id is vocab_start + t."""
    local = ids - vocab_start
    unused = (local < 0) | (local >= num_rows) | (ids == padding_idx)
    local = local.masked_fill(unused, num_rows)  # one row more, which the op leaves out as its padding
    grad = grad_out.to(compute_dtype(grad_out.dtype))
    rows = torch.ops.aten.embedding_dense_backward(grad, local, num_rows + 1, num_rows, False)[:num_rows]
    return rows.to(grad_out.dtype).contiguous()


# ---- the public function ---------------------------------------------------------------------------------------------


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    padding_idx: int | None = None,
    reduce: str = "all",
    scatter_dim: int = 0,
) -> Tensor:
    """fastpar.ops.vocab_parallel_embedding in plain PyTorch, differentiated by autograd."""
    check_weight(ids, weight, reduce)
    comm = communicator(group)
    shard = resolve_shard(weight.shape[0], vocab_range, comm)
    check_ids(ids, shard.total)
    padding = resolve_padding(padding_idx, shard.total) - shard.start
    check_scatter_dim(scatter_dim, ids)
    local = ids.long() - shard.start
    foreign = (local < 0) | (local >= shard.size)
    if shard.size == 0:
        out = weight.sum() * 0 + weight.new_zeros(*ids.shape, weight.shape[1])  # stays in the graph
    else:
        own_padding = padding if padding_idx is not None and 0 <= padding < shard.size else None
        out = F.embedding(local.masked_fill(foreign, 0), weight, own_padding).masked_fill(foreign.unsqueeze(-1), 0.0)
    return reduced(out, comm, reduce, scatter_dim)
