"""The experts of one rank between dispatch and combine, as one node of the autograd graph, or two.

Composed of autograd's nodes, an expert keeps its rows of x, H and the activation, and its output for the gradient of
the weights: with top-8, eight copies of x and of the output. Here x [T, H] and the first GEMM's output H [N, 2I] are
saved, nothing else of their size. Backward redispatches x and dout together, gathers an expert's rows anew, and
computes the activation a second time.

The gradient of a choice's weight w needs no output y of the expert: with y = W2 a + b2 and da = W2' dout,

    <dout, y> = <da, a> + <dout, b2>

and da is computed anyway, if dout is not multiplied by w before the GEMM but a and dhidden are (Guo et al. 2025,
SonicMoE, arXiv:2512.14080). So "after" and "before" differ in little more than the bias.

Note: overlapped. What is to be added may be a function, which is called while results travel: then there are two nodes.

    launched = MoeMlpLaunch(...)      dispatch, experts, and their results are on their way
    add = function()                  a shared expert, say
    out = MoeMlpWait(launched, add)   they are there, and summed

Autograd runs the node that was made last first, so the backward of MoeMlpWait launches the redispatch of dout and x as
soon as dout is known, what the function did is differentiated next, and the backward of MoeMlpLaunch waits for what
comes. The bits are those of one node, but where the function uses x more than once: autograd adds gradients up as they
come. Nothing depends on that order but time: whoever comes too early launches or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastpar.comm.ranges import annotate
from fastpar.comm.recompute_cache import kept
from fastpar.contracts.moe import ExpertRule
from fastpar.ops._autograd import first_derivative_only, needs_grad
from fastpar.ops._buffers import new_buffer
from fastpar.ops._weight_grad import weighted_sum
from fastpar.ops.moe.chunks import ChunkedCombine, ChunkedRecv, dispatch_chunks, redispatch_chunks
from fastpar.ops.moe.dispatcher import DispatchHandle, ExpertResults, FinishCombine, Tables, TokenDispatcher
from fastpar.ops.moe.gemms import activate_rows, activate_rows_backward, matmul, wgrad_of
from fastpar.ops.moe.permute import dot_rows, gather_rows
from fastpar.ops.moe.plan import DispatchSpec
from fastpar.ops.moe.weights import ConcatExperts, ExpertWeights

_SCRATCH_ROWS = 256


class MoeCall(NamedTuple):
    """A checked call, apart from its tensors."""

    dispatcher: TokenDispatcher
    spec: DispatchSpec
    rule: ExpertRule
    grad_scale: float
    chunks: int


class MoeGradNeeds(NamedTuple):
    """Which gradients are asked for: of x, of the choices' weights, of each parameter."""

    x: bool
    weights: bool
    experts: ExpertWeights

    @classmethod
    def of(cls, needs: Sequence[bool]) -> MoeGradNeeds:
        """From what is needed of x, the weights, and all tensors of the experts: of concatenated ones all, or none."""
        return cls(needs[0], needs[1], ExpertWeights(*needs[2 : 2 + len(ExpertWeights._fields)]))

    def inputs(self, rule: ExpertRule) -> bool:
        """Whether they take x."""
        return bool(self.experts.first) or (self.weights and rule.weigh == "input")

    def exchanged(self, rule: ExpertRule) -> int:
        """A number for what backward exchanges; 0: nothing."""
        if not (self.x or self.weights or any(self.experts)):
            return 0
        return 1 + 2 * self.x + 4 * self.weights + 8 * self.inputs(rule)


class MoeGrads(NamedTuple):
    """Gradients; None: not asked for."""

    x: Tensor | None
    weights: Tensor | None
    experts: ExpertWeights


class ExpertScratch:
    """Named buffers [n, width] with room for the rows of any one expert.

    Experts run one after the other, and the next one uses the same buffers again: they stay in the caches, where
    matrices of all rows would not. They are one piece of memory: buffers of a few megabytes each would be new pages
    every time (see `new_buffer`).
    """

    def __init__(self, like: Tensor, handle: DispatchHandle, **widths: int) -> None:
        # In steps of 256 rows, so that the next batch, with a few more for its busiest expert, takes as much memory.
        most = -(-max(handle.counts.tolist(), default=0) // _SCRATCH_ROWS) * _SCRATCH_ROWS
        parts = new_buffer(like, (most * sum(widths.values()),)).split([most * width for width in widths.values()])
        self._parts = {name: part.view(most, widths[name]) for name, part in zip(widths, parts, strict=True)}

    def __call__(self, name: str, rows: int) -> Tensor:
        """The same memory for the same name."""
        return self._parts[name][:rows]


def _expert_rows(handle: DispatchHandle) -> list[tuple[int, slice]]:
    """The experts that have rows, and where."""
    pairs = zip(handle.splits, handle.counts.tolist(), strict=False)
    return [(expert, slice(begin, begin + count)) for expert, (begin, count) in enumerate(pairs) if count]


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward(
    call: MoeCall,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    needs: MoeGradNeeds | None = None,
    *,
    overlapped: bool = False,
) -> tuple[FinishCombine, DispatchHandle, Tensor | None]:
    """Waits for out [T, H], unless `overlapped` by something that the caller computes first; the handle; and the first
    GEMM's output of all rows if there will be a backward, for what it `needs`.
    """
    rule = call.rule
    spec = call.spec if needs is None else replace(call.spec, grads=needs.exchanged(rule))
    with annotate("fastpar::moe::dispatch"):
        handle, recv = dispatch_chunks(call.dispatcher, call.chunks, x, indices, weights, spec)
    first, second = experts.matrices(rule)
    saved = new_buffer(x, (handle.num_rows, first.shape[2])) if needs is not None else None
    # Written where the dispatcher wants them: no copy before they travel.
    results = handle.dispatcher.combine_buffer(handle, second.shape[2], x.dtype)
    # The first GEMM's output needs scratch only where it is not saved.
    outer = first.shape[2] if saved is None else 0
    scratch = ExpertScratch(x, handle, inputs=x.shape[1], hidden=outer, activation=second.shape[1])
    combine = ChunkedCombine(
        handle, call.chunks, ExpertResults(results, weighted=rule.weigh == "after", overlapped=overlapped)
    )
    with annotate("fastpar::moe::experts"):
        for expert, rows in _expert_rows(handle):
            # Results of the experts before this one may leave while it computes.
            combine.done(expert)
            count = rows.stop - rows.start
            row_weights = handle.row_weights[rows]
            inputs = gather_rows(
                recv.tables(expert)[0],
                recv.source[rows],
                scale=row_weights if rule.weigh == "input" else None,
                out=scratch("inputs", count),
            )
            hidden = scratch("hidden", count) if saved is None else saved[rows]
            matmul(inputs, first[expert], hidden, bias=_of(experts.first_bias, expert))
            scale = row_weights if rule.weigh == "before" else None
            activation = activate_rows(hidden, rule, scale, scratch("activation", count))
            matmul(activation, second[expert], results[rows], bias=_of(experts.second_bias, expert))
        # Chunks for experts without rows here were asked for by nobody.
        recv.finish()
    with annotate("fastpar::moe::combine"):
        return combine.launch(), handle, saved


def _of(bias: Any, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


# ---- backward --------------------------------------------------------------------------------------------------------


def redispatch_grads(
    call: MoeCall, handle: DispatchHandle, needs: MoeGradNeeds, x: Tensor, dout: Tensor, *, overlapped: bool
) -> ChunkedRecv:
    """Send what backward needs: dout, and x for the gradients that take it."""
    with annotate("fastpar::moe::dispatch"):
        return redispatch_chunks(
            handle, call.chunks, dout, x=x if needs.inputs(call.rule) else None, overlapped=overlapped
        )


def backward(
    call: MoeCall,
    handle: DispatchHandle,
    x: Tensor,
    hidden: Tensor,
    experts: ExpertWeights,
    needs: MoeGradNeeds,
    recv: ChunkedRecv,
) -> MoeGrads:
    """The gradients, of what `redispatch_grads` brings; a combine if one of x or of the weights is asked for."""
    work = ExpertBackward(call, handle, hidden, experts, needs, x.shape[1])
    combine = None
    if needs.x:
        work.drows = handle.dispatcher.combine_buffer(handle, x.shape[1], x.dtype)
    if needs.x or needs.weights:
        # Gradients of weights alone travel beside rows of one column: a combine has rows.
        rows_back = x.new_zeros((handle.num_rows, 1)) if work.drows is None else work.drows
        results = ExpertResults(rows_back, weighted=call.rule.weigh == "input", values=work.dots)
        combine = ChunkedCombine(handle, call.chunks, results)
    with annotate("fastpar::moe::experts"):
        for expert, rows in _expert_rows(handle):
            if combine is not None:
                combine.done(expert)
            *inputs, douts = recv.tables(expert)
            work.run(expert, rows, recv.source[rows], douts, inputs[0] if inputs else ())
        recv.finish()
    if combine is None:
        return MoeGrads(None, None, work.grads)
    with annotate("fastpar::moe::combine"):
        dx, dweights = combine.launch()(None)
    return MoeGrads(dx if needs.x else None, dweights, work.grads)


class ExpertBackward:
    """Gradients expert by expert: of its parameters, of its rows and of their weights."""

    def __init__(
        self,
        call: MoeCall,
        handle: DispatchHandle,
        hidden: Tensor,
        experts: ExpertWeights,
        needs: MoeGradNeeds,
        width: int,
    ) -> None:
        self.call, self.handle, self.hidden, self.experts = call, handle, hidden, experts
        self.drows: Tensor | None = None
        self.dots = torch.zeros_like(handle.row_weights) if needs.weights else None
        inner, outer = experts.matrices(call.rule)[1].shape[1], hidden.shape[1]
        self.scratch = ExpertScratch(hidden, handle, dout=width, dactivation=inner, activation=inner, dhidden=outer)
        pairs = zip(experts, needs.experts, strict=True)
        self.grads = ExpertWeights(*(_like(p) if wanted else None for p, wanted in pairs))
        for expert, count in enumerate(handle.counts.tolist()):
            if count == 0:  # no GEMM writes there
                for grad in self.grads:
                    if grad is not None:
                        grad[expert].zero_()

    def run(self, expert: int, rows: slice, source: Tensor, douts: Tables, inputs: Tables) -> None:
        """The gradients of one expert's parameters and rows, which are those of `source` in the tables."""
        rule, scratch, grads = self.call.rule, self.scratch, self.grads
        first, second = self.experts.matrices(rule)
        count, row_weights = rows.stop - rows.start, self.handle.row_weights[rows]
        dots = None if self.dots is None or rule.weigh == "input" else self.dots[rows]

        dout = gather_rows(douts, source, out=scratch("dout", count))
        dactivation = matmul(dout, second[expert].t(), scratch("dactivation", count))
        activation = scratch("activation", count)
        dhidden = scratch("dhidden", count)
        # dout is not weighed yet: da without the weight is what the weight's gradient takes.
        scale = None if rule.weigh == "input" else row_weights
        activate_rows_backward(dactivation, self.hidden[rows], rule, scale, activation, dhidden, dots)
        self._second(expert, dout, activation, row_weights, dots)

        if grads.first is not None:
            # Into the rows of dout, which are read no more.
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
        """What depends on the second GEMM: its parameters' gradients, and the bias' share of the weights'."""
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
    return parameter.new_buffer() if isinstance(parameter, ConcatExperts) else new_buffer(parameter, parameter.shape)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any, call: MoeCall, handle: DispatchHandle, needs: MoeGradNeeds, weights: Tensor, *saved: Tensor | None
) -> None:
    """What `_grads_of` takes: `saved` are x, the first GEMM's output and the parameters."""
    ctx.call, ctx.handle, ctx.needs, ctx.weights_dtype = call, handle, needs, weights.dtype
    ctx.save_for_backward(*saved)


def _grads_of(ctx: Any, upstream: Tensor, recv: ChunkedRecv | None = None) -> tuple[Tensor | None, ...]:
    """Gradients of x, the weights and the parameters; `recv` if it was launched before."""
    x, hidden, *parameters = ctx.saved_tensors
    call, handle, needs = ctx.call, ctx.handle, ctx.needs
    found = MoeGrads(None, None, ExpertWeights(None, None))
    with torch.no_grad():
        if needs.exchanged(call.rule):
            recv = recv or redispatch_grads(call, handle, needs, x, upstream.contiguous(), overlapped=False)
            found = backward(call, handle, x, hidden, ExpertWeights.of(parameters), needs, recv)
        dweights = None if found.weights is None else found.weights.to(ctx.weights_dtype)
    once = ("moe_mlp", "moe_dispatch, PyTorch's operations and moe_combine", upstream, x, *parameters)
    result = (found.x, dweights, *found.experts.tensors(len(parameters)))
    return tuple(None if grad is None else first_derivative_only(grad, *once) for grad in result)


class MoeMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MoeCall, indices: Tensor, add: Tensor | None, x: Tensor, weights: Tensor,
                *parameters: Tensor | None) -> Tensor:  # fmt: skip
        needs = MoeGradNeeds.of(ctx.needs_input_grad[3:])

        def run() -> tuple[Tensor, DispatchHandle, Tensor | None]:
            finish, handle, hidden = forward(call, x, indices, weights, ExpertWeights.of(parameters), needs)
            with annotate("fastpar::moe::combine"):
                return finish(add)[0], handle, hidden

        out, handle, hidden = kept(run)
        ctx.add_dtype = None if add is None else add.dtype
        _save(ctx, call, handle, needs, weights, x, hidden, *parameters)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dadd = grads[0].to(ctx.add_dtype) if ctx.needs_input_grad[2] else None
        return None, None, dadd, *_grads_of(ctx, grads[0])


# ---- overlapped: see the module's note -------------------------------------------------------------------------------


class OverlapState:
    """What the two nodes of a call hand each other, besides the gradient.

    finish      from the first to the second: returns the result
    redispatch  likewise, for backward: launches that of x and dout
    recv        from the second's backward to the first's
    """

    finish: FinishCombine | None = None
    redispatch: Callable[[Tensor, Tensor], ChunkedRecv] | None = None
    recv: ChunkedRecv | None = None


class MoeMlpLaunch(torch.autograd.Function):
    """Returns a placeholder in the shape of the output, whose gradient is that of the output."""

    @staticmethod
    def forward(ctx: Any, call: MoeCall, state: OverlapState, indices: Tensor, x: Tensor, weights: Tensor,
                *parameters: Tensor | None) -> Tensor:  # fmt: skip
        needs, experts = MoeGradNeeds.of(ctx.needs_input_grad[3:]), ExpertWeights.of(parameters)

        def run() -> tuple[DispatchHandle, Tensor | None]:
            state.finish, handle, hidden = forward(call, x, indices, weights, experts, needs, overlapped=True)
            return handle, hidden

        handle, hidden = kept(run)
        ctx.state = state
        state.redispatch = lambda x, dout: redispatch_grads(call, handle, needs, x, dout, overlapped=True)
        _save(ctx, call, handle, needs, weights, x, hidden, *parameters)
        return x.new_empty(()).expand(x.shape)  # autograd wants a tensor of dout's shape; this one takes no memory

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        recv, ctx.state.recv = ctx.state.recv, None
        return None, None, None, *_grads_of(ctx, grads[0], recv)


class MoeMlpWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: OverlapState, launched: Tensor | None, add: Tensor | None, x: Tensor) -> Tensor:
        def run() -> Tensor:
            finish, state.finish = state.finish, None
            assert finish is not None
            with annotate("fastpar::moe::combine"):
                return finish(add)[0]

        ctx.state, ctx.add_dtype = state, None if add is None else add.dtype
        # x as well: where a layer is recomputed to have it, that is before anything is launched.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return kept(run)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (dout,) = grads
        (x,) = ctx.saved_tensors
        # Not where the experts' node is not to run: nobody would take what was sent.
        if x is not None and torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
            with torch.no_grad():
                ctx.state.recv = ctx.state.redispatch(x, dout.contiguous())
        _, of_launched, of_add, _ = ctx.needs_input_grad
        return None, dout if of_launched else None, dout.to(ctx.add_dtype) if of_add else None, None


def moe_mlp_overlapped(
    call: MoeCall,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor | None],
    function: Callable[[], Tensor | None],
) -> Tensor:
    """`fastpar.ops.moe_mlp` with function() added, which is called while results travel."""
    state, launched = OverlapState(), None
    if needs_grad(x, weights, *parameters):
        launched = MoeMlpLaunch.apply(call, state, indices, x, weights, *parameters)
    else:

        def run() -> None:
            state.finish = forward(call, x, indices, weights, ExpertWeights.of(parameters), overlapped=True)[0]

        with torch.no_grad():
            kept(run)
    add = function()
    if add is not None and add.shape != x.shape:
        raise ValueError(f"what is added must be {tuple(x.shape)}, as x is, got {tuple(add.shape)}")
    return cast(Tensor, MoeMlpWait.apply(state, launched, add, x.detach()))
