"""Which devices an op has kernels for."""

from __future__ import annotations

import importlib.util

from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_kernels(x: Tensor) -> bool:
    """Whether an op with a C++ kernel for CPU and a Triton kernel for CUDA can run where `x` is."""
    return x.device.type == "cpu" or (x.device.type == "cuda" and _HAS_TRITON)
