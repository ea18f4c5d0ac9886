"""The experts of one rank between dispatch and combine, as one node of the autograd graph.

Composed of autograd's nodes, an expert keeps its rows of x, H and the activation, and its output for the gradient of
the weights: with top-8, eight copies of x and of the output. Here x [T, H] and the first products H [N, 2I] are kept,
nothing else of their size. Backward sends x and dout together again, gathers an expert's rows anew, and computes the
activation a second time.

The gradient of a choice's weight w needs no output y of the expert: with y = W2 a + b2 and da = W2' dout,

    <dout, y> = <da, a> + <dout, b2>

and da is computed anyway, if dout is not multiplied by w before the product but a and dhidden are (Guo et al. 2025,
SonicMoE, arXiv:2512.14080). So "after" and "before" differ in little more than the bias.

Note: memory. Experts run one after the other, and rows of one expert go through buffers that the next one uses again:
they stay in the caches, where matrices of all rows would not. Results are written where the exchange wants them.

What is to be added may be a function, which is called while results travel: then there are two nodes (`Flight`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm.recompute_cache import kept
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops._buffers import new_buffer
from fastpar.ops._weight_grad import weighted_sum
from fastpar.ops.moe import chunks as _moe_chunks
from fastpar.ops.moe.activation import activate_rows, activate_rows_backward
from fastpar.ops.moe.chunks import Arrivals
from fastpar.ops.moe.dispatcher import Exchange, Finish, Tables
from fastpar.ops.moe.gemms import matmul, wgrad_of
from fastpar.ops.moe.permute import dot_rows, gather_rows
from fastpar.ops.moe.plan import DispatchPlan, Padding, Terms
from fastpar.ops.moe.weights import Stack, joined, parted
from fastpar.reference.moe_mlp import ExpertRule

_ROOM = 256


class Call(NamedTuple):
    """A checked call, apart from its tensors."""

    exchange: Exchange
    num_experts: int
    rule: ExpertRule
    padding: Padding
    payload: str | None
    grad_scale: float
    chunks: int


class Experts(NamedTuple):
    """The parameters of this rank's experts, or their gradients: tensors, or a `Stack` of several."""

    first: Any
    second: Any
    first_bias: Any
    second_bias: Any

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Experts:
        """From the tensors of one part, or of several, one after the other."""
        return cls(*joined(tensors, len(cls._fields)))

    def tensors(self, count: int) -> list[Any]:
        """The inverse, also of gradients of `count` tensors."""
        return parted(self, count)

    def matrices(self, rule: ExpertRule) -> tuple[Any, Any]:
        """Both as [E, in, out]."""
        if rule.transposed:
            return self.first, self.second
        return self.first.transpose(1, 2), self.second.transpose(1, 2)


class Wants(NamedTuple):
    """Which gradients are asked for: of x, of the choices' weights, of each parameter."""

    x: bool
    weights: bool
    experts: Experts

    @classmethod
    def of(cls, needs: Sequence[bool]) -> Wants:
        """From what is needed of x, the weights, and all tensors of the experts: of a Stack's parts all, or none."""
        return cls(needs[0], needs[1], Experts(*needs[2 : 2 + len(Experts._fields)]))

    def inputs(self, rule: ExpertRule) -> bool:
        """Whether they take x."""
        return bool(self.experts.first) or (self.weights and rule.weigh == "input")

    def exchanged(self, rule: ExpertRule) -> int:
        """A number for what backward exchanges; 0: nothing."""
        if not (self.x or self.weights or any(self.experts)):
            return 0
        return 1 + 2 * self.x + 4 * self.weights + 8 * self.inputs(rule)


class _Scratch:
    """Named buffers [n, width] with room for the rows of any one expert.

    One piece of memory: buffers of a few megabytes each would be new pages every time (see `new_buffer`). Room in steps
    of 256 rows, so that it is as large when the next batch has a few rows more for its busiest expert.
    """

    def __init__(self, like: Tensor, plan: DispatchPlan, **widths: int) -> None:
        most = -(-max(plan.counts.tolist(), default=0) // _ROOM) * _ROOM
        parts = new_buffer(like, (most * sum(widths.values()),)).split([most * width for width in widths.values()])
        self._parts = {name: part.view(most, widths[name]) for name, part in zip(widths, parts, strict=True)}

    def __call__(self, name: str, rows: int) -> Tensor:
        """The same memory for the same name."""
        return self._parts[name][:rows]


def _expert_rows(plan: DispatchPlan) -> list[tuple[int, slice]]:
    """The experts that have rows, and where."""
    pairs = zip(plan.splits, plan.counts.tolist(), strict=False)
    return [(expert, slice(begin, begin + count)) for expert, (begin, count) in enumerate(pairs) if count]


def forward(
    call: Call,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: Experts,
    wants: Wants | None = None,
    *,
    beside: bool = False,
) -> tuple[Finish, DispatchPlan, Tensor | None]:
    """What waits for out [T, H], `beside` something else that the caller computes; the plan; and the first products of
    all rows if there will be a backward, for what it `wants`.
    """
    rule = call.rule
    plan, arrivals = _moe_chunks.dispatch(
        call.exchange,
        call.chunks,
        x,
        indices,
        weights,
        call.num_experts,
        Terms(call.padding, call.payload, 0 if wants is None else wants.exchanged(rule)),
    )
    first, second = experts.matrices(rule)
    products = new_buffer(x, (plan.num_rows, first.shape[2])) if wants is not None else None
    results = plan.exchange.empty_rows(plan, second.shape[2], x.dtype)
    outer = first.shape[2] if products is None else 0
    scratch = _Scratch(x, plan, inputs=x.shape[1], hidden=outer, activation=second.shape[1])
    departures = _moe_chunks.Departures(plan, call.chunks, results, weighted=rule.weigh == "after", beside=beside)
    for expert, rows in _expert_rows(plan):
        departures.done(expert)
        count = rows.stop - rows.start
        row_weights = plan.row_weights[rows]
        inputs = gather_rows(
            arrivals.tables(expert)[0],
            arrivals.source[rows],
            scale=row_weights if rule.weigh == "input" else None,
            out=scratch("inputs", count),
        )
        hidden = scratch("hidden", count) if products is None else products[rows]
        matmul(inputs, first[expert], hidden, bias=_of(experts.first_bias, expert))
        scale = row_weights if rule.weigh == "before" else None
        activation = activate_rows(hidden, rule, scale, scratch("activation", count))
        matmul(activation, second[expert], results[rows], bias=_of(experts.second_bias, expert))
    arrivals.finish()
    return departures.launch(), plan, products


class Grads(NamedTuple):
    """Gradients; None: not asked for."""

    x: Tensor | None
    weights: Tensor | None
    experts: Experts


def send_again(call: Call, plan: DispatchPlan, wants: Wants, x: Tensor, dout: Tensor, *, beside: bool) -> Arrivals:
    """What backward dispatches."""
    again = x if wants.inputs(call.rule) else None
    return _moe_chunks.send(plan, call.chunks, dout, again=again, beside=beside)


def backward(
    call: Call, plan: DispatchPlan, x: Tensor, hidden: Tensor, experts: Experts, wants: Wants, arrivals: Arrivals
) -> Grads:
    """The gradients, of what `send_again` brings; one exchange back if one of x or of the weights is asked for."""
    work = _Backward(call, plan, hidden, experts, wants, x.shape[1])
    departures = None
    if wants.x:
        work.drows = plan.exchange.empty_rows(plan, x.shape[1], x.dtype)
    if wants.x or wants.weights:
        rows_back = x.new_zeros((plan.num_rows, 1)) if work.drows is None else work.drows
        weighted = call.rule.weigh == "input"
        departures = _moe_chunks.Departures(plan, call.chunks, rows_back, weighted=weighted, values=work.dots)
    for expert, rows in _expert_rows(plan):
        if departures is not None:
            departures.done(expert)
        *inputs, douts = arrivals.tables(expert)
        work.run(expert, rows, arrivals.source[rows], douts, inputs[0] if inputs else ())
    arrivals.finish()
    dx, dweights = (None, None) if departures is None else departures.launch()(None)
    return Grads(dx if wants.x else None, dweights, work.grads)


class _Backward:
    """Expert by expert."""

    def __init__(
        self, call: Call, plan: DispatchPlan, hidden: Tensor, experts: Experts, wants: Wants, width: int
    ) -> None:
        self.call, self.plan, self.hidden, self.experts, self.wants = call, plan, hidden, experts, wants
        self.drows: Tensor | None = None
        self.dots = torch.zeros_like(plan.row_weights) if wants.weights else None
        inner, outer = experts.matrices(call.rule)[1].shape[1], hidden.shape[1]
        self.scratch = _Scratch(hidden, plan, dout=width, dactivation=inner, activation=inner, dhidden=outer)
        pairs = zip(experts, wants.experts, strict=True)
        self.grads = Experts(*(_like(p) if wanted else None for p, wanted in pairs))
        for expert, count in enumerate(plan.counts.tolist()):
            if count == 0:
                for grad in self.grads:
                    if grad is not None:
                        grad[expert].zero_()

    def run(self, expert: int, rows: slice, source: Tensor, douts: Tables, inputs: Tables) -> None:
        """The gradients of one expert's parameters and rows, which are those of `source` in the tables."""
        rule, plan, scratch, grads = self.call.rule, self.plan, self.scratch, self.grads
        first, second = self.experts.matrices(rule)
        count, row_weights = rows.stop - rows.start, plan.row_weights[rows]
        dots = None if self.dots is None or rule.weigh == "input" else self.dots[rows]

        dout = gather_rows(douts, source, out=scratch("dout", count))
        dactivation = matmul(dout, second[expert].t(), scratch("dactivation", count))
        activation = scratch("activation", count)
        dhidden = scratch("dhidden", count)
        scale = None if rule.weigh == "input" else row_weights
        activate_rows_backward(dactivation, self.hidden[rows], rule, scale, activation, dhidden, dots)
        self._second(expert, dout, activation, row_weights, dots)

        if grads.first is not None:
            # What it read last is free: the rows of dout.
            x = gather_rows(inputs, source, scale=row_weights if rule.weigh == "input" else None, out=dout)
            self._weight(x, dhidden, grads.first[expert])
        if grads.first_bias is not None:
            self._bias(dhidden, None, grads.first_bias[expert])
        if self.drows is not None or (self.dots is not None and rule.weigh == "input"):
            target = dout if self.drows is None else self.drows[rows]
            drows = matmul(dhidden, first[expert].t(), target)
            if self.dots is not None and rule.weigh == "input":
                self.dots[rows] = dot_rows(drows, inputs, source)

    def _second(self, expert: int, dout: Tensor, activation: Tensor, row_weights: Tensor, dots: Tensor | None) -> None:
        """What depends on the second product: its parameters' gradients, and the bias' share of the weights'."""
        is_after = self.call.rule.weigh == "after"
        if self.grads.second is not None:
            self._weight(activation, dout, self.grads.second[expert])
        if self.grads.second_bias is not None:
            self._bias(dout, row_weights if is_after else None, self.grads.second_bias[expert])
        if dots is not None and is_after and self.experts.second_bias is not None:
            bias = self.experts.second_bias[expert][None]
            dots += dot_rows(dout, [bias], torch.zeros(len(dout), dtype=torch.int64, device=dout.device))

    def _weight(self, inputs: Tensor, grads: Tensor, out: Tensor) -> None:
        left, right = (inputs, grads) if self.call.rule.transposed else (grads, inputs)
        wgrad_of(left, right, out, alpha=self.call.grad_scale)

    def _bias(self, grads: Tensor, row_weights: Tensor | None, out: Tensor) -> None:
        out.copy_(weighted_sum(grads, row_weights) * self.call.grad_scale)


def _like(parameter: Any) -> Any:
    return parameter.new_buffer() if isinstance(parameter, Stack) else new_buffer(parameter, parameter.shape)


def _of(bias: Any, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


# ---- autograd


def keep(ctx: Any, call: Call, plan: DispatchPlan, wants: Wants, weights: Tensor, *saved: Tensor | None) -> None:
    """What `grads_of` needs: `saved` are x, the first products and the parameters."""
    ctx.call, ctx.plan, ctx.wants, ctx.weights_dtype = call, plan, wants, weights.dtype
    ctx.save_for_backward(*saved)


def grads_of(ctx: Any, upstream: Tensor, sent: Arrivals | None = None) -> tuple[Tensor | None, ...]:
    """Of x, the weights and the parameters; `sent` if it was launched before."""
    x, hidden, *parameters = ctx.saved_tensors
    call, plan, wants = ctx.call, ctx.plan, ctx.wants
    found = Grads(None, None, Experts(None, None, None, None))
    with torch.no_grad():
        if wants.exchanged(call.rule):
            arrivals = sent or send_again(call, plan, wants, x, upstream.contiguous(), beside=False)
            found = backward(call, plan, x, hidden, Experts.of(parameters), wants, arrivals)
        dweights = None if found.weights is None else found.weights.to(ctx.weights_dtype)
    once = ("moe_mlp", "moe_dispatch, PyTorch's operations and moe_combine", upstream, x, *parameters)
    result = (found.x, dweights, *found.experts.tensors(len(parameters)))
    return tuple(None if grad is None else first_derivative_only(grad, *once) for grad in result)


class MoeMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        indices: Tensor,
        add: Tensor | None,
        x: Tensor,
        weights: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        experts = Experts.of(parameters)
        needs = ctx.needs_input_grad
        wants = Wants.of(needs[3:])

        def run() -> tuple[Tensor, DispatchPlan, Tensor | None]:
            finish, plan, hidden = forward(call, x, indices, weights, experts, wants)
            return finish(add)[0], plan, hidden

        out, plan, hidden = kept(run)
        ctx.add_dtype = None if add is None else add.dtype
        keep(ctx, call, plan, wants, weights, x, hidden, *parameters)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dadd = grads[0].to(ctx.add_dtype) if ctx.needs_input_grad[2] else None
        return None, None, dadd, *grads_of(ctx, grads[0])
