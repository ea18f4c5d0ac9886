"""Optimizer steps in plain PyTorch, tensor by tensor, and the checks of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar.contracts import optimizer_formats as formats

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
OUTPUT_DTYPES = (torch.bfloat16, torch.float16)

# (param, grad, states) -> (new param, new states), all float32
Rule = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class StochasticRounding:
    """Round what is stored as bfloat16 up or down at random, by how near it is.

    seed    one per step: with the same seed, the same elements are rounded the same way
    keys    one number per tensor, so that tensors differ
    starts  per tensor, the index of its first element in the whole tensor that it is a part of (rows of a matrix [N, K]
            from row r on: r * K), so that a shard is rounded as the whole would be
    """

    seed: int
    keys: Sequence[int]
    starts: Sequence[int]


@dataclass(frozen=True)
class Step:
    """The arguments that all steps share. `states[k][i]` and `scales[k][i]` are the k-th state of params[i]."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    scales: Sequence[Sequence[Tensor]]
    grad_factor: Tensor | float
    found_inf: Tensor | None
    outputs: Sequence[Tensor | None] | None
    remainders: Sequence[Tensor] | None
    stochastic: StochasticRounding | None
    state_names: Sequence[str]


# ---- checks ----------------------------------------------------------------------------------------------------------


def _one_of(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _check_list(name: str, found: Sequence[Tensor | None], step: Step, dtypes: Sequence[torch.dtype]) -> None:
    """As many tensors as there are parameters, of their shapes and device, and of one of the dtypes."""
    if len(found) != len(step.params):
        raise ValueError(f"{name} must have one entry per parameter ({len(step.params)}), got {len(found)}")
    # Lists of thousands are compared as wholes first, and gone through only for the text of the error.
    present = [(x, p) for x, p in zip(found, step.params, strict=True) if x is not None]
    if (
        {x.dtype for x, _ in present} <= {*dtypes}
        and [x.shape for x, _ in present] == [p.shape for _, p in present]
        and len({x.device for x, _ in present} | {p.device for p in step.params[:1]}) == 1
    ):
        return
    for i, (x, param) in enumerate(zip(found, step.params, strict=True)):
        if x is None:
            continue
        if x.shape != param.shape:
            shape = tuple(param.shape)
            raise ValueError(f"{name}[{i}] must have the shape of params[{i}], {shape}, got {tuple(x.shape)}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}[{i}] must be {_one_of(dtypes)}, got {x.dtype}")
        if x.device != step.params[0].device:
            raise ValueError(f"{name}[{i}] must be on the device of params[0], {step.params[0].device}, got {x.device}")


def _check_states(step: Step) -> None:
    for name, states, scales in zip(step.state_names, step.states, step.scales, strict=False):
        _check_list(name, states, step, STATE_DTYPES)
        if not states:
            continue
        kinds = {x.dtype for x in states}
        if len(kinds) > 1 or kinds != {x.dtype for x in step.states[0]}:
            raise TypeError(f"the states of one call must have one dtype, got {sorted(map(str, kinds))} in {name}")
        wanted = len(states) if torch.uint8 in kinds else 0
        if len(scales) != wanted:
            raise ValueError(f"{name} of {states[0].dtype} needs {wanted} tensors of scales, got {len(scales)}")
        for i, (x, scale) in enumerate(zip(states, scales, strict=bool(wanted))):
            blocks = formats.num_blocks(x.numel())
            if scale.shape != (blocks,) or scale.dtype != torch.float32 or scale.device != x.device:
                raise ValueError(
                    f"the scales of {name}[{i}] must be {blocks} float32 on {x.device}, one per "
                    f"{formats.BLOCK} elements, got {scale.dtype} {tuple(scale.shape)} on {scale.device}"
                )


def _check_scalar(name: str, x: Tensor, device: torch.device) -> None:
    if x.numel() != 1 or x.dtype != torch.float32 or x.device != device:
        raise ValueError(f"{name} must be one float32 on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}")


def check_step(step: Step, **positive: float) -> None:
    """Raises TypeError or ValueError with the values if the arguments do not fit together."""
    for name, value in positive.items():
        if not (value >= 0.0 and math.isfinite(value)):
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    if not step.params:
        return
    device = step.params[0].device
    _check_list("params", step.params, step, DTYPES if step.remainders is None else (torch.bfloat16,))
    _check_list("grads", step.grads, step, DTYPES)
    _check_states(step)
    if step.outputs is not None:
        _check_list("outputs", step.outputs, step, OUTPUT_DTYPES)
        for i, (x, param) in enumerate(zip(step.outputs, step.params, strict=True)):
            if x is not None and param.dtype != torch.float32:
                raise TypeError(f"outputs[{i}] needs params[{i}] to be the float32 master, got {param.dtype}")
    if step.remainders is not None:
        _check_list("remainders", step.remainders, step, (torch.int16,))
    if isinstance(step.grad_factor, Tensor):
        _check_scalar("grad_factor", step.grad_factor, device)
    if step.found_inf is not None:
        _check_scalar("found_inf", step.found_inf, device)
    written = {"params": step.params, "outputs": step.outputs, "remainders": step.remainders}
    written |= dict(zip(step.state_names, step.states, strict=False))
    for name, tensors in written.items():
        for i, x in enumerate(tensors or ()):
            if x is not None and _shares_elements(x):
                raise ValueError(
                    f"{name}[{i}] of shape {tuple(x.shape)} and stride {x.stride()} has elements that share memory, "
                    "and would be written to twice: clone() it"
                )
    if step.stochastic is not None:
        counts = len(step.stochastic.keys), len(step.stochastic.starts)
        if counts != (len(step.params),) * 2:
            raise ValueError(f"stochastic needs one key and one start per parameter ({len(step.params)}), got {counts}")


def _shares_elements(x: Tensor) -> bool:
    """Whether two elements of a tensor may lie in one place."""
    if x.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def check_betas(betas: tuple[float, float]) -> None:
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must be in [0, 1), got {betas}")


def check_momentum(momentum: float, momentum_buffers: Sequence[Tensor], nesterov: bool) -> None:
    if momentum == 0.0 and (momentum_buffers or nesterov):
        raise ValueError("momentum_buffers and nesterov need a momentum, got momentum=0")


def step_number(step: int | Tensor) -> int:
    number = int(step)
    if number < 1:
        raise ValueError(f"step must be 1 for the first step and count up, got {number}")
    return number


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
