"""Ops with kernels: the launcher, the fake, the autograd and the public function of each family in a file of its own.

Names are looked up on first use, so that a part of fastpar that needs no kernel works without the compiled library.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastpar.ops.cross_entropy import vocab_parallel_cross_entropy
    from fastpar.ops.dropout import sharded_dropout

_HOME = {
    "sharded_dropout": "fastpar.ops.dropout",
    "vocab_parallel_cross_entropy": "fastpar.ops.cross_entropy",
}
__all__ = ["sharded_dropout", "vocab_parallel_cross_entropy"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastpar.ops' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
