"""Optimizer steps over many tensors in one pass: AdamW, SGD with momentum, Lion.

One call reads every gradient, parameter and state once and writes what changes once: the gradient is multiplied by a
factor (unscaling and clipping), the float32 maths is done in registers, states and parameters are narrowed to what they
are stored in, and a low-precision copy of a float32 master is written on the way. torch does each of these in a pass of
its own, and its fused AdamW wants parameters and states in one dtype.

Note: results per element. An element's result depends on its own values, on the arguments, and (stochastic rounding) on
its index; 8-bit states add the other elements of its block of 256. It does not depend on where a tensor is cut, on
alignment, neighbours or threads: the last elements of a tensor go through the same instructions as the others, in a
padded register. So the shards of a tensor give the bits of the whole. 8-bit blocks begin with a tensor's first element:
shards keep the bits where they are cut at multiples of 256 elements.

Note: formats. fastpar/contracts/optimizer_formats.py defines stochastic rounding, bfloat16 with a remainder, and 8-bit
blocks.

All is multi-tensor: thousands of tensors of any sizes, empty ones and those above 2^31 elements too. On CPU the work is
divided by elements, not by tensors. Nothing here is differentiable: the ops change their arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import check_left_out, checked
from fastpar.contracts.optimizer import Step as Step
from fastpar.contracts.optimizer import StochasticRounding as StochasticRounding
from fastpar.contracts.optimizer import check_betas, check_momentum, check_step, step_number
from fastpar.contracts.optimizer_facts import Facts, KnownFacts, facts_of
from fastpar.ops._backends import HAS_TRITON, kernels_of, triton

_STEPS = ("adamw_step", "sgd_step", "lion_step")


# ---- launchers -------------------------------------------------------------------------------------------------------


implementation = kernels_of("optimizer")


class _Dense:
    """Contiguous versions of lists of tensors, whose contents are copied back when the step is done."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []

    def of(self, tensors: Sequence[Tensor], *, written: bool = True) -> list[Tensor]:
        if all(map(Tensor.is_contiguous, tensors)):
            return list(tensors)
        dense = [x.contiguous() for x in tensors]
        if written:
            self._back += [(x, d) for x, d in zip(tensors, dense, strict=True) if d is not x]
        return dense

    def finish(self) -> None:
        for x, dense in self._back:
            x.copy_(dense)


class _AsTheyAre(_Dense):
    """Tensors that are known to be contiguous, as they are."""

    def of(self, tensors: Sequence[Tensor], *, written: bool = True) -> list[Tensor]:
        return list(tensors)


def _on_cuda(name: str) -> Callable[..., None]:
    """The Triton kernel of an op, for the dispatcher and for `_launch`.

    It gets a table of addresses, which do not say of what device they are, and the dispatcher comes here when any
    tensor is on CUDA. So all are looked at: one that is elsewhere is a ValueError, and not a fault of the device later.
    A tensor costs 30 ns, of some 5 us that its row of the table takes. Where there are facts, they say it of the lists.
    """
    names = [argument.name for argument in getattr(torch.ops.fastpar, name).default._schema.arguments]

    def run(*arguments: Any, facts: Facts | None = None) -> None:
        wanted = arguments[0][0].get_device() if arguments[0] else -1
        for argument, value in zip(names, arguments, strict=True):
            tensors = [value] if isinstance(value, Tensor) else value if facts is None else None
            if not (isinstance(tensors, list) and tensors and isinstance(tensors[0], Tensor)):
                continue
            if set(map(Tensor.get_device, tensors)) != {wanted}:
                index = next(i for i, x in enumerate(tensors) if x.get_device() != wanted)
                place = argument if isinstance(value, Tensor) else f"{argument}[{index}]"
                raise ValueError(
                    f"{name}: {place} must be on the device of params[0], {arguments[0][0].device}, "
                    f"got {tensors[index].device}"
                )
        seen = None if facts is None else (facts.dtypes, facts.addresses)
        getattr(triton("optimizer"), name)(*arguments, seen=seen)

    return run


_ON_CUDA = {name: _on_cuda(name) for name in _STEPS} if HAS_TRITON else {}


def _launch(name: str, kernels: Any, step: Step, facts: Facts | None, *between: Any, numbers: tuple[Any, ...]) -> None:
    """Calls an op with the lists of `step`, then grad_factor, found_inf, `between`, and the numbers."""
    dense = _Dense() if facts is None else _AsTheyAre()
    outputs = [(i, x) for i, x in enumerate(step.outputs or ()) if x is not None]
    rounding: list[int] = []
    if step.stochastic is not None:
        origins = zip(step.stochastic.keys, step.stochastic.starts, strict=True)
        rounding = [step.stochastic.seed, *itertools.chain.from_iterable(origins)]
    factor = step.grad_factor
    is_tensor = isinstance(factor, Tensor)
    arguments = (
        dense.of(step.params),
        dense.of(step.grads, written=False),
        *(dense.of(states) for states in step.states or ((),)),
        *(dense.of(scales) for scales in step.scales or ((),)),
        dense.of([x for _, x in outputs]),
        dense.of(step.remainders or ()),
        factor if is_tensor else None,
        step.found_inf,
        *between,
        [i for i, _ in outputs],
        rounding,
        1.0 if is_tensor else factor,
        *numbers,
    )
    if isinstance(kernels, ModuleType):
        _ON_CUDA[name](*arguments, facts=facts)
    else:
        getattr(kernels, name)(*arguments)
    dense.finish()
    if not torch.compiler.is_compiling():  # graphs that have saved the old values are to say so
        torch.autograd.graph.increment_version([*step.params, *(x for _, x in outputs)])


# ---- fakes -----------------------------------------------------------------------------------------------------------


def _changes_its_arguments(*arguments: Any) -> None:
    """The fake of every op here: there is no result."""


for _name in _STEPS:
    torch.library.register_fake(f"fastpar::{_name}", _changes_its_arguments)
    if HAS_TRITON:
        torch.library.impl(f"fastpar::{_name}", "cuda", _ON_CUDA[_name])


# ---- steps without checks, for `fastpar.optim`, whose tensors fit together -------------------------------------------


def run_adamw(
    arguments: Step,
    step: int | Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    facts: Facts | None = None,
) -> None:
    if not arguments.params:
        return
    kernels = implementation(arguments.params[0])
    if hasattr(kernels, "run_adamw"):  # plain PyTorch, which takes the arguments as they are
        kernels.run_adamw(arguments, step, lr, betas, eps, weight_decay)
        return
    step_tensor = step if isinstance(step, Tensor) else None
    count = 1 if step_tensor is not None else step_number(step)
    _launch("adamw_step", kernels, arguments, facts, step_tensor, numbers=(count, lr, *betas, eps, weight_decay))


def run_sgd(
    arguments: Step,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    facts: Facts | None = None,
) -> None:
    if not arguments.params:
        return
    kernels = implementation(arguments.params[0])
    if hasattr(kernels, "run_sgd"):  # plain PyTorch, which takes the arguments as they are
        kernels.run_sgd(arguments, lr, momentum, dampening, weight_decay, nesterov, first)
        return
    _launch("sgd_step", kernels, arguments, facts, numbers=(lr, momentum, dampening, weight_decay, nesterov, first))


def run_lion(
    arguments: Step, lr: float, betas: tuple[float, float], weight_decay: float, facts: Facts | None = None
) -> None:
    if not arguments.params:
        return
    kernels = implementation(arguments.params[0])
    if hasattr(kernels, "run_lion"):  # plain PyTorch, which takes the arguments as they are
        kernels.run_lion(arguments, lr, betas, weight_decay)
        return
    _launch("lion_step", kernels, arguments, facts, numbers=(lr, *betas, weight_decay))


# ---- public ----------------------------------------------------------------------------------------------------------

_known = KnownFacts()
_SHARED = ("params", "grads", "outputs", "remainders")


def _check(op: Callable[..., None], step: Step, lists: dict[str, Any], numbers: dict[str, float]) -> Facts | None:
    """Raises what `checked` and `check_step` do; `lists` are the arguments that `checked` left out."""
    facts = facts_of(step)
    is_known = facts is not None and _known.has(facts)
    if not is_known:
        check_left_out(
            op, params=step.params, grads=step.grads, outputs=step.outputs, remainders=step.remainders, **lists
        )
    check_step(step, is_known=is_known, **numbers)
    if facts is not None and not is_known:
        _known.add(facts)
    return facts


@torch.no_grad()
@checked(meta=True, but=(*_SHARED, "exp_avgs", "exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales"))
def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int | Tensor,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_factor: Tensor | float = 1.0,
    found_inf: Tensor | None = None,
    outputs: Sequence[Tensor | None] | None = None,
    remainders: Sequence[Tensor] | None = None,
    stochastic: StochasticRounding | None = None,
    exp_avg_scales: Sequence[Tensor] = (),
    exp_avg_sq_scales: Sequence[Tensor] = (),
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019) on many tensors, in place, in one pass.

        params             float32, bfloat16 or float16, in any mix
        grads              float32, bfloat16 or float16, of their shapes; need not have their dtypes
        exp_avgs           m, all float32, all bfloat16, or all uint8 codes of 8-bit blocks
        exp_avg_sqs        v, of the same dtype
        exp_avg_scales     float32 [ceil(numel / 256)] each, for uint8 codes; exp_avg_sq_scales likewise
        step               number of this step, from 1; a Tensor (one element) is read on the device
        grad_factor        multiplied into the gradients in float32: unscaling times clipping, -1 to maximise; a Tensor
                           (one float32) is read on the device, without synchronising the host
        found_inf          one float32: if it is not zero nothing changes at all
        outputs            bfloat16 or float16 (or None) per float32 parameter: gets it, rounded to nearest
        remainders         int16 per parameter, which must be bfloat16: the float32 master that is updated is
                           (bits of the parameter << 16) + remainder, exactly
        stochastic         round bfloat16 parameters (without remainders) and states stochastically; others to nearest

        g = grad * grad_factor                       all in float32, bias corrections in float64
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = p * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

    No collective. Bytes per element: those of the gradient and outputs, and twice those of parameter, remainder and
    states; 28 in float32, 10.06 with bfloat16 parameters and gradients and 8-bit states. Non-contiguous tensors are
    copied there and back.

    On CPU a C++ kernel; on CUDA a Triton kernel; elsewhere `fastpar.reference`. On an H200 the kernel alone has
    4.2 TB/s, torch's fused one 3.5 with float32 and 2.8 with bfloat16; but a call takes the host longer than torch's,
    which shows where the device waits for it. fastpar.kernels.optimizer has the numbers.

    Worked example: p = 1, g = 0.5, m = v = 0, step 1, lr = 0.1, betas (0.9, 0.999), eps = 0, weight_decay = 0.1:
    m = 0.05, v = 0.00025, and since m / 0.1 = 0.5 = sqrt(v / 0.001), p = 1 * 0.99 - 0.1 = 0.89.

    Raises:
        TypeError: a dtype that is not named above.
        ValueError: lists of different lengths, shapes or devices that differ, numbers out of range.
    """
    states, scales = (exp_avgs, exp_avg_sqs), (exp_avg_scales, exp_avg_sq_scales)
    arguments = Step(
        params,
        grads,
        states,
        scales,
        grad_factor,
        found_inf,
        outputs,
        remainders,
        stochastic,
        ("exp_avgs", "exp_avg_sqs"),
    )
    lists = {
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "exp_avg_scales": exp_avg_scales,
        "exp_avg_sq_scales": exp_avg_sq_scales,
    }
    facts = _check(adamw_step, arguments, lists, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
    check_betas(betas)
    run_adamw(arguments, step, lr, betas, eps, weight_decay, facts)


@torch.no_grad()
@checked(meta=True, but=_SHARED)
def sgd_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    grad_factor: Tensor | float = 1.0,
    found_inf: Tensor | None = None,
    outputs: Sequence[Tensor | None] | None = None,
    remainders: Sequence[Tensor] | None = None,
    stochastic: StochasticRounding | None = None,
    momentum_scales: Sequence[Tensor] = (),
) -> None:
    """One step of stochastic gradient descent on many tensors, in place, in one pass; conventions of torch.optim.SGD.

        momentum_buffers   b: one per parameter, or none where momentum is 0; momentum_scales as in `adamw_step`
        first              the buffers are new: they are written and not read

        g = grad * grad_factor + weight_decay * p
        b = momentum * b + (1 - dampening) * g            or g, the first time
        p = p - lr * b      nesterov: p - lr * (g + momentum * b)      without momentum: p - lr * g

    Everything else is as in `adamw_step`.

    Worked example: p = 1, g = 0.5, b = 1, lr = 0.5, momentum = 0.5, weight_decay = 0.5: g becomes 1, b = 1.5, p = 0.25;
    with nesterov p = 1 - 0.5 * (1 + 0.75) = 0.125.
    """
    check_momentum(momentum, momentum_buffers, nesterov)
    states, scales = ((momentum_buffers,), (momentum_scales,)) if momentum else ((), ())
    arguments = Step(
        params, grads, states, scales, grad_factor, found_inf, outputs, remainders, stochastic, ("momentum_buffers",)
    )
    facts = _check(sgd_step, arguments, {}, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
    run_sgd(arguments, lr, momentum, dampening, weight_decay, nesterov, first, facts)


@torch.no_grad()
@checked(meta=True, but=(*_SHARED, "exp_avgs", "exp_avg_scales"))
def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    grad_factor: Tensor | float = 1.0,
    found_inf: Tensor | None = None,
    outputs: Sequence[Tensor | None] | None = None,
    remainders: Sequence[Tensor] | None = None,
    stochastic: StochasticRounding | None = None,
    exp_avg_scales: Sequence[Tensor] = (),
) -> None:
    """One step of Lion (Chen et al. 2023) on many tensors, in place, in one pass.

        g = grad * grad_factor
        p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m = m + (1 - beta2) * (g - m)

    sign(0) is 0. Everything else is as in `adamw_step`.

    Worked example: p = 1, g = -2, m = 0.1, lr = 0.25, betas (0.5, 0.5), weight_decay = 1: the sign is that of -0.95, so
    p = 0.75 + 0.25 = 1, and m = -0.95.
    """
    arguments = Step(
        params,
        grads,
        (exp_avgs,),
        (exp_avg_scales,),
        grad_factor,
        found_inf,
        outputs,
        remainders,
        stochastic,
        ("exp_avgs",),
    )
    lists = {"exp_avgs": exp_avgs, "exp_avg_scales": exp_avg_scales}
    facts = _check(lion_step, arguments, lists, {"lr": lr, "weight_decay": weight_decay})
    check_betas(betas)
    run_lion(arguments, lr, betas, weight_decay, facts)
