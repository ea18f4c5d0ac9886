"""Embedding lookup in a table whose rows, the vocabulary, are split across ranks.

    out_n   = sum over ranks of (weight[id_n - start] where this rank holds id_n, else 0)
    dW_t    = sum over n with id_n = start + t of dout_n            0 for the padding id

One rank adds something other than zero to each row, so the sum over ranks is exact in any dtype. The lookup writes each
row once: Megatron-LM looks up id 0 for foreign ids and fills their rows with zeros afterwards, and Hugging Face masks
ids before and rows after.

The weight gradient adds up the rows of an id in the order of their positions, in float32, and rounds once: torch's CPU
kernel adds bfloat16 rows in bfloat16, whose sum stops growing after 256 equal rows. The same bits for any number of
threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.reference import embedding as reference
from fastpar.reference.vocab_shard import communicator, resolve_shard

if TYPE_CHECKING:
    from fastpar.comm import GroupLike

_ext.load()


# ---- launchers -------------------------------------------------------------------------------------------------------


class _kernels:
    """The compiled ops under the names that the reference gives them."""

    embedding = torch.ops.fastpar.vocab_embedding
    embedding_backward = torch.ops.fastpar.vocab_embedding_backward


def implementation(x: Tensor) -> Any:
    """The namespace that holds the ops for this device."""
    if x.device.type == "cpu":
        return _kernels
    triton = _triton() if x.device.type == "cuda" else None
    return reference if triton is None else triton


def _triton() -> Any:
    try:
        from fastpar.kernels import embedding
    except ImportError:  # triton is optional
        return None
    return embedding


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::vocab_embedding")
def _(ids: Tensor, weight: Tensor, vocab_start: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@torch.library.register_fake("fastpar::vocab_embedding_backward")
def _(ids: Tensor, grad_out: Tensor, num_rows: int, vocab_start: int, padding_idx: int) -> Tensor:
    return grad_out.new_empty((num_rows, grad_out.shape[-1]))


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Embedding(torch.autograd.Function):
    """Rows of a shard, zeros for foreign ids."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, vocab_start: int, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.arguments = (weight.shape[0], vocab_start, padding_idx)
        out: Tensor = implementation(weight).embedding(ids, weight, vocab_start)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return _EmbeddingBackward.apply(grads[0], ids, *ctx.arguments), None, None, None
        return implementation(grads[0]).embedding_backward(ids, grads[0], *ctx.arguments), None, None, None


class _EmbeddingBackward(torch.autograd.Function):
    """The gradient of the table is linear in that of the rows, and its own gradient a lookup."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, ids: Tensor, num_rows: int, vocab_start: int, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.arguments = (vocab_start, padding_idx)
        rows: Tensor = implementation(grad).embedding_backward(ids, grad, num_rows, vocab_start, padding_idx)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (ids,) = ctx.saved_tensors
        vocab_start, padding_idx = ctx.arguments
        rows = implementation(grads[0]).embedding(ids, grads[0], vocab_start)
        return rows.masked_fill((ids == padding_idx).unsqueeze(-1), 0.0), None, None, None, None


# ---- public ----------------------------------------------------------------------------------------------------------


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
    """Rows of a table whose vocabulary is split across the ranks of `group`.

        ids     [...]          global ids, any integer dtype, the same on every rank
        weight  [V_local, H]   this rank's rows; float32, bfloat16, float16 or float64
        out     [..., H]       the same on every rank ("all"); this rank's part along `scatter_dim` ("scatter"); the
                               rows that this rank holds and zeros ("none")

        forward   one all-reduce or reduce-scatter of the output; none if the group is None, or with "none"
        wgrad     dweight[id] += dout, in float32, rounded once; no collective for "all", one all-gather of dout for
                  "scatter"; "none" expects the whole dout

    Args:
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for a table that holds the whole vocabulary.
        vocab_range: (start, end, total) if this rank's rows are [start, end) of `total`; default: equal shards.
        padding_idx: a global id whose row gets no gradient; negative ones count from the end.
        reduce: "all", "scatter" (sequence parallelism: rows by torch.chunk's rule along `scatter_dim`) or "none".

    Worked example, two ranks with one row each: weight [[1, 2]] and [[3, 4]], ids [1, 0, 1]: the ranks add
    [[0, 0], [1, 2], [0, 0]] and [[3, 4], [0, 0], [3, 4]]; for dout of ones the gradients are [[1, 1]] and [[2, 2]].

    Raises:
        IndexError: an id outside the vocabulary; names its position. On every rank, before the collective (on CUDA, an
            asynchronous device assertion). Compiled code does not look: such an id has a row of zeros.
        ValueError, TypeError: shapes, dtypes, devices, vocab_range, padding_idx, reduce.
    """
    reference.check_weight(ids, weight, reduce)
    comm = communicator(group)
    shard = resolve_shard(weight.shape[0], vocab_range, comm)
    reference.check_ids(ids, shard.total)
    padding = reference.resolve_padding(padding_idx, shard.total)
    ids = ids.long()
    if torch.is_grad_enabled() and weight.requires_grad:
        out = _Embedding.apply(weight, ids, shard.start, padding)
    else:
        out = implementation(weight).embedding(ids, weight, shard.start)
    return reference.reduced(out, comm, reduce, scatter_dim)
