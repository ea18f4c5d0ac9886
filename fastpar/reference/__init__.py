"""Plain-PyTorch versions of the ops, same signatures: for debugging, for tests, and for devices without kernels."""

from fastpar.reference.cross_entropy import vocab_parallel_cross_entropy
from fastpar.reference.dropout import sharded_dropout
from fastpar.reference.linear_loss import linear_cross_entropy
from fastpar.reference.rms_norm import rms_norm
from fastpar.reference.swiglu import swiglu

__all__ = ["linear_cross_entropy", "rms_norm", "sharded_dropout", "swiglu", "vocab_parallel_cross_entropy"]
