"""`moe_mlp` of CUDA ranks that reach each other's memory (transport="symmetric"), without a word to the host.

`fastpar.kernels.moe_push` moves rows, `fastpar.kernels.moe_push_mlp` has the algebra; here is the memory that they work
in, and the node of the autograd graph. How many rows a rank gets is known on the device alone, so there is room for as
many as can come: `max_rows`, or the worst case of the first call, in which all tokens choose the experts of one rank.

Note: memory
    An exchange belongs to a group, and serves every layer with the same number of experts, top_k and bytes of a token.
    The first call makes it, as does one with another max_rows: a collective call, which compares on the host what has
    to be equal on all ranks. On every rank it takes 2 * max_rows tokens; each layer keeps [max_rows, 2I] for backward.

        worst case   size * T * min(top_k, experts of a rank)      T of the rank with the most, in the first call
        on average          T * top_k

    No later call compares anything, which would be a synchronisation. Rows that do not fit, and arguments that are
    wrong on one rank, make the result NaN on all of them, and an error of their next call.

Note: what is kept for a group is its memory, as in `fastpar.ops.moe.transports.select`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm import Communicator
from fastpar.comm.agree import Agreement
from fastpar.comm.recompute_cache import kept
from fastpar.comm.symmetric.buffer import SymmetricBuffer
from fastpar.contracts.moe import ExpertRule
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops._backends import has_kernels
from fastpar.ops.moe.plan import Dispatch, Padding
from fastpar.ops.moe.weights import ExpertWeights

if TYPE_CHECKING:
    from fastpar.kernels.moe_push import PushExchange

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DEVICES = ("cuda",)
_EQUAL_ON_ALL = ("num_experts", "top_k", "the bytes of a token", "max_rows")


# ---- memory ----------------------------------------------------------------------------------------------------------


class ExchangeKey(NamedTuple):
    """What layers that share an exchange have alike."""

    device: torch.device
    num_experts: int
    top_k: int
    row_bytes: int


class SymmetricExchanges:
    """The exchanges of a group. Holds no reference to the group, which may end before it."""

    def __init__(self) -> None:
        self.exchanges: dict[ExchangeKey, tuple[int | None, PushExchange]] = {}
        self.last: PushExchange | None = None  # that was used


_MEMORIES: weakref.WeakKeyDictionary[ProcessGroup, SymmetricExchanges] = weakref.WeakKeyDictionary()


def _exchange(comm: Communicator, x: Tensor, top_k: int, num_experts: int, max_rows: int | None) -> PushExchange:
    """The group's exchange for such calls; made, where there is none: `Note: memory`."""
    assert comm.group is not None
    memory = _MEMORIES.setdefault(comm.group, SymmetricExchanges())
    key = ExchangeKey(x.device, num_experts, top_k, x.shape[1] * x.element_size())
    found = memory.exchanges.get(key)
    if found is None or found[0] != max_rows:
        found = max_rows, _make(comm, x, key, max_rows)
        memory.exchanges[key] = found
    memory.last = found[1]
    return memory.last


def _make(comm: Communicator, x: Tensor, key: ExchangeKey, max_rows: int | None) -> PushExchange:
    from fastpar.kernels import moe_push
    from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer

    agreement = _agreement(terms=[*key[1:], -1 if max_rows is None else max_rows])
    tokens = agreement.gather(comm, torch.tensor([len(x)], device="cpu"))
    capacity = max_rows or worst_case(comm.size, int(tokens.max()), key.top_k, key.num_experts)
    if capacity * comm.size >= 2**31:
        raise ValueError(
            f"{capacity} rows on each of {comm.size} ranks are too many (2^31 for all); give the experts a max_rows"
        )
    nbytes = moe_push.buffer_bytes(comm.size, key.num_experts, key.row_bytes, capacity)
    symmetric = SymmetricBuffer.create(comm, nbytes, key.device)
    buffer = OverlapBuffer(symmetric, flag_capacity=moe_push.FLAGS, timeout=comm.timeout)
    return moe_push.PushExchange(
        buffer, num_experts=key.num_experts, width=x.shape[1], dtype=x.dtype, capacity=capacity
    )


def worst_case(size: int, tokens: int, top_k: int, num_experts: int) -> int:
    """Rows that a rank can get if each rank has so many tokens, whose choices differ: 4 ranks, 10 tokens, top-8 of 16
    experts: 4 * 10 * 4."""
    return max(size * tokens * min(top_k, num_experts // size), 1)


def _agreement(problem: Exception | None = None, terms: Sequence[int] = ()) -> Agreement:
    return Agreement("moe_mlp", _EQUAL_ON_ALL, terms, problem)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _problem(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    add: Tensor | None,
    num_experts: int,
    options: Dispatch,
) -> Exception | None:
    """What is wrong with this rank's arguments, as far as the host can see. Values of indices are not looked at: one
    that is no expert goes nowhere."""
    if x.device.type not in _DEVICES or not has_kernels(x):
        return ValueError(f"transport='symmetric' takes CUDA tensors, and Triton; x is on {x.device}")
    if x.dtype not in _DTYPES:
        return TypeError(f"transport='symmetric' takes bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim != 2 or indices.ndim != 2 or len(indices) != len(x):
        return ValueError(f"x must be [T, H] and indices [T, K], got {tuple(x.shape)} and {tuple(indices.shape)}")
    if indices.dtype not in (torch.int64, torch.int32):
        return ValueError(f"indices must be int64 or int32, got {indices.dtype}")
    if weights.shape != indices.shape:
        return ValueError(f"weights must have the shape of indices, {tuple(indices.shape)}, got {tuple(weights.shape)}")
    if add is not None and (add.shape != x.shape or add.device != x.device):
        return ValueError(
            f"add must be as x is, {tuple(x.shape)} on {x.device}, got {tuple(add.shape)} on {add.device}"
        )
    if len({t.device for t in (x, indices, weights)}) > 1:
        return ValueError(
            f"x, indices and weights must be on one device, got {x.device}, {indices.device} and {weights.device}"
        )
    if num_experts < 1:
        return ValueError("every rank must have an expert or more")
    if options.padding != Padding():
        return ValueError(f"transport='symmetric' pads no rows, got {options.padding}")
    if options.payload is not None:
        return ValueError(f"transport='symmetric' sends tokens as they are, got payload={options.payload!r}")
    if options.max_rows is not None and options.max_rows < 1:
        return ValueError(f"max_rows must be at least 1, got {options.max_rows}")
    return None


def _refuse(comm: Communicator, problem: Exception) -> None:
    """Raise here; the others, which wait for this rank's counts, hear of it."""
    assert comm.group is not None
    memory = _MEMORIES.get(comm.group)
    # A RuntimeError or TimeoutError says that all is lost already.
    with contextlib.suppress(ValueError, TypeError, RuntimeError, TimeoutError):
        if memory is None or memory.last is None:
            _agreement(problem).gather(comm, torch.zeros(1, dtype=torch.int64, device="cpu"))
        else:
            memory.last.refuse()
    raise problem


# ---- autograd --------------------------------------------------------------------------------------------------------


class SymmetricMoeMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: PushExchange, rule: ExpertRule, grad_scale: float, indices: Tensor, x: Tensor,
                weights: Tensor, add: Tensor | None, *parameters: Any) -> Tensor:  # fmt: skip
        from fastpar.kernels import moe_mlp, moe_push_mlp

        def run() -> tuple[Tensor, ...]:
            experts = moe_mlp.ExpertParams(*parameters)
            out, saved = moe_push_mlp.forward(exchange, x, indices, weights, experts, rule, add)
            return out, *saved

        out, *saved = kept(run)
        needs = ctx.needs_input_grad
        ctx.needs = moe_push_mlp.PushGradNeeds(needs[4], needs[5], *needs[7:])
        ctx.exchange, ctx.rule, ctx.grad_scale = exchange, rule, grad_scale
        ctx.weights_dtype, ctx.add_dtype = weights.dtype, None if add is None else add.dtype
        ctx.save_for_backward(
            x if ctx.needs.inputs(rule) else None, weights if rule.weigh == "input" else None, *parameters, *saved
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        from fastpar.kernels import moe_mlp, moe_push_mlp

        x, weights, *rest = ctx.saved_tensors
        parameters, saved = rest[:4], moe_push_mlp.PushSaved(*rest[4:])
        experts = moe_mlp.ExpertParams(*parameters)
        found: list[Tensor | None] = [None] * len(moe_push_mlp.PushGradNeeds._fields)
        with torch.no_grad():
            if any(ctx.needs):
                found = list(
                    moe_push_mlp.backward(
                        ctx.exchange, grads[0].contiguous(), x, weights, experts, ctx.rule, saved,
                        ctx.needs, grad_scale=ctx.grad_scale,
                    )
                )  # fmt: skip
            dx, dweights, *dexperts = found
            dweights = None if dweights is None else dweights.to(ctx.weights_dtype)
            dadd = grads[0].to(ctx.add_dtype) if ctx.needs_input_grad[6] else None
        once = ("moe_mlp", "fastpar.reference.moe_mlp, in one process,", grads[0], x, *parameters)
        result = (
            None if grad is None else first_derivative_only(grad, *once) for grad in (dx, dweights, dadd, *dexperts)
        )
        return None, None, None, None, *result


def moe_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    rule: ExpertRule,
    add: Tensor | None,
    *,
    comm: Communicator,
    options: Dispatch,
    grad_scale: float,
    problem: Exception | None,
) -> Tensor:
    """`fastpar.ops.moe_mlp` of several ranks.

    problem  what is wrong with the experts on this rank

    Raises ValueError and TypeError for what is wrong here. Of a later call are ValueError for what is wrong on another
    rank, TimeoutError for a rank that did not come, and RuntimeError for rows that did not fit.
    """
    num_experts = comm.size * (len(experts.first) if experts.first.ndim else 0)
    problem = problem or _problem(x, indices, weights, add, num_experts, options)
    if problem is not None:
        _refuse(comm, problem)
    exchange = _exchange(comm, x, indices.shape[1], num_experts, options.max_rows)
    out: Tensor = SymmetricMoeMlp.apply(exchange, rule, grad_scale, indices, x, weights, add, *experts)
    return out
