"""AdamW, SGD with momentum, and Lion: torch.optim's constructors, one pass over memory per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fastpar.arguments import checked
from fastpar.ops.optimizer import Step, run_adamw, run_lion, run_sgd
from fastpar.optim._batches import Batch, States
from fastpar.optim.fused import FusedOptimizer


def _check_lr(lr: float | Tensor) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one, got shape {tuple(lr.shape)}")


def _not_negative(**values: float | Tensor) -> None:
    for name, value in values.items():
        if not float(value) >= 0.0:
            raise ValueError(f"{name} must not be negative, got {value}")


def _check_betas(betas: tuple[float, float]) -> None:
    if not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas must be in [0, 1), got {betas}")


class AdamW(FusedOptimizer):
    """torch.optim.AdamW in one pass: unscaling, clipping, update and low-precision copy together.

    params                 float32, bfloat16 or float16; plain tensors and DTensors in any mix (updated where they are,
                           without communication), zero-size shards and parameters without a gradient too
    lr, betas, eps,        as in torch.optim.AdamW; per group, so schedulers and groups work
    weight_decay, maximize
    master                 None: parameters are updated in their own dtype.
                           "float32": 16-bit parameters have a float32 master in the state, and get it rounded to
                           nearest; 4 bytes more per parameter.
                           "split": bfloat16 parameters have the 16 bits that complete their float32 master in the
                           state (int16, exact); 2 bytes more, and the master is what it would be with "float32".
                           Masters follow what is written to parameters in place between steps (split ones by up to
                           half a unit of bfloat16), and, in the first two steps and every 64th, and the 64 after one
                           that has found something, what torch does not count (`p.data.clamp_()`, numpy).
    state_dtype            torch.float32, torch.bfloat16, or "8bit": blocks of 256 codes and one scale; 8, 4 or 2.03
                           bytes per parameter for both moments
    stochastic_rounding    how bfloat16 parameters without master and bfloat16 states are rounded: to nearest, a
                           change of less than half a unit is lost at every step. The bits depend on the seed, the step
                           and the element's place in the whole parameter, not on how it is sharded by rows.

    Attributes that step() reads and then sets to None:
        grad_factor        float or one float32: multiplied into the gradients (unscaling times clipping)
        found_inf          one float32: not zero skips the step: nothing changes, no step is counted
    and one that stays:
        outputs            {parameter: bfloat16 or float16 tensor that gets the float32 parameter, rounded to nearest}

    torch.amp.GradScaler sets its own grad_scale and found_inf, and nothing is unscaled in a pass of its own. State
    dictionaries have torch's keys ("step", "exp_avg", "exp_avg_sq"; beside them "master" or "remainder"), load from
    torch's AdamW, and convert between state dtypes. 8-bit states are in them as float32, which is exact and fits any
    layout, but takes 8 bytes per parameter (`fastpar.optim._state_formats` has the proof).
    """

    _states = ("exp_avg", "exp_avg_sq")
    _signed = (True, False)

    @checked(computed=False, but=("params",))
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master: str | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        _check_lr(lr)
        _not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            master=master,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )

    def _update(self, group: dict[str, Any], batch: Batch, arguments: Step) -> None:
        run_adamw(arguments, batch.number, float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])


class SGD(FusedOptimizer):
    """torch.optim.SGD in one pass; `master`, `state_dtype` and the attributes as in `AdamW`.

    The state is "momentum_buffer", and "step", which torch's has not (it seeds stochastic rounding).
    """

    _states = ("momentum_buffer",)
    _signed = (True,)

    @checked(computed=False, but=("params",))
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master: str | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        _check_lr(lr)
        _not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master=master,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._states if group["momentum"] != 0.0 else ()

    def _are_new(self, states: States) -> list[bool]:
        return [state.get("momentum_buffer") is None for state in states]

    def _update(self, group: dict[str, Any], batch: Batch, arguments: Step) -> None:
        momentum, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
        run_sgd(arguments, float(group["lr"]), momentum, dampening, group["weight_decay"], nesterov, batch.is_new)


class Lion(FusedOptimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms") in one pass; the rest as in `AdamW`.

    One state, and steps of the same size in every element: use a third to a tenth of AdamW's lr, and as much more
    weight decay.
    """

    _states = ("exp_avg",)
    _signed = (True,)

    @checked(computed=False, but=("params",))
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        _check_lr(lr)
        _not_negative(lr=lr, weight_decay=weight_decay)
        _check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            master=master,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )

    def _update(self, group: dict[str, Any], batch: Batch, arguments: Step) -> None:
        run_lion(arguments, float(group["lr"]), group["betas"], group["weight_decay"])
