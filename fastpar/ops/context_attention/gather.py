"""Attention with the keys and values of all ranks gathered.

    forward   K, V = all_gather(k, v); out = attention(q, K, V)
    backward  K, V = all_gather(k, v); dQ, dK, dV of this rank's queries; dk, dv = reduce_scatter(dK, dV) in float32

One collective for k and v; by groups of key/value heads one for each, the next group's during the attention of one.
Elements sent, of W = b S D: 2 (1 - 1/P) h_k W forward, 4 (1 - 1/P) h_k W backward, half of these in float32. In memory:
2 h_k W of the dtype and, in backward, of float32, over the number of groups.

Source: Dubey et al. 2024 (arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator, Pending
from fastpar.comm.ranges import annotate
from fastpar.comm.transport_selector import Mode
from fastpar.contracts import compute_dtype
from fastpar.contracts.attention import ScoreOptions
from fastpar.ops._buffers import new_buffer
from fastpar.ops.context_attention.exchange import Message
from fastpar.ops.context_attention.local import (
    Gradients,
    LocalHeads,
    Merged,
    SavedRows,
    attend,
    attend_backward,
)
from fastpar.ops.context_attention.methods import Span
from fastpar.ops.context_attention.plan import ContextPlan


class GatherCall(NamedTuple):
    """One call: the group, this rank's plan, how collectives are launched, (query heads, key/value heads) by group."""

    comm: Communicator
    plan: ContextPlan
    mode: Mode
    groups: tuple[tuple[Span, Span], ...]


def forward(
    call: GatherCall, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries and all keys."""
    block, parts = call.plan.gathered, []
    coming = _launch(call, 0, k, v)
    for index, (queries, keys) in enumerate(call.groups):
        whole_k, whole_v = _gathered(call, coming, k, v, keys)
        if index + 1 < len(call.groups):
            coming = _launch(call, index + 1, k, v)
        own, merged = q[:, slice(*queries)], Merged(q[:, slice(*queries)], v, out_dtype)
        if block is not None:
            with annotate(f"fastpar::context::attention {index}"):
                merged.add(block.rows, *attend(own, whole_k, whole_v, block, options, _heads(queries, keys), out_dtype))
        parts.append(merged.result())
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def backward(call: GatherCall, saved: SavedRows, k: Tensor, v: Tensor, options: ScoreOptions) -> Gradients:
    """Gradients of this rank's q, k and v, in the dtype of sums."""
    block = call.plan.gathered
    dtype = compute_dtype(saved.q.dtype)
    found = Gradients(*(x.new_zeros(x.shape, dtype=dtype) for x in (saved.q, k, v)))
    scattered: list[Pending[Tensor]] = []
    coming = _launch(call, 0, k, v)
    for index, (queries, keys) in enumerate(call.groups):
        whole_k, whole_v = _gathered(call, coming, k, v, keys)
        if index + 1 < len(call.groups):
            coming = _launch(call, index + 1, k, v)
        if block is None:
            dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (whole_k, whole_v))
        else:
            with annotate(f"fastpar::context::attention_backward {index}"):
                grads = attend_backward(saved.heads(queries), whole_k, whole_v, block, options, _heads(queries, keys))
            found.q[:, slice(*queries), slice(*block.rows)] = grads.q
            dk, dv = grads.k, grads.v
        scattered.append(_scatter(call, dk, dv))
    for pending, (_, keys) in zip(scattered, call.groups, strict=True):
        start, stop = keys
        shapes = [(x.shape[0], stop - start, *x.shape[2:]) for x in (k, v)]
        parts = pending.wait().split([math.prod(shape) for shape in shapes])
        for target, part, shape in zip((found.k, found.v), parts, shapes, strict=True):
            target[:, start:stop] = part.view(shape)
    return found


def _heads(queries: Span, keys: Span) -> LocalHeads:
    whole = ((0, queries[1] - queries[0]), (0, keys[1] - keys[0]))
    return LocalHeads((whole,), first=queries[0])


def _shapes(call: GatherCall, k: Tensor, v: Tensor, heads: int, rank: int) -> list[tuple[int, ...]]:
    return [(x.shape[0], heads, call.plan.sizes[rank], x.shape[3]) for x in (k, v)]


def _launch(call: GatherCall, index: int, k: Tensor, v: Tensor) -> Pending[Tensor]:
    """The keys and values of one group of heads, flat: those of rank 0, of rank 1, ..."""
    start, stop = call.groups[index][1]
    message = Message.of(k, _shapes(call, k, v, stop - start, call.comm.rank))
    for view, x in zip(message.views, (k, v), strict=True):
        view.copy_(x[:, start:stop])
    sizes = [sum(map(math.prod, _shapes(call, k, v, stop - start, rank))) for rank in range(call.comm.size)]
    # The first one is waited for at once.
    return call.comm.collectives(call.mode if index else "blocking").all_gather(message.flat, sizes=sizes)


def _gathered(call: GatherCall, coming: Pending[Tensor], k: Tensor, v: Tensor, keys: Span) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens, in the plan's order."""
    total, heads = sum(call.plan.sizes), keys[1] - keys[0]
    whole = [new_buffer(x, (x.shape[0], heads, total, x.shape[3])) for x in (k, v)]
    shapes = [shape for rank in range(call.comm.size) for shape in _shapes(call, k, v, heads, rank)]
    for index, part in enumerate(coming.wait().split([math.prod(shape) for shape in shapes])):
        call.plan.order.put(index // 2, part.view(shapes[index]), whole[index % 2])
    return whole[0], whole[1]


def _scatter(call: GatherCall, dk: Tensor, dv: Tensor) -> Pending[Tensor]:
    """This rank's part of the gradients of all keys, flat, summed over the ranks in their order."""
    heads = dk.shape[1]
    shapes = [shape for rank in range(call.comm.size) for shape in _shapes(call, dk, dv, heads, rank)]
    message = Message.of(dk, shapes)
    for index, view in enumerate(message.views):
        call.plan.order.take(index // 2, (dk, dv)[index % 2], view)
    sizes = [sum(view.numel() for view in message.views[2 * r : 2 * r + 2]) for r in range(call.comm.size)]
    return call.comm.collectives(call.mode).reduce_scatter(message.flat, sizes=sizes)
