"""Plain-PyTorch versions of the ops, same signatures: for debugging, for tests, and for devices without kernels."""

from fastpar.reference.cross_entropy import vocab_parallel_cross_entropy
from fastpar.reference.dropout import sharded_dropout

__all__ = ["sharded_dropout", "vocab_parallel_cross_entropy"]
