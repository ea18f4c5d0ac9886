"""The public op: what is wrong is found before anything is sent, and raised on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.comm import Communicator, GroupLike
from fastpar.comm.agree import Agreement
from fastpar.comm.ranges import annotate
from fastpar.comm.shards import check_is_tensor
from fastpar.comm.transport_selector import Mode
from fastpar.contracts.attention import (
    AttentionDropout,
    AttentionMask,
    Ranges,
    ScoreOptions,
    TokenRange,
    autocast_heads,
    check_heads,
    check_score_options,
)
from fastpar.ops._autograd import needs_grad
from fastpar.ops.context_attention.autograd import OP, ContextAttentionFunction, ContextCall, anchored, kept_forward
from fastpar.ops.context_attention.choose import choose_spread, resolve_method
from fastpar.ops.context_attention.methods import GatherKeys, Method, Usp, head_groups, spread_heads
from fastpar.ops.context_attention.plan import Layout, check_layout, checksum, make_plan, neighbours_order

_ext.load()

_EQUAL_ON_ALL = (
    "the batch size", "the number of query heads", "the number of key/value heads", "the head dim of q and k",
    "the head dim of v", "the dtype", "the method", "the layout", "the mask", "scale, softcap and dropout",
    "whether there is a sink", "which inputs require gradients (else a backward would wait for ranks that have none)",
)  # fmt: skip


@checked(unless_agreed="group", but=("layout", "mask"))
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    layout: Sequence[Ranges],
    mask: AttentionMask,
    method: Method = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    overlap: bool = True,
) -> Tensor:
    """Softmax attention over a sequence whose tokens are split over the ranks of a group.

        q     [b, h_q, s, D]     this rank's tokens, in the order of its layout; s may differ between ranks, and be 0
        k     [b, h_k, s, D]     h_q a multiple of h_k: query head h reads key/value head h // (h_q / h_k)
        v     [b, h_k, s, D_v]   dtypes are equal; under torch.autocast all three are taken in its dtype, as by torch
        sink  [h_q]              a score of each head that no value belongs to, the same on every rank
        out   [b, h_q, s, D_v]   q's dtype; rows that see no key are 0

        forward  x = scale q kT, or softcap tanh(that / softcap), where the mask lets q see k; L = logsumexp(x, sink)
                 out = exp(x - L) v
        dgrad    P = exp(x - L); dV = PT dout; dS = P (dout vT - delta), delta = rowsum(dout out); dq = scale dS k;
                 dk = scale dST q; dsink = -sum over this rank's rows of exp(sink - L) delta, a part: sum it over the
                 group as the gradients of weights are

    layout   the global tokens of every rank, as `fastpar.context.layout` makes it; each token on one rank
    mask     which query sees which key, by global position; documents: one row for all, or one for each batch row
    method   "ring"     keys go round; partial results and their gradients in float32, see `ring`
             "gather"   keys are gathered; `GatherKeys(head_groups)` a few heads at a time
             "ulysses"  tokens of all heads for all tokens of some; `Usp(u)` over u neighbours, a ring over the rest
             "auto"     by the heads, the mask and where the ranks are (`fastpar.ops.context_attention.choose`)
    scale    1 / sqrt(D) by default
    dropout  p and seed, the same on every rank; its mask goes by global positions, so that it is the same for any
             layout. q_positions and k_positions must be None
    overlap  collectives are under way during the attention of a step. It changes no bit

    Elements sent per rank, of W = b S D (D_v = D), backward in parentheses; none between ranks that share memory for
    "ring", which read keys and add gradients where they lie:

        ring, gather  2 (1 - 1/P) h_k W                     (4 (1 - 1/P) h_k W, half of it float32)
        ulysses       2 (1 - 1/P) (h_q + h') W / P          (the same), h' = max(h_k, P)
        usp           2 (1 - 1/u) (h_q + h') W / P + 2 (1 - 1/r) h' W / u     (4 for the last 2), h' = max(h_k, u)

    A ring sends keys that the receiver's queries see, and no others. Between CPU tensors ranks compare their arguments
    first: one all-gather of 13 numbers a rank. Results have the same bits from run to run, with overlap or without;
    Ulysses' are those of one rank, but for the gradients of key/value heads that several ranks read.

    A recomputed forward takes what the first one has exchanged and computed (`fastpar.recompute`). Under torch.compile
    it is a graph break. No second derivative: RuntimeError.

    Raises, on every rank of the group between CPU tensors, where one rank's arguments are wrong:
        TypeError: not tensors; dtypes that differ, or are not floating
        ValueError: shapes that do not belong together, or to the layout or the mask; heads that cannot be spread;
            arguments that differ between ranks
        CommError: as `Communicator` does.

    Source: see the modules of `fastpar.ops.context_attention`.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.compiler.disable(context_attention)(
            q, k, v, group=group, layout=layout, mask=mask, method=method, scale=scale, softcap=softcap, sink=sink,
            dropout=dropout, overlap=overlap,
        ))  # fmt: skip
    comm = Communicator.of(group)
    if all(isinstance(x, Tensor) for x in (q, k, v)):
        q, k, v = autocast_heads(q, k, v)
    options = _Options(layout, mask, method, scale, softcap, dropout, overlap)
    problem: Exception | None = None
    call: ContextCall | None = None
    try:
        call = _prepare(comm, q, k, v, sink, options)
    except (TypeError, ValueError, OverflowError) as error:
        problem = error
    if call is None:
        on_cpu = not isinstance(q, Tensor) or q.device.type == "cpu"
        if comm.size > 1 and on_cpu:
            Agreement(OP, _EQUAL_ON_ALL, problem=problem).gather(comm)
        assert problem is not None
        raise problem
    with annotate(f"fastpar::context::{OP}"):
        if needs_grad(q, k, v, sink):
            return cast(Tensor, ContextAttentionFunction.apply(call, anchored(q, k, v), q, k, v, sink))
        with torch.no_grad():
            return kept_forward(call, q, k, v, sink)[0]


# ---- checks ----------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """The arguments beside the tensors, as they were given."""

    layout: Any
    mask: Any
    method: Any
    scale: Any
    softcap: Any
    dropout: Any
    overlap: Any


def _prepare(comm: Communicator, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, given: _Options) -> ContextCall:
    """The call, or what is wrong with it on this rank."""
    _check_kinds(given)
    layout: Layout = tuple(map(tuple, given.layout))
    _check_tensors(q, k, v, sink)
    sizes = check_layout(layout, comm.size)
    _check_tokens(q, given.mask, sizes, comm.rank)
    check_score_options(q, given.scale, given.softcap, sink)
    _check_dropout(given.dropout)
    asked = resolve_method(given.method, comm.size)
    inputs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in (q, k, v, sink)]
    spread = asked or choose_spread(comm, layout, given.mask, q, k.shape[1])
    plan = make_plan(layout, given.mask, comm.rank, spread.ulysses)
    heads = spread_heads(q.shape[1], k.shape[1], spread.ulysses, spread.uneven)
    if spread.gather:
        head_groups(q.shape[1], k.shape[1], spread.gather)
        _ = plan.gathered  # tiles that cannot be made are an error now
    else:
        _ = plan.steps, plan.busy
    scale, softcap = (None if x is None else float(x) for x in (given.scale, given.softcap))
    score = ScoreOptions.of(q.shape[3], scale, softcap, given.dropout)
    agreement = None
    if comm.size > 1 and q.device.type == "cpu":
        shapes = [*q.shape[:2], k.shape[1], q.shape[3], v.shape[3], q.dtype]
        rules = [_bits(spread), checksum(layout), checksum(given.mask), _bits(score), sink is not None]
        agreement = Agreement(OP, _EQUAL_ON_ALL, [*shapes, *rules, sum(1 << i for i, x in enumerate(inputs) if x)])
    order = neighbours_order(layout, comm.rank - comm.rank % spread.ulysses, spread.ulysses)
    mode: Mode = "split_phase" if given.overlap else "blocking"
    return ContextCall(comm, plan, spread, heads, order, score, mode, agreement)


def _bits(value: object) -> int:
    """A number for a value, the same for equal ones on all ranks."""
    return zlib.crc32(repr(value).encode())


def _check_kinds(given: _Options) -> None:
    """Check the kinds of what ranks of a group have to agree on, so that no annotation is checked before they do."""
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        "mask": ((AttentionMask,), "an AttentionMask"),
        "method": ((str, Usp, GatherKeys), "a str, Usp or GatherKeys"),
        "scale": ((int, float, type(None)), "a float or None"),
        "softcap": ((int, float, type(None)), "a float or None"),
        "dropout": ((AttentionDropout, type(None)), "an AttentionDropout or None"),
        "overlap": ((bool,), "a bool"),
    }
    for name, (allowed, words) in kinds.items():
        value = getattr(given, name)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise TypeError(f"{OP}: {name} must be {words}, got {type(value).__name__} {value!r:.60}")
    layout = given.layout
    is_layout = isinstance(layout, Sequence) and not isinstance(layout, str)
    if not is_layout or not all(
        isinstance(ranges, Sequence) and all(isinstance(tokens, TokenRange) for tokens in ranges) for ranges in layout
    ):
        raise TypeError(f"{OP}: layout must have a tuple of TokenRange for each rank, got {layout!r:.80}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> None:
    named = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
    for name, x in named.items():
        check_is_tensor(x, name)
        if hasattr(x, "device_mesh") or x.layout != torch.strided:
            raise TypeError(f"{name} must be a plain, dense tensor, got {type(x).__name__}")
    check_heads(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have the same tokens, got {q.shape[2]} and {k.shape[2]}")
    if min(*q.shape[:2], q.shape[3], v.shape[3]) < 1:
        raise ValueError(f"only s may be 0 of q [b, h_q, s, D] and v [.., D_v], got {list(q.shape)}, {list(v.shape)}")


def _check_tokens(q: Tensor, mask: AttentionMask, sizes: tuple[int, ...], rank: int) -> None:
    if q.shape[2] != sizes[rank]:
        raise ValueError(f"q must have the {sizes[rank]} tokens that layout gives rank {rank}, got {q.shape[2]}")
    if mask.num_tokens is not None and mask.num_tokens != sum(sizes):
        raise ValueError(f"documents add up to {mask.num_tokens} tokens, but layout has {sum(sizes)}")
    rows = 1 if mask.documents is None else len(mask.documents)
    if rows not in (1, q.shape[0]):
        raise ValueError(f"documents must be for one row or for each of the {q.shape[0]} batch rows, got {rows}")


def _check_dropout(dropout: AttentionDropout | None) -> None:
    if dropout is not None and not (dropout.q_positions is None and dropout.k_positions is None):
        raise ValueError("dropout: q_positions and k_positions must be None: the layout says where tokens are")
