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

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import copy_to, gather_sequence, shard_sizes
from fastpar.comm.autograd import not_a_view
from fastpar.contracts import communicator
from fastpar.contracts.agreement import call_of, first_outside, raise_disagreement, tensor_checksum
from fastpar.contracts.embedding import check_ids, check_scatter_dim, check_weight, reduced, resolve_padding
from fastpar.contracts.vocab_shard import Shard, resolve_shard
from fastpar.ops._backends import kernels_of

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike


# ---- launchers -------------------------------------------------------------------------------------------------------

implementation = kernels_of("embedding")


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


# ---- several ranks ---------------------------------------------------------------------------------------------------

# Note: marks. An id outside the vocabulary on one rank has to be an error on all of them, and there is one collective,
# a sum. So a few rows of marks travel below the looked-up ones: two numbers of each rank, which no other rank adds to,
# and which any float dtype holds. They say which ids the rank was given, or that one of them is outside.
_BAD_IDS = 255
_MARKS = 2  # numbers of a rank, below 255 each


class _Message(NamedTuple):
    """Ids as they are looked up, with places for marks; dim is None where every rank gets all rows."""

    ids: Tensor
    marks: list[int]  # first row of each copy of the marks
    num_marks: int  # rows of a copy
    dim: int | None
    sizes: list[int] | None  # rows of each rank's part of the message
    part: tuple[int, ...]  # shape of the ids whose rows this rank gets


def _message(ids: Tensor, hidden: int, comm: Communicator, dim: int | None) -> _Message:
    num_marks = -(-_MARKS * comm.size // hidden)
    nobody = ids.new_full((num_marks,), -1)
    if dim is None:
        return _Message(torch.cat([ids.reshape(-1), nobody]), [ids.numel()], num_marks, None, None, tuple(ids.shape))
    parts = ids.split(shard_sizes(ids.shape[dim], comm.size), dim)
    sizes = [part.numel() + num_marks for part in parts]
    ends = list(itertools.accumulate(sizes))
    joined = torch.cat([piece for part in parts for piece in (part.reshape(-1), nobody)])
    return _Message(joined, [end - num_marks for end in ends], num_marks, dim, sizes, tuple(parts[comm.rank].shape))


def _lookup_and_reduce(weight: Tensor, ids: Tensor, shard: Shard, comm: Communicator, dim: int | None) -> Tensor:
    """Rows of all ranks' tables; raises on every rank what is wrong with the ids of any."""
    hidden = weight.shape[1]
    message = _message(ids, hidden, comm, dim)
    rows: Tensor = implementation(weight).embedding(message.ids, weight, shard.start)
    is_bad = first_outside(ids, shard.total, None) is not None
    checksum = tensor_checksum(ids)
    assert isinstance(checksum, int)
    own = [_BAD_IDS] * _MARKS if is_bad else [checksum % 251, checksum // 251 % 241]
    mark = torch.tensor(own, dtype=weight.dtype, device="cpu")
    for first in message.marks:
        rows[first : first + message.num_marks].view(-1)[_MARKS * comm.rank :][:_MARKS] = mark
    summed = comm.all_reduce(rows) if message.sizes is None else comm.reduce_scatter(rows, dim=0, sizes=message.sizes)
    marks = summed[-message.num_marks :].reshape(-1)[: _MARKS * comm.size].tolist()
    if marks != marks[:_MARKS] * comm.size or marks[0] == _BAD_IDS:
        call = call_of(comm, weight, "vocab_parallel_embedding")
        assert call is not None  # only eager calls on CPU come here
        raise_disagreement(call, ids, shard.total, None, "ids")
    return summed[: -message.num_marks].view(*message.part, hidden)


def agree_on_ids(ids: Tensor, weight: Tensor, comm: Communicator, total: int) -> None:
    """Raises on every rank what `vocab_parallel_embedding` does, in front of a lookup with reduce="none": one
    all-gather of two numbers a rank. Nothing on a device, where it would wait."""
    if comm.size == 1 or not _has_marks(ids, weight):
        return
    own = torch.tensor([first_outside(ids, total, None) is not None, tensor_checksum(ids)], device="cpu")
    everyone = comm.all_gather(own[None])
    if bool((everyone != everyone[0]).any()) or bool(everyone[0, 0]):
        call = call_of(comm, weight, "vocab_parallel_embedding")
        assert call is not None
        raise_disagreement(call, ids, total, None, "ids")


class _ReducedEmbedding(torch.autograd.Function):
    """Rows of a split table on every rank, or this rank's part of them along `dim`."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, shard: Shard, padding_idx: int, comm: Communicator, dim: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.arguments, ctx.comm, ctx.dim = (weight.shape[0], shard.start, padding_idx), comm, dim
        return not_a_view(_lookup_and_reduce(weight, ids, shard, comm, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (ids,), grad = ctx.saved_tensors, grads[0]
        if ctx.dim is not None:
            sizes = shard_sizes(ids.shape[ctx.dim], ctx.comm.size)
            grad = gather_sequence(grad, ctx.comm, dim=ctx.dim, sizes=sizes)
        if torch.is_grad_enabled():  # create_graph=True
            if ctx.dim is None:
                grad = copy_to(grad, ctx.comm)  # each rank's rows give a part of what comes back to it
            return _EmbeddingBackward.apply(grad, ids, *ctx.arguments), None, None, None, None, None
        return implementation(grad).embedding_backward(ids, grad, *ctx.arguments), None, None, None, None, None


# ---- public ----------------------------------------------------------------------------------------------------------


def _has_marks(ids: Tensor, weight: Tensor) -> bool:
    """See Note: marks. A device would have to be waited for."""
    return weight.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel() > 0 and weight.shape[1] > 0


@checked()
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

        forward   one all-reduce or reduce-scatter of the output and a row; none if the group is None, or with "none"
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
        IndexError: an id outside the vocabulary; names its position, and the rank where not all have it. On every rank,
            after the collective; with "none", which has none, on this one. On CUDA, an asynchronous device assertion.
            Compiled code does not look: such an id has a row of zeros.
        CommMismatchError: the ranks were given different ids (on CPU, after the collective, on every rank).
        ValueError, TypeError: shapes, dtypes, devices, vocab_range, padding_idx, reduce.
    """
    check_weight(ids, weight, reduce)
    comm = communicator(group)
    shard = resolve_shard(weight.shape[0], vocab_range, comm)
    padding = resolve_padding(padding_idx, shard.total)
    check_scatter_dim(scatter_dim, ids)
    if comm is not None and reduce != "none" and _has_marks(ids, weight):
        dim = None if reduce == "all" else scatter_dim % (ids.dim() + 1)
        if dim != ids.dim():
            arguments = (weight, ids.long(), shard)
            if torch.is_grad_enabled() and weight.requires_grad:
                return cast(Tensor, _ReducedEmbedding.apply(*arguments, padding, comm, dim))
            return _lookup_and_reduce(*arguments, comm, dim)
    check_ids(ids, shard.total)
    ids = ids.long()
    if torch.is_grad_enabled() and weight.requires_grad:
        out = _Embedding.apply(weight, ids, shard.start, padding)
    else:
        out = implementation(weight).embedding(ids, weight, shard.start)
    return reduced(out, comm, reduce, scatter_dim)
