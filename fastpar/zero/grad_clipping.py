"""Whether a step is taken, and by how much its gradients are clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.clip import GradSum, NormLayout
from fastpar.comm import Communicator
from fastpar.zero.groups import Groups, local
from fastpar.zero.sharded_param import ShardedParam, name_nonfinite


class GradClipping:
    """Whether a step is taken, and by how much its gradients are clipped: decided once for all optimizers.

    max_norm        of all gradients; None: they are not clipped
    skip_nonfinite  whether a step with a NaN or an infinity is skipped

    norm     of the last step's gradients, exact
    skipped  steps
    report   which gradients were not finite, and where, of the last step
    """

    def __init__(self, max_norm: float | None, *, skip_nonfinite: bool) -> None:
        self.max_norm, self.skip_nonfinite = max_norm, skip_nonfinite
        self.skipped = 0
        self.report = ""
        self._factor: Tensor | None = None
        self._layout: NormLayout | None = None
        self._norm: Tensor | Callable[[], Tensor] | None = None

    @property
    def norm(self) -> Tensor | None:
        if callable(self._norm):  # taken of the sum when it is read
            self._norm = self._norm()
        return self._norm

    @property
    def needs_sum(self) -> bool:
        return self.max_norm is not None or self.skip_nonfinite

    def sum(
        self,
        params: Sequence[ShardedParam],
        groups: Groups,
        *,
        is_final: bool = True,
        comms: Sequence[Communicator] | None = None,
    ) -> GradSum | None:
        """The sum of squares; None where ranks of `comms` could not tell each other with it that their gradients are
        not final, on all of them. Collective."""
        if self._layout is None:
            self._layout = NormLayout(groups.mesh, None)
        optim_params = [param.optim_param for param in params]
        grads = [x.grad for x in optim_params]
        return GradSum.of_checked(optim_params, grads, self._layout, is_final=is_final, comms=comms)

    def prepare(self, total: GradSum | None, params: Sequence[ShardedParam], groups: Groups, optimizer: Any) -> bool:
        """After the reduction, with its sum of squares; False where the step is to be skipped."""
        self._factor, self.report = None, ""
        if total is None:
            return True
        unscale = _unscaling(optimizer)
        self._norm = lambda: total.norm(_norm_dtype(params)) * unscale
        if self.skip_nonfinite and any(total.sums.tolist()[:2]):
            self.skipped += 1
            self.report = name_nonfinite(params, groups)
            return False
        if self.max_norm is not None:
            # What the update will multiply with has the loss scale already.
            self._factor = total.clip_factor(self.max_norm, scale=unscale, dtype=_norm_dtype(params)) / unscale
        return True

    def hand_over(self, optimizer: Any, optim_params: Sequence[nn.Parameter]) -> None:
        """Clip the gradients of what it updates: in the update's own pass where the optimizer can do that."""
        if not hasattr(optimizer, "grad_factor"):
            if self._factor is not None and self._factor < 1.0:
                grads = [local(p.grad) for p in optim_params if p.grad is not None]
                if grads:
                    torch._foreach_mul_(grads, self._factor)
        elif self._factor is not None:
            pending = 1.0 if optimizer.grad_factor is None else optimizer.grad_factor
            optimizer.grad_factor = self._factor * pending


def _norm_dtype(params: Sequence[ShardedParam]) -> torch.dtype:
    return torch.float64 if any(x.optim_param.dtype == torch.float64 for x in params) else torch.float32


def _unscaling(optimizer: Any) -> float | Tensor:
    """The factor that the optimizer will multiply gradients with: a scaler may leave unscaling to the update."""
    if getattr(optimizer, "grad_scale", None) is not None:
        scale: Tensor = optimizer.grad_scale
        return 1.0 / scale.float()
    factor = getattr(optimizer, "grad_factor", None)
    return 1.0 if factor is None else factor
