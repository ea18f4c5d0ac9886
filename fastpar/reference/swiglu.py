"""SwiGLU in plain PyTorch, and the checks of its arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_arguments(gate_up: Tensor, up: Tensor | None) -> None:
    """Raises TypeError or ValueError with the values if the tensors do not fit `swiglu`."""
    name = "gate_up" if up is None else "gate_up (the gate, beside up)"
    if gate_up.dtype not in DTYPES:
        raise TypeError(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {gate_up.dtype}")
    if gate_up.dim() == 0:
        raise ValueError(f"{name} must have at least one dim, got a scalar")
    if up is None:
        if gate_up.shape[-1] % 2:
            raise ValueError(
                f"the last dim of gate_up must be even, the gate's features and then up's; got {tuple(gate_up.shape)}"
            )
        return
    if up.dtype != gate_up.dtype:
        raise TypeError(f"gate and up must have one dtype, got {gate_up.dtype} and {up.dtype}")
    if up.shape != gate_up.shape:
        raise ValueError(f"gate and up must have one shape, got {tuple(gate_up.shape)} and {tuple(up.shape)}")
    if up.device != gate_up.device:
        raise ValueError(f"gate and up must be on one device, got {gate_up.device} and {up.device}")


def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """See `fastpar.ops.swiglu`."""
    check_arguments(gate_up, up)
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    compute = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return (F.silu(gate.to(compute)) * up.to(compute)).to(gate.dtype)
