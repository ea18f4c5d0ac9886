"""Feed-forward experts: dispatch, two GEMMs per expert with an activation between them, combine.

`moe_mlp` checks its arguments and gives them to the first of `MLP_BACKENDS` that supports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import Communicator, GroupLike
from fastpar.contracts.linear import autocast_dtype
from fastpar.contracts.moe import ExpertRule, activate, check_experts
from fastpar.ops._autograd import needs_grad, scale_grad
from fastpar.ops.moe import mlp_triton
from fastpar.ops.moe.dispatch_combine import moe_combine, moe_dispatch
from fastpar.ops.moe.dispatcher import TokenDispatcher
from fastpar.ops.moe.experts import MoeCall, MoeMlp, forward, moe_mlp_overlapped
from fastpar.ops.moe.grouped_linear import grouped_linear
from fastpar.ops.moe.plan import DEFAULT_DISPATCH, Dispatch, DispatchSpec
from fastpar.ops.moe.transports import symmetric
from fastpar.ops.moe.transports.select import find_dispatcher
from fastpar.ops.moe.weights import ConcatExperts, ExpertWeights


@checked(unless_agreed="group")
def moe_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    replicas: ExpertWeights | None = None,
    rule: ExpertRule | None = None,
    add: Tensor | Callable[[], Tensor | None] | None = None,
    group: GroupLike = None,
    dispatch: Dispatch | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """Every token through the experts that it has chosen, which lie on the ranks of `group`.

        x        [T, H]      this rank's tokens
        indices  [T, K]      see `moe_dispatch`
        weights  [T, K]
        experts              this rank's: first W1 [E_r, 2I, H] (gate and up in one), second W2 [E_r, H, I], biases
                             b1 [E_r, 2I] and b2 [E_r, H] or None; all in the dtype of x (torch.autocast converts).
                             Without gate and transposed: see `ExpertWeights`
        add      [T, H]      added in the combine's sum: a shared expert's output, a residual. A function that gives it
                             is called while results travel, and its backward runs while dout does: see below
        out      [T, H]

        forward  h = x W1' + b1, a = f(h), y = a W2' + b2 of each row, out = add + sum over k of w y
        dgrad    da = dout W2, dh = w f'(h) da, dx = sum over k of dh W1, dw = <da, a> + <dout, b2>
        wgrad    dW2 = (dout)' (w a), dW1 = dh' x; times grad_scale; zeros for an expert without rows

    That is for rule.weigh "after"; see `ExpertRule`. The number of experts is E_r times the ranks of the group. Saved
    for backward: x and h. Backward computes a again, and dispatches x and dout in one exchange.

    A function that is to be called beside the combine is called before the dispatch where nothing travels: on one rank,
    on ranks that share memory, and on devices other than the CPU. The bits are those of its result given as a tensor,
    but that autograd adds up gradients of x in another order if the function uses x more than once. It must not raise
    on some ranks only.

    Collectives: those of `moe_dispatch` and `moe_combine`, once each way. On all ranks the same inputs have to need
    gradients. What needs none costs no GEMM.

    Args:
        replicas: weights of more experts of this rank, which come behind the others in `indices`, the same number of
            them on every rank: E_r counts them too. On CPU that saves a copy of all in one. As those of the others they
            need gradients, or do not.
        dispatch: how rows travel; see `Dispatch`, and below for transport="symmetric".
        grad_scale: a factor of the gradients of the experts' parameters, for a mean over data-parallel ranks where
            tokens of more ranks meet in an expert than in other parameters.

    transport="symmetric" is for CUDA ranks that reach each other's memory, and is never chosen by "auto" (not measured
    yet). Rows are written into the memory of their experts' ranks and results read there, float32 sums over k with one
    rounding; three exchanges in backward, and no synchronisation with the host but in a group's first call, so that
    steps can be captured in CUDA graphs after one outside. Memory is that of max_rows rows, however many come: two
    tokens for each in all layers together, and h in each layer. More rows than there is room for are an error: the
    output is NaN on every rank, and a later call raises RuntimeError. So are arguments that are wrong on one rank: it
    raises them, and the others ValueError, later. The group needs another max_rows after that. No padding, no payload.

    Worked example: x [[2]], indices [[0, 1]], weights [[0.5, 0.25]], two experts with relu, first [[[1]], [[3]]],
    second [[[10]], [[20]]]: y 20 and 120, out [[40]]; for dout 1: dx [[20]], dweights [[20, 120]], dfirst [[[10]],
    [[10]]], dsecond [[[1]], [[1.5]]].

    On one CUDA rank Triton kernels do all of it (see `fastpar.kernels.moe_mlp`). On other devices
    this is `moe_dispatch`, PyTorch's operations and `moe_combine`, which save more. Under torch.compile it runs as it
    is, between two graphs.

    Raises ValueError and TypeError on every rank for what is wrong on one; CommError as `Communicator` does;
    TimeoutError where a rank does not come under transport="symmetric".
    """
    if torch.compiler.is_compiling():  # a graph cannot hold a dispatch
        return torch.compiler.disable(moe_mlp)(
            x, indices, weights, experts, replicas=replicas, rule=rule, add=add, group=group, dispatch=dispatch,
            grad_scale=grad_scale,
        )  # fmt: skip
    rule, options = rule or ExpertRule(), dispatch or DEFAULT_DISPATCH
    dtype = autocast_dtype(x) if x.is_floating_point() else None
    problem: Exception | None = _check_kinds(experts, replicas)
    if problem is None:
        if dtype is not None:
            x, experts = x.to(dtype), experts.map(lambda p: p.to(dtype))
            replicas = replicas and replicas.map(lambda p: p.to(dtype))
        problem = check_experts(x, weights, *experts, rule) or _check_replicas(x, weights, experts, replicas, rule)
    parameters = list(experts) if isinstance(experts, ExpertWeights) else [None]
    # Also of wrong weights, as far as there are any: the other ranks gather loads of as many experts.
    first = experts[0] if isinstance(experts, (tuple, list)) and experts else None
    per_rank = len(first) if isinstance(first, Tensor) and first.dim() else 1
    if isinstance(replicas, ExpertWeights) and isinstance(replicas.first, Tensor) and replicas.first.dim():
        per_rank += len(replicas.first)
    if replicas is not None and problem is None:
        parameters += replicas
    comm = Communicator.of(group)
    call = MlpArguments(x, indices, weights, parameters, per_rank, rule, add, comm, options, grad_scale, problem)
    return next(run for supports, run in MLP_BACKENDS if supports(call))(call)


class MlpArguments(NamedTuple):
    """A call of `moe_mlp` in the dtype that it computes in.

    parameters  of the experts, and behind them those of replicas
    per_rank    experts of this rank, replicas included
    problem     what is wrong with this rank's weights: the backend raises it where all ranks do
    """

    x: Tensor
    indices: Tensor
    weights: Tensor
    parameters: list[Tensor | None]
    per_rank: int
    rule: ExpertRule
    add: Tensor | Callable[[], Tensor | None] | None
    comm: Communicator
    options: Dispatch
    grad_scale: float
    problem: Exception | None

    def added(self) -> Tensor | None:
        """What is to be added; calls the function that returns it."""
        return self.add() if callable(self.add) else self.add

    def dense_experts(self) -> ExpertWeights:
        """All experts in one tensor each."""
        experts = ExpertWeights.of(self.parameters)
        return experts.map(lambda p: torch.cat(p.parts) if isinstance(p, ConcatExperts) else p)

    def dispatcher(self) -> TokenDispatcher:
        return find_dispatcher(self.comm, self.options, self.x.device)

    def begin(self, dispatcher: TokenDispatcher, add: Tensor | Callable[[], Tensor | None] | None) -> MoeCall:
        """What the dispatcher is asked for; raises on all ranks what is wrong on one."""
        problem = self.problem or _check_add(self.x, add)
        spec = DispatchSpec(self.per_rank * self.comm.size, self.options.padding, self.options.payload, problem=problem)
        if problem is not None:
            dispatcher.dispatch(self.x, self.indices, self.weights, spec)
        return MoeCall(dispatcher, spec, self.rule, self.grad_scale, self.options.chunks)


def _check_add(x: Tensor, add: Tensor | Callable[[], Tensor | None] | None) -> ValueError | None:
    if add is None or callable(add):
        return None
    if add.shape != x.shape or add.device != x.device:
        return ValueError(
            f"add must be as x is, {tuple(x.shape)} on {x.device}, got {tuple(add.shape)} on {add.device}"
        )
    return None


def _check_kinds(experts: object, replicas: object) -> TypeError | None:
    for name, given in (("experts", experts), ("replicas", replicas)):
        if given is None and name == "replicas":
            continue
        if not isinstance(given, ExpertWeights):
            return TypeError(f"{name} must be ExpertWeights(first, second, ..), got {type(given).__name__}")
        for field, tensor in zip(given._fields, given, strict=True):
            if tensor is None and field.endswith("bias"):
                continue
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                return TypeError(f"{name}.{field} must be a dense tensor, got {type(tensor).__name__}")
    return None


def _check_replicas(
    x: Tensor, weights: Tensor, experts: ExpertWeights, replicas: ExpertWeights | None, rule: ExpertRule
) -> Exception | None:
    """What is wrong with the weights of replicas, if anything."""
    if replicas is None:
        return None
    for name, one, other in zip(experts._fields, experts, replicas, strict=True):
        if (one is None) != (other is None) or (one is not None and one.requires_grad != other.requires_grad):
            return ValueError(f"replicas must have {name}, and its gradient, where the other experts do")
    return check_experts(x, weights, *replicas, rule)


# ---- backends --------------------------------------------------------------------------------------------------------


def _symmetric(call: MlpArguments) -> Tensor:
    """Between CUDA ranks that reach each other's memory, on request."""
    add = call.added()
    experts = ExpertWeights.of(call.parameters) if call.problem else call.dense_experts()
    return symmetric.moe_mlp(
        call.x, call.indices, call.weights, experts, call.rule, add,
        comm=call.comm, options=call.options, grad_scale=call.grad_scale, problem=call.problem,
    )  # fmt: skip


def _takes_triton(call: MlpArguments) -> bool:
    first, options = call.parameters[0], call.options
    # Its kernels scale no gradients, and nothing travels that could be in 8 bits. What is wrong goes where ranks agree.
    if first is None or call.problem is not None or call.grad_scale != 1.0 or options.payload is not None:
        return False
    return mlp_triton.applies(call.x, first, size=call.comm.size, padding=options.padding)


def _triton(call: MlpArguments) -> Tensor:
    """On one CUDA rank: Triton kernels do all of it."""
    add = call.added()
    call.begin(call.dispatcher(), add)
    return mlp_triton.moe_mlp(call.x, call.indices, call.weights, call.dense_experts(), call.rule, add)


def _is_fused(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _fused(call: MlpArguments) -> Tensor:
    """On the CPU: one autograd node from dispatch to combine, or two around a function that is called in between."""
    dispatcher = call.dispatcher()
    # Where nothing travels there is nothing that a function could hide.
    add = call.add if dispatcher.overlaps else call.added()
    begun = call.begin(dispatcher, add)
    x, indices, weights, parameters = call.x.contiguous(), call.indices, call.weights, call.parameters
    if callable(add):
        return moe_mlp_overlapped(begun, x, indices, weights, parameters, add)
    if needs_grad(x, weights, add, *parameters):
        return MoeMlp.apply(begun, indices, add, x, weights, *parameters)
    with torch.no_grad():
        return forward(begun, x, indices, weights, ExpertWeights.of(parameters))[0](add)[0]


def _composed(call: MlpArguments) -> Tensor:
    """Anywhere: operations that autograd knows one by one."""
    add, rule = call.added(), call.rule
    spec = call.begin(call.dispatcher(), add).spec
    experts = call.dense_experts().map(lambda p: scale_grad(p, call.grad_scale))
    rows, row_weights, handle = moe_dispatch(
        call.x, call.indices, call.weights, num_experts=spec.num_experts, group=call.comm, dispatch=call.options
    )
    where: dict[str, Any] = {"counts": handle.counts, "transposed": rule.transposed}
    scale = row_weights[:, None].to(rows.dtype)
    if rule.weigh == "input":
        rows = rows * scale
    hidden = activate(grouped_linear(rows, experts.first, handle.splits, experts.first_bias, **where), rule)
    if rule.weigh == "before":
        hidden = hidden * scale
    results = grouped_linear(hidden, experts.second, handle.splits, experts.second_bias, **where)
    return moe_combine(results, handle, row_weights if rule.weigh == "after" else None, add=add)


Backend = tuple[Callable[[MlpArguments], bool], Callable[[MlpArguments], Tensor]]
# What a backend supports, and what it does. The first that supports a call has it.
MLP_BACKENDS: tuple[Backend, ...] = (
    (lambda call: call.options.transport == "symmetric" and call.comm.size > 1, _symmetric),
    (_takes_triton, _triton),
    (lambda call: _is_fused(call.x), _fused),
    (lambda call: True, _composed),
)
