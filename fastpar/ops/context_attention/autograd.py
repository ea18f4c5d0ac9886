"""Forward and backward of `context_attention` on one rank, and the autograd function around them.

forward   own tokens of all heads -> (ulysses > 1) neighbours' tokens of own heads -> ring or gather -> sink -> back
backward  delta = rowsum(dout * out), then the same way for the gradients
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.agree import Agreement
from fastpar.comm.recompute_cache import kept
from fastpar.comm.transport_selector import Mode
from fastpar.contracts import compute_dtype
from fastpar.contracts.attention import ScoreOptions
from fastpar.ops._attention_torch import are_asked_for
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops.attention import merge_sink, row_delta, sink_grad
from fastpar.ops.context_attention import gather, ring
from fastpar.ops.context_attention.exchange import HeadExchange
from fastpar.ops.context_attention.gather import GatherCall
from fastpar.ops.context_attention.local import Gradients, LocalHeads, SavedRows
from fastpar.ops.context_attention.methods import HeadSpread, Span, Spread, head_groups
from fastpar.ops.context_attention.plan import ContextPlan, TokenOrder
from fastpar.ops.context_attention.streams import RingCall

OP = "context_attention"
SECOND_DERIVATIVE = "fastpar.reference.attention of the whole sequence"


@dataclass(frozen=True)
class ContextCall:
    """A checked call, apart from its tensors.

    heads      how the heads are spread over the neighbours; order: the neighbours' tokens
    mode       how collectives are launched
    agreement  what ranks have to agree on; None: nothing, or not on this device
    """

    comm: Communicator
    plan: ContextPlan
    spread: Spread
    heads: HeadSpread
    order: TokenOrder
    options: ScoreOptions
    mode: Mode
    agreement: Agreement | None = None

    @property
    def head_rank(self) -> int:
        return self.comm.rank % self.spread.ulysses

    @property
    def own_heads(self) -> Span:
        """The query heads of this rank's attention."""
        return self.heads.queries[self.head_rank]

    @property
    def exchange(self) -> HeadExchange | None:
        return None if self.spread.ulysses == 1 else HeadExchange(self.comm, self.heads, self.order)

    @property
    def local_heads(self) -> LocalHeads:
        return LocalHeads(self.heads.segments(self.head_rank), self.own_heads[0])

    def ring(self, agreement: Agreement | None) -> RingCall:
        return RingCall(self.comm, self.plan, self.spread.ulysses, self.mode, agreement)

    def gather(self) -> GatherCall:
        return GatherCall(
            self.comm, self.plan, self.mode, head_groups(self.own_heads[1], self.heads.keys[0][1], self.spread.gather)
        )


def run_forward(call: ContextCall, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, ...]:
    """(out, lse, what backward needs): q, k, v and out of this rank's attention, where they are not the caller's."""
    agreement, exchange = call.agreement, call.exchange
    if agreement is not None and (exchange is not None or call.spread.gather):
        agreement.gather(call.comm)
        agreement = None
    if exchange is not None:
        queries, keys = call.heads.queries, call.heads.keys
        q, k, v = exchange.to_heads((q, queries), (k, keys), (v, keys))
    dtype = q.dtype if sink is None else compute_dtype(q.dtype)  # a sink is one more source
    if call.spread.gather:
        out, lse = gather.forward(call.gather(), q, k, v, call.options, dtype)
    else:
        out, lse = ring.forward(call.ring(agreement), q, k, v, call.options, call.local_heads, dtype)
    if sink is not None:
        out, lse = merge_sink(out, lse, sink[slice(*call.own_heads)])
    out = out.to(q.dtype)
    if exchange is None:
        return out, lse
    return exchange.to_tokens((out, call.heads.queries))[0], lse, q, k, v, out


def kept_forward(call: ContextCall, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, ...]:
    """`run_forward`, or what it returned where this is a forward that is run again."""
    return kept(lambda: run_forward(call, q, k, v, sink))


def run_backward(
    call: ContextCall, dout: Tensor, saved: tuple[Tensor, ...], sink: Tensor | None, by_torch: bool
) -> tuple[Any, ...]:
    """Gradients of q, k and v in their dtype, and of the sink: of this rank's rows, to be summed over the group."""
    q, k, v, out, lse = saved
    exchange = call.exchange
    if exchange is not None:
        (dout,) = exchange.to_heads((dout, call.heads.queries))
    delta = row_delta(dout, out, None)
    dsink = None
    if sink is not None:
        dsink = torch.zeros_like(sink)
        dsink[slice(*call.own_heads)] = sink_grad(sink[slice(*call.own_heads)], lse, delta)
    rows = SavedRows(q, dout, lse, delta, out if by_torch else None)
    if call.spread.gather:
        grads = gather.backward(call.gather(), rows, k, v, call.options)
    else:
        grads = ring.backward(call.ring(None), rows, k, v, call.options, call.local_heads)
    if exchange is not None:
        grads = _to_tokens(exchange, grads, q.dtype)
    return *(grad.to(q.dtype) for grad in grads), dsink


def _to_tokens(exchange: HeadExchange, grads: Gradients, dtype: torch.dtype) -> Gradients:
    """One message; two where parts of a key/value head's gradients are summed, which keep their digits until then."""
    queries, keys = exchange.heads.queries, exchange.heads.keys
    if exchange.heads.is_shared and grads.k.dtype != dtype:
        (dq,) = exchange.to_tokens((grads.q.to(dtype), queries))
        return Gradients(dq, *exchange.to_tokens((grads.k, keys), (grads.v, keys)))
    dq, dk, dv = (grad.to(dtype) for grad in grads)
    return Gradients(*exchange.to_tokens((dq, queries), (dk, keys), (dv, keys)))


class ContextAttentionFunction(torch.autograd.Function):
    """The anchor has no elements, and the history of q, k and v: see `anchored`."""

    @staticmethod
    def forward(
        ctx: Any, call: ContextCall, anchor: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> Tensor:
        out, lse, *exchanged = kept_forward(call, q, k, v, sink)
        ctx.call, ctx.by_torch = call, are_asked_for(q)
        # Of the heads that this rank has attended to, where these are not the caller's: else backward would send them.
        ctx.save_for_backward(*(exchanged or (q, k, v, out)), lse, sink, anchor)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, sink, anchor = ctx.saved_tensors
        with torch.no_grad():
            found = run_backward(ctx.call, grads[0], tuple(saved), sink, ctx.by_torch)
        refused = (
            None if grad is None else first_derivative_only(grad, OP, SECOND_DERIVATIVE, grads[0], anchor, sink)
            for grad in found
        )
        return (
            None,
            None,
            *(grad if needed else None for grad, needed in zip(refused, ctx.needs_input_grad[2:], strict=True)),
        )


def anchored(*tensors: Tensor) -> Tensor:
    """A tensor without elements or memory that depends on these: what a second derivative is refused by, so that they
    need not be saved for it."""
    return torch.cat([x[:0].reshape(-1) for x in tensors])
