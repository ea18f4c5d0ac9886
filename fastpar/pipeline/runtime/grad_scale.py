"""Whether the ranks of a pipeline step with gradients that were scaled alike.

torch.nn.utils.clip_grad_norm_(pipe.parameters(), ...) takes the norm of a rank's own stages, and scales the gradients
of every rank by another number: steps that one process would not make. torch.amp.GradScaler comes to other scales where
one rank has skipped a step. So a few elements of the gradients are noted
when a run has ended (or ZeRO has reduced them) and looked at when an optimizer steps: where all of them have the same
factor, the ranks compare it before the next run. What else is done to gradients, such as clipping by value, has none.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

PARAMETERS, ELEMENTS = 4, 256  # so many are looked at, and elements of each, of which three are noted
TOLERANCE = 1e-2  # gradients of 16 bits are rounded when they are scaled


class GradScale:
    """Of one rank: `begin` with its gradients as they are, `take` the factor by which a step found them scaled.

    Only `take` reads numbers on the host, which would wait for a device.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[Tensor], Tensor, Tensor]] = []  # parameter, places, values
        self._pairs: list[tuple[Tensor, Tensor]] = []  # the values at those places in the step, and before
        _WATCHES.add(self)
        _look_in_steps()

    def begin(self, parameters: Iterable[Tensor]) -> None:
        self._noted, self._pairs = [], []
        own = [p for p in parameters if p.requires_grad]
        for parameter in own[:: max(1, math.ceil(len(own) / PARAMETERS))]:
            grad = _grad_of(parameter)
            if grad is None or not grad.numel():
                continue
            places = torch.arange(0, grad.numel(), math.ceil(grad.numel() / ELEMENTS), device=grad.device)
            order = grad[places].abs().argsort(descending=True)
            places = places[order[[0, len(order) // 4, len(order) // 2]]]
            self._noted.append((weakref.ref(parameter), places, grad[places].clone()))

    def look(self, optimizer: Optimizer) -> None:
        """Before the first step after `begin` of an optimizer that has a parameter of these."""
        noted = [(parameter, places, values) for ref, places, values in self._noted if (parameter := ref()) is not None]
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if noted else set()
        if not any(id(parameter) in stepped for parameter, _, _ in noted):
            return
        self._noted = []
        grads = [_grad_of(parameter) for parameter, _, _ in noted]
        if not any(grad is None for grad in grads):
            self._pairs = [(grad[places], x) for grad, (_, places, x) in zip(grads, noted, strict=True)]  # type: ignore[index]

    def take(self) -> float | None:
        """The factor of the last step, once; None where there was none."""
        pairs = [(now.double().cpu(), then.double().cpu()) for now, then in self._pairs]
        self._pairs = []
        each = [now / then for now, then in pairs if bool((then != 0).all())]
        if len(each) < 2:
            return None
        factors = torch.cat(each)
        factor = float(factors.median())
        return factor if factor and float((factors / factor - 1).abs().max()) <= TOLERANCE else None


def compare_factors(factors: Sequence[float | None]) -> None:
    """Raises ValueError where the ranks, in their order, have scaled gradients by different numbers."""
    known = {rank: factor for rank, factor in enumerate(factors) if factor is not None}
    if known and max(known.values()) - min(known.values()) > TOLERANCE * max(map(abs, known.values())):
        each = ", ".join(f"by {factor:.4g} on rank {rank}" for rank, factor in known.items())
        raise ValueError(
            f"the last step's gradients were scaled differently on the ranks of the pipeline ({each}): "
            "torch.nn.utils.clip_grad_norm_ takes the norm of a rank's own stages. Write "
            "fp.clip_grad_norm_(pipe.parameters(), max_norm, mesh=mesh), whose norm is the whole model's, or give "
            "fp.zero.shard or the optimizer of fp.optim max_norm; and fp.LossScaler(mesh=mesh) in the place of torch's "
            "GradScaler, by which ranks skip steps alone. The weights have been updated by such gradients"
        )


_WATCHES: weakref.WeakSet[GradScale] = weakref.WeakSet()


def _look(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_WATCHES):
            watch.look(optimizer)


@functools.cache
def _look_in_steps() -> None:
    register_optimizer_step_pre_hook(_look)


def _grad_of(parameter: Tensor) -> Tensor | None:
    """The elements of its gradient that this rank has; None where there is none, or none to be read yet."""
    try:
        grad = parameter.grad
    except RuntimeError:  # ZeRO reduces it later
        return None
    grad = grad._local_tensor if isinstance(grad, DTensor) else grad
    return None if grad is None or grad.is_sparse else grad.detach().flatten()
