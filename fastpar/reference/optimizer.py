"""Optimizer steps in plain PyTorch, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastpar.contracts import optimizer_formats as formats
from fastpar.contracts.optimizer import Step, StochasticRounding, check_betas, check_momentum, check_step, step_number

# (param, grad, states) -> (new param, new states), all float32
Rule = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


# ---- one tensor ------------------------------------------------------------------------------------------------------


def _store(value: Tensor, into: Tensor, random: Tensor | None) -> None:
    """Writes float32 into a tensor of any float dtype, rounding bfloat16 stochastically if there are random bits."""
    if random is not None and into.dtype == torch.bfloat16:
        value = formats.round_stochastically(value.reshape(-1), random.to(value.device)).view(value.shape)
    into.copy_(value)


def _run(step: Step, rule: Rule, signed: Sequence[bool]) -> None:
    """Every tensor: widen, apply the rule, narrow. Nothing changes if found_inf is not zero."""
    if step.found_inf is not None and bool(step.found_inf):
        return
    for i, param in enumerate(step.params):
        randoms: tuple[Tensor | None, ...] = (None, None, None)
        if step.stochastic is not None:
            s = step.stochastic
            randoms = formats.random_bits(s.seed, s.keys[i], s.starts[i], param.numel())
        master = param.float() if step.remainders is None else formats.join_master(param, step.remainders[i])
        states = [
            formats.dequantise(s[i], scale[i], signed=sign) if s[i].dtype == torch.uint8 else s[i].float()
            for s, scale, sign in zip(step.states, step.scales, signed, strict=True)
            if s
        ]
        master, states = rule(master, step.grads[i].float() * step.grad_factor, states)
        for k, state in enumerate(states):
            into = step.states[k][i]
            if into.dtype == torch.uint8:
                codes, scale = formats.quantise(state, signed=signed[k])
                into.copy_(codes)
                step.scales[k][i].copy_(scale)
            else:
                _store(state, into, randoms[1 + k])
        if step.remainders is not None:
            param_bits, remainder = formats.split_master(master)
            param.copy_(param_bits)
            step.remainders[i].copy_(remainder)
        else:
            _store(master, param, randoms[0])
        output = step.outputs[i] if step.outputs is not None else None
        if output is not None:
            output.copy_(master)


# ---- rules -----------------------------------------------------------------------------------------------------------


def run_adamw(
    arguments: Step, step: int | Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    count = step_number(step)
    step_size = lr / (1.0 - betas[0] ** count)
    root = math.sqrt(1.0 - betas[1] ** count)

    def rule(p: Tensor, g: Tensor, old: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        m = old[0] + (1.0 - betas[0]) * (g - old[0])
        v = betas[1] * old[1] + (1.0 - betas[1]) * g * g
        return p * (1.0 - lr * weight_decay) - step_size * (m / (v.sqrt() / root + eps)), [m, v]

    _run(arguments, rule, signed=(True, False))


def run_sgd(
    arguments: Step, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, first: bool
) -> None:
    def rule(p: Tensor, g: Tensor, old: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        g = g + weight_decay * p
        if not old:
            return p - lr * g, []
        buffer = g if first else momentum * old[0] + (1.0 - dampening) * g
        return p - lr * (g + momentum * buffer if nesterov else buffer), [buffer]

    _run(arguments, rule, signed=(True,) if arguments.states else ())


def run_lion(arguments: Step, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    def rule(p: Tensor, g: Tensor, old: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        mean = betas[0] * old[0] + (1.0 - betas[0]) * g
        direction = torch.where(mean.isnan(), mean, mean.sign())  # torch's sign of NaN is 0, which would hide it
        return p * (1.0 - lr * weight_decay) - lr * direction, [old[0] + (1.0 - betas[1]) * (g - old[0])]

    _run(arguments, rule, signed=(True,))


# ---- public ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
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
    """See `fastpar.ops.adamw_step`."""
    names, scales = ("exp_avgs", "exp_avg_sqs"), (exp_avg_scales, exp_avg_sq_scales)
    states = (exp_avgs, exp_avg_sqs)
    arguments = Step(params, grads, states, scales, grad_factor, found_inf, outputs, remainders, stochastic, names)
    check_step(arguments, lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    run_adamw(arguments, step, lr, betas, eps, weight_decay)


@torch.no_grad()
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
    """See `fastpar.ops.sgd_step`."""
    check_momentum(momentum, momentum_buffers, nesterov)
    states, scales = ((momentum_buffers,), (momentum_scales,)) if momentum else ((), ())
    arguments = Step(
        params, grads, states, scales, grad_factor, found_inf, outputs, remainders, stochastic, ("momentum_buffers",)
    )
    check_step(arguments, lr=lr, momentum=momentum, weight_decay=weight_decay)
    run_sgd(arguments, lr, momentum, dampening, weight_decay, nesterov, first)


@torch.no_grad()
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
    """See `fastpar.ops.lion_step`."""
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
    check_step(arguments, lr=lr, weight_decay=weight_decay)
    check_betas(betas)

    run_lion(arguments, lr, betas, weight_decay)
