"""Mixed precision: which dtype is used where, and loss scaling.

Precision.bf16()     parameters bfloat16, gradients bfloat16 on the wire, float32 in the optimizer
LossScaler()         dynamic loss scaling whose decisions all ranks share
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run. None leaves what is there as it is.

    param    of the module's parameters, and so of what is gathered and computed with
    compute  of autocast in forward; None: no autocast
    reduce   of gradients on the wire; sums are taken in float32 whatever this is. None: the gradient's own
    master   of what the optimizer updates, kept apart where it is not the parameter's; None: the parameters themselves
    full     patterns (fnmatch) of the names of parameters that stay in master's dtype (None: their own), such as
             ("*.norm.weight", "*.bias"); one that matches nothing is an error where it is applied

    Raises TypeError and ValueError for dtypes and combinations that make no sense.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    full: Sequence[str] = ()

    def __post_init__(self) -> None:
        for field in ("param", "compute", "reduce", "master"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, torch.dtype):
                raise TypeError(f"{field} must be a torch.dtype or None, got {value!r}")
            if value is not None and value not in _DTYPES:
                raise ValueError(f"{field} must be one of {', '.join(map(str, _DTYPES))} or None, got {value}")
        if isinstance(self.full, str):
            raise TypeError(
                f"full must be a sequence of patterns, got the string {self.full!r}: write ({self.full!r},)"
            )
        object.__setattr__(self, "full", tuple(self.full))
        if self.compute is torch.float32:
            raise ValueError("compute must be torch.bfloat16, torch.float16 or None: autocast to float32 does nothing")
        if self.compute is not None and self.param not in (None, torch.float32):
            raise ValueError(
                f"compute={self.compute} is for float32 parameters, but param is {self.param}: parameters of 16 bits "
                "are computed with as they are; leave compute out"
            )
        if self.master is not None and self.master.itemsize < (self.param or self.master).itemsize:
            raise ValueError(f"master ({self.master}) must not be narrower than param ({self.param})")
        if self.master in (torch.bfloat16, torch.float16) and self.param != self.master:
            raise ValueError(f"master={self.master} needs param={self.master}, got param={self.param}")

    @staticmethod
    def fp32() -> Precision:
        """Everything in float32, as without a policy."""
        return Precision(torch.float32, None, torch.float32, torch.float32)

    @staticmethod
    def bf16(full: Sequence[str] = ()) -> Precision:
        """Parameters and their gradients in bfloat16, float32 copies in the optimizer."""
        return Precision(torch.bfloat16, None, torch.bfloat16, torch.float32, full)

    @staticmethod
    def fp16(full: Sequence[str] = ()) -> Precision:
        """Parameters and their gradients in float16, float32 copies in the optimizer; use it with a LossScaler."""
        return Precision(torch.float16, None, torch.float16, torch.float32, full)

    def is_full(self, name: str) -> bool:
        """Whether a parameter of this name stays in master's dtype."""
        return any(fnmatchcase(name, pattern) for pattern in self.full)

    def param_dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """The dtype in which the module holds the parameter `name`, whose own is `own`. Only floating dtypes change."""
        wanted = self.master if self.is_full(name) else self.param
        return own if wanted is None or not own.is_floating_point else wanted

    def master_dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """The dtype in which the optimizer updates it."""
        return self.param_dtype(name, own) if self.master is None or not own.is_floating_point else self.master

    def reduce_dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """The dtype of its gradient on the wire."""
        gradient = self.param_dtype(name, own)
        return gradient if self.reduce is None or self.is_full(name) else self.reduce

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError for a pattern of `full` that matches none of the names."""
        for pattern in self.full:
            if not any(fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(list(names)[:4])
                raise ValueError(f"full: {pattern!r} matches no parameter; the names are {shown}, ...")

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """The context of forward: torch.autocast with `compute`, or nothing."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.compute)
