"""One step of an optimizer over many tensors: its arguments as one object, and their checks.

Beside them those of the parameters that an optimizer is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fastpar.contracts import optimizer_formats as formats

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
OUTPUT_DTYPES = (torch.bfloat16, torch.float16)


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


def _one_of(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _check_list(name: str, found: Sequence[Tensor | None], step: Step, dtypes: Sequence[torch.dtype]) -> None:
    """Check for as many tensors as there are parameters, of their shapes and device, and of one of the dtypes."""
    if len(found) != len(step.params):
        raise ValueError(f"{name} must have one entry per parameter ({len(step.params)}), got {len(found)}")
    # Lists of thousands are compared as wholes first, and gone through only for the text of the error.
    params, present = step.params, cast("Sequence[Tensor]", found)
    if found is step.outputs:
        params = [p for x, p in zip(found, params, strict=True) if x is not None]
        present = [x for x in found if x is not None]
    if (
        {x.dtype for x in present} <= {*dtypes}
        and (present is params or [x.shape for x in present] == [p.shape for p in params])
        and {x.device for x in present} <= {step.params[0].device}
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


def check_step(step: Step, *, is_known: bool = False, **positive: float) -> None:
    """Raises TypeError or ValueError with the values if the arguments do not fit together.

    is_known: that the lists of tensors do is known (see fastpar/contracts/optimizer_facts.py).
    """
    for name, value in positive.items():
        if not (value >= 0.0 and math.isfinite(value)):
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    if not step.params:
        return
    device = step.params[0].device
    if not is_known:
        _check_lists(step)
    if isinstance(step.grad_factor, Tensor):
        _check_scalar("grad_factor", step.grad_factor, device)
    if step.found_inf is not None:
        _check_scalar("found_inf", step.found_inf, device)
    if not is_known:
        _check_memory(step)
    if step.stochastic is not None:
        counts = len(step.stochastic.keys), len(step.stochastic.starts)
        if counts != (len(step.params),) * 2:
            raise ValueError(f"stochastic needs one key and one start per parameter ({len(step.params)}), got {counts}")


def _check_lists(step: Step) -> None:
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


def _check_memory(step: Step) -> None:
    """Nothing is written to twice."""
    written = {"params": step.params, "outputs": step.outputs, "remainders": step.remainders}
    written |= dict(zip(step.state_names, step.states, strict=False))
    for name, tensors in written.items():
        if name != "outputs" and all(map(Tensor.is_contiguous, cast("Sequence[Tensor]", tensors or ()))):
            continue
        for i, x in enumerate(tensors or ()):
            if x is not None and _shares_elements(x):
                raise ValueError(
                    f"{name}[{i}] of shape {tuple(x.shape)} and stride {x.stride()} has elements that share memory, "
                    "and would be written to twice: clone() it"
                )


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


def checked_params(params: Any) -> list[Any]:
    """Parameters, pairs of names and parameters, or groups (dicts with "params"), as torch.optim takes them, in a list.

    Raises TypeError for anything else, ValueError for none.
    """
    if isinstance(params, (Tensor, str, bytes, dict)) or not isinstance(params, Iterable):
        raise TypeError(f"params must be an iterable of parameters or of groups of them, got {type(params).__name__}")
    found = list(params)
    if not found:
        raise ValueError("params must have at least one parameter, got none")
    for index, each in enumerate(found):
        named = isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)
        if isinstance(each, dict):
            check_group(each)
        elif not isinstance(each[1] if named else each, Tensor):
            raise TypeError(f"params must be parameters, got {type(each).__name__} at number {index}")
    return found


def check_group(group: Any, name: str = "params") -> None:
    """TypeError or ValueError unless it is a dict with parameters in it."""
    if not isinstance(group, dict):
        raise TypeError(f"{name} must be a dict with 'params', got {type(group).__name__}")
    if "params" not in group:
        raise ValueError(f"{name}: a group of parameters must have 'params', got {sorted(map(str, group))}")
