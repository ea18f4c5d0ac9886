"""Embedding lookup in a table whose rows are split across ranks, in plain PyTorch.

The algebra is in fastpar.ops.embedding. `embedding` and `embedding_backward` have the signatures of the ops of the same
names, and are what the public function falls back to on devices without kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts import communicator, compute_dtype
from fastpar.contracts.embedding import check_ids, check_scatter_dim, check_weight, reduced, resolve_padding
from fastpar.contracts.vocab_shard import resolve_shard

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


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
